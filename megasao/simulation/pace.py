"""How the speed of a measured run went up and down, from its own files: a machine that others use is not of one speed.

With constant rates a run like that is predicted too short: where the trainer is slow the engines fill the buffer and
stand still, where the engines are slow the trainer waits, and such waits do not cancel.

Invariant: the wall time of a step is not looked at, only what its parts took, so that it remains to be predicted.
"""

from collections.abc import Sequence

import numpy as np

from megasao.config import Config
from megasao.observability.jsonl import Row
from megasao.simulation.rates import EngineRates, Pace, TrainingRates

STEPS_OF_A_PART = 2
"""Fewer would say of a part what one line of the controller, of a second or so, cannot."""


def pace_of(
    config: Config,
    rows: Sequence[Row],
    training: TrainingRates,
    moves: Sequence[tuple[float, np.ndarray]],
    engine: EngineRates,
) -> Pace:
    """The pace of a run with these mean rates.

    ``rows`` are the trainer's lines but the first; ``moves`` what engines did up to a time: decode steps, tokens
    generated, tokens prefilled, busy seconds. ``engine``: seconds of a busy step and of a token.
    """
    parts = max(1, (len(rows) + 1) // STEPS_OF_A_PART)
    places = [min(parts - 1, (number + 1) * parts // (len(rows) + 1)) for number in range(len(rows))]
    worked = [_worked(row) for row in rows]
    expected = [_expected(config, row, training) for row in rows]
    ends = [row["time"] for row in rows]
    when = [places[min(int(np.searchsorted(ends, time)), len(rows) - 1)] for time, _ in moves]
    busy = [float(move[3]) for _, move in moves]
    computed = [float(engine.step * move[0] + engine.step_per_request * (move[1] + move[2])) for _, move in moves]
    return Pace(_ratios(parts, places, worked, expected), _ratios(parts, when, busy, computed))


def _worked(row: Row) -> float:
    """Seconds of a step in which the trainer neither waited nor published."""
    return max(0.0, row["time/step"] - row["time/wait"] - row["time/publish"])


def _expected(config: Config, row: Row, training: TrainingRates) -> float:
    """The same by the mean rates."""
    tokens = int(row["data/total_tokens"] * row["data/trajectories"])
    seconds = training.overhead
    if config.critic is not None:
        updates = config.critic.updates_per_actor_update
        seconds += training.values.seconds(tokens) + updates * training.critic.seconds(tokens)
    return seconds + (training.actor.seconds(tokens) if row.get("time/actor") is not None else 0.0)


def _ratios(
    parts: int, places: Sequence[int], measured: Sequence[float], expected: Sequence[float]
) -> tuple[float, ...]:
    """Measured over expected seconds of each part; of one without any, between its neighbours."""
    have, want = (np.bincount(places, weights=values, minlength=parts) for values in (measured, expected))
    known = np.flatnonzero((want > 0) & (have > 0))
    if not known.size:
        return (1.0,)
    return tuple(float(ratio) for ratio in np.interp(np.arange(parts), known, have[known] / want[known]))
