"""The rates of a run that was measured, from its own metrics and journal; and its wall time, to compare with.

What is taken, start-up excluded (the first step, in which everything runs for the first time):

- updates of critic and actor, and values: seconds for each token of a step, the mean over the run. A run's steps are of
  nearly one size, so a part that does not grow with tokens cannot be told from the rest;
- an engine: seconds of work of each decode step and of each computed token, least squares over the controller's lines
  of the engines' totals, scaled to their sum; and the time between two steps, from the time in which any episode was on
  its way;
- between two turns: what the lives of the journal's episodes have beyond their share of decode steps (a request comes
  while a step runs, and joins the next one);
- all else of a step, publication, and the way of the weights: means;
- how the speeds of training and engines went up and down around their means (:mod:`megasao.simulation.pace`).
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.observability.jsonl import Row, read_metrics, read_rows
from megasao.observability.record import column
from megasao.rollout.service import TICK_S
from megasao.simulation.fleet import History
from megasao.simulation.pace import pace_of
from megasao.simulation.rates import EngineRates, Line, Pace, Rates, Source, TrainingRates
from megasao.trajectories.files import read_trajectories

FEWEST_STEPS = 20
_COLUMNS = (
    *("time", "time/step", "time/wait", "time/publish"),
    *("data/lag_mean", "data/total_tokens", "data/trajectories"),
)
"""What every step's line must have."""
_TOTALS = ("engine/decode_steps", "engine/generated_tokens", "engine/prefill_tokens", "engine/busy_seconds")


@dataclass(frozen=True)
class Timing:
    """Of a run, predicted or measured, from the end of its first step to the end of its last one.

    Attributes:
        steps: of the whole run.
        seconds: wall time.
        waited: share of it in which the trainer waited for batches.
        staleness: mean, in versions.
    """

    steps: int
    seconds: float
    waited: float
    staleness: float


def measured(run: RunDirectory) -> Timing:
    """ValueError: the run has too few steps, or was interrupted: its wall time then holds what the stop took."""
    first, *rows = _steps(run)
    seconds = rows[-1]["time"] - first["time"]
    waited = sum(column(rows, "time/wait")) / seconds
    return Timing(1 + len(rows), seconds, waited, fmean(column(rows, "data/lag_mean")))


def predicted(history: History) -> Timing:
    """The same of a simulated run."""
    first, *steps = history.steps
    seconds = steps[-1].ended - first.ended
    waited = sum(step.began - step.asked for step in steps) / seconds
    return Timing(1 + len(steps), seconds, waited, fmean(lag for step in steps for lag in step.lags))


def _steps(run: RunDirectory) -> list[Row]:
    rows = read_metrics(run.metrics / "trainer.jsonl")
    if len(rows) < FEWEST_STEPS:
        raise ValueError(
            f"{run.path} has {len(rows)} steps in metrics/trainer.jsonl; at least {FEWEST_STEPS} are needed"
        )
    lacking = sorted({name for name in _COLUMNS for row in rows if row.get(name) is None})
    if lacking:
        raise ValueError(
            f"{run.path}: metrics/trainer.jsonl lacks {', '.join(lacking)}, in all steps or in some; "
            "measure a run of this version"
        )
    gaps = [later["time"] - earlier["time"] - later["time/step"] for earlier, later in pairwise(rows)]
    if max(gaps) > max(60.0, 10 * median(column(rows, "time/step"))):
        raise ValueError(f"{run.path} was interrupted for {max(gaps):.0f} s; measure a run without a stop")
    return rows


def calibrated(run: RunDirectory, config: Config) -> Rates:
    """The rates of a run with this config.

    ValueError: it is too short, or lacks what is needed (runs of the embedded engine have it).
    """
    rows = _steps(run)[1:]
    tokens = [row["data/total_tokens"] * row["data/trajectories"] for row in rows]
    updates = config.critic.updates_per_actor_update if config.critic is not None else 1
    critic = Line(0.0, 0.0)
    values = critic
    if config.critic is not None:
        values = _line(rows, tokens, "time/values", 1)
        critic = _line(rows, tokens, "time/critic", updates)
    training = TrainingRates(
        values=values,
        critic=critic,
        actor=_line(rows, tokens, "time/actor", 1),
        overhead=_overhead(rows),
        publish=fmean(row["time/publish"] for row in rows if row.get("time/actor") is not None),
    )
    transfer = fmean(column(rows, "time/transfer") or [0.0])
    lines = _engine_lines(run)
    moves = _moves(run, lines)
    busy = _busy_rates(config, moves)
    engine, environment = _rollouts(run, config, lines, moves, busy)
    pace = pace_of(config, rows, training, moves, busy)
    sources = tuple(_sources(run, engine, training, transfer, environment, pace))
    return Rates(engine, training, transfer, environment, TICK_S / 2, sources, pace)


def _line(rows: list[Row], tokens: list[float], name: str, parts: int) -> Line:
    """Seconds of one of ``parts`` equal parts of what ``name`` measures, for each token of a step."""
    points = [(count, row[name]) for count, row in zip(tokens, rows, strict=True) if row.get(name) is not None]
    if not points:
        raise ValueError(f"metrics/trainer.jsonl has no {name}: was the run too short to get there?")
    return Line(0.0, sum(seconds for _, seconds in points) / (parts * sum(count for count, _ in points)))


def _overhead(rows: list[Row]) -> float:
    """Seconds of a step in none of the parts that have a name, and between two steps."""
    named = ("time/wait", "time/values", "time/critic", "time/actor", "time/publish")
    inside = sum((row.get(name) or 0.0) for row in rows[1:] for name in named)
    return max(0.0, (rows[-1]["time"] - rows[0]["time"] - inside) / (len(rows) - 1))


def _engine_lines(run: RunDirectory) -> list[Row]:
    """The controller's lines with the engines' totals."""
    return [row for row in read_rows(run.metrics / "controller.jsonl") if all(name in row for name in _TOTALS)]


def _moves(run: RunDirectory, lines: list[Row]) -> list[tuple[float, np.ndarray]]:
    """What the engines did up to a time, since the line before; ValueError where there is too little of it."""
    moves = [
        (later["time"], np.array([later[name] - earlier[name] for name in _TOTALS]))
        for earlier, later in pairwise(lines)
    ]
    moves = [(time, move) for time, move in moves if move[0] > 0]
    if len(moves) < 3:
        raise ValueError(
            f"{run.path}: metrics/controller.jsonl has no engine/ totals to compute speeds from; calibrate on a run of "
            "this version, with the embedded engine, that lasted longer"
        )
    return moves


def _busy_rates(config: Config, moves: list[tuple[float, np.ndarray]]) -> EngineRates:
    """An engine while it computes."""
    steps, generated, prefilled, busy = np.array([move for _, move in moves]).T
    step, token = _not_negative(steps, generated + prefilled, busy)
    kv_tokens = float(config.rollout.concurrency * config.environment.max_tokens)
    return EngineRates(step, token, 0.0, token, kv_tokens)


def _rollouts(
    run: RunDirectory,
    config: Config,
    lines: list[Row],
    moves: list[tuple[float, np.ndarray]],
    computing: EngineRates,
) -> tuple[EngineRates, float]:
    """An engine with what it does between two steps, and the seconds between two turns."""
    steps, generated, _, busy = np.array([move for _, move in moves]).T
    lives = _Lives.of(run, lines[0]["time"], lines[-1]["time"])
    working = lives.active * config.rollout.workers
    between = max(0.0, working - busy.sum()) / steps.sum()
    decoding = working * generated.sum() / steps.sum()
    gaps = max(0.0, lives.total - decoding) / lives.gaps if lives.gaps else 0.0
    return replace(computing, step=float(computing.step + between)), float(gaps)


def _not_negative(steps: np.ndarray, tokens: np.ndarray, busy: np.ndarray) -> tuple[float, float]:
    """Seconds of a step and of a token, least squares without negative ones, scaled so that they add up."""
    (step, token), *_ = np.linalg.lstsq(np.stack([steps, tokens], 1), busy, rcond=None)
    step, token = (max(0.0, step), max(0.0, token)) if step > 0 or token > 0 else (1.0, 0.0)
    scale = busy.sum() / (step * steps.sum() + token * tokens.sum())
    return float(step * scale), float(token * scale)


@dataclass(frozen=True)
class _Lives:
    """The episodes of a run's journal between two times.

    Attributes:
        active: seconds in which there was any.
        total: seconds of all of them.
        gaps: times between two of their turns.
    """

    active: float
    total: float
    gaps: int

    @classmethod
    def of(cls, run: RunDirectory, begin: float, end: float) -> "_Lives":
        """ValueError: the journal cannot be read."""
        stored = read_trajectories([run.path])
        rows = sorted(stored.fetch(range(len(stored))), key=lambda row: row.created_at)
        active, total, gaps, until = 0.0, 0.0, 0, begin
        for row in rows:
            start, stop = max(row.created_at, begin), min(row.finished_at, end)
            if stop <= start:
                continue
            total += stop - start
            gaps += len(row.turn_starts) - 1
            active += max(0.0, stop - max(start, until))
            until = max(until, stop)
        return cls(active, total, gaps)


def _sources(
    run: RunDirectory, engine: EngineRates, training: TrainingRates, transfer: float, environment: float, pace: Pace
) -> list[Source]:
    lines = {"values": training.values, "one critic update": training.critic, "one actor update": training.actor}
    metrics = f"metrics of {run.path}"
    return [
        Source("decode step", engine.step, "s", metrics),
        Source("decode step, each token computed", engine.step_per_request, "s", metrics),
        Source("between two turns", environment, "s", f"metrics and journal of {run.path}"),
        *(Source(f"{name}, each token", line.per_token, "s", metrics) for name, line in lines.items()),
        Source("rest of a step", training.overhead, "s", metrics),
        Source("publication, trainer stands still", training.publish, "s", metrics),
        Source("weights on their way", transfer, "s", metrics),
        Source("training, slowest part of the run", max(pace.training), "of the mean", metrics),
        Source("engine, slowest part of the run", max(pace.engine), "of the mean", metrics),
        Source("an episode's delivery", TICK_S / 2, "s", "half a tick of a rollout worker"),
    ]
