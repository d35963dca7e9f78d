"""Rates are read from a run's own files. The run is one of known rates, written as a run would write it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from simulation_support import make_config, make_engine, make_rates

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.load import dump_config, load_config
from megasao.config.rundir import RunDirectory
from megasao.simulation.calibrate import calibrated, measured
from megasao.simulation.command import outcomes, predict
from megasao.simulation.fleet import SimulatedFleet
from megasao.simulation.lengths import Lengths, Shape, Turn, of_run
from megasao.simulation.pace import _ratios
from megasao.simulation.rates import Line, Pace, Rates, TrainingRates, Work
from megasao.trajectories.journal import Journal
from megasao.trajectories.schema import Trajectory, to_batch

RATES = make_rates(
    engine=make_engine(step=0.005, step_per_request=0.001, prefill_per_token=0.001),
    values=Line(0.0, 1e-4),
    critic=Line(0.0, 3e-4),
    actor=Line(0.0, 5e-4),
    overhead=0.1,
    publish=0.02,
    transfer=0.2,
    environment=0.05,
    delivery=0.01,
)
EPISODES = 140
SLOW = TrainingRates(values=Line(0.0, 1e-4), critic=Line(0.0, 6e-4), actor=Line(0.0, 5e-4), overhead=0.0, publish=0.02)


def lengths(seed: int) -> Shape:
    return Shape((Turn(20, 5 + seed % 20), Turn(6, 5 + seed % 7)), rest=2)


def config_of(**loop: int | str) -> Config:
    return make_config(
        loop={"steps": 40, "batch_size": 16, **loop}, buffer={"max_trajectories": 32}, critic={"warmup_steps": 3}
    )


def write_run(path: Path, config: Config, rates: Rates = RATES) -> RunDirectory:
    """The files of a run of ``rates``: trainer's and controller's lines, and the journal."""
    run = RunDirectory(path)
    run.create()
    run.config.write_text(dump_config(config))
    steps = SimulatedFleet(config, rates, lengths).run().steps
    training, trainer, engines, progress = rates.training, [], [], 0.0
    for number, step in enumerate(steps):
        moves = number >= config.warmup_steps
        pace = rates.pace.of_training(number / len(steps))
        row = {
            "time": 1000.0 + step.ended,
            "step": number,
            "time/wait": step.began - step.asked,
            "time/values": pace * training.values.seconds(step.tokens),
            "time/critic": pace * 2 * training.critic.seconds(step.tokens),
            "time/publish": training.publish if moves else 0.0,
            "time/transfer": rates.transfer,
            "time/step": step.ended - step.asked,
            "data/lag_mean": fmean(step.lags),
            "data/total_tokens": step.tokens / step.trajectories,
            "data/trajectories": float(step.trajectories),
        }
        trainer.append(row | ({"time/actor": pace * training.actor.seconds(step.tokens)} if moves else {}))
        # An engine that decodes 10 and 20 requests by turns, and is at work all the time.
        decode_steps, tokens = 10 * number, 100 * number + 100 * (number // 2)
        progress = decode_steps * rates.engine.step + tokens * rates.engine.step_per_request
        totals = {"decode_steps": decode_steps, "generated_tokens": 0.7 * tokens, "prefill_tokens": 0.3 * tokens}
        line = {f"engine/{name}": value for name, value in (totals | {"busy_seconds": progress}).items()}
        engines.append({"time": 1000.0 + progress, "step": number, **line})
    for name, rows in (("trainer", trainer), ("controller", engines)):
        (run.metrics / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Every life is its share of the decode steps and one wait between its two turns; some are there at any time.
    decoding = progress * engines[-1]["engine/generated_tokens"] / engines[-1]["engine/decode_steps"]
    life = decoding / EPISODES + rates.environment
    begins = [1000.0 + (progress - life) * seed / (EPISODES - 1) for seed in range(EPISODES)]
    journal = Journal(run.journal)
    journal.append(to_batch([played(lengths(n), n, begin, begin + life) for n, begin in enumerate(begins)]))
    journal.sync()
    journal.close()
    return run


def played(shape: Shape, number: int, created: float, finished: float) -> Trajectory:
    mask = [is_action for turn in shape.turns for is_action in [False] * turn.prefill + [True] * turn.decode]
    mask += [False] * shape.rest
    starts = [position for position, is_action in enumerate(mask) if is_action and not mask[position - 1]]
    return Trajectory(
        trajectory_id=f"row-{number}",
        prompt_id="p",
        group_id="g",
        task="t",
        tokens=[1] * len(mask),
        action_mask=mask,
        rewards=[0.0] * len(mask),
        weight_versions=[(0, 0)],
        turn_starts=starts,
        finish_reason="done",
        created_at=created,
        finished_at=finished,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_run(tmp_path_factory.mktemp("runs") / "one", config_of())


def test_the_rates_of_a_run_are_found_again(run: RunDirectory) -> None:
    found = calibrated(run, config_of())
    assert found.engine.step == pytest.approx(0.005, rel=1e-6)
    assert found.engine.step_per_request == found.engine.prefill_per_token == pytest.approx(0.001, rel=1e-6)
    assert found.training.values.per_token == pytest.approx(1e-4)
    assert found.training.critic.per_token == pytest.approx(3e-4)
    assert found.training.actor.per_token == pytest.approx(5e-4)
    assert found.training.publish == pytest.approx(0.02)
    assert found.training.overhead == pytest.approx(0.1, rel=0.02)
    assert found.environment == pytest.approx(0.05)
    assert (found.transfer, found.delivery) == (pytest.approx(0.2), 0.01)
    places = {f"metrics of {run.path}", f"metrics and journal of {run.path}", "half a tick of a rollout worker"}
    assert {source.source for source in found.sources} == places


def test_the_time_in_which_an_engine_has_work_and_computes_nothing_belongs_to_its_steps(tmp_path: Path) -> None:
    one = write_run(tmp_path / "slow", config_of())
    lines = [json.loads(line) for line in (one.metrics / "controller.jsonl").read_text().splitlines()]
    for line in lines:
        line["engine/busy_seconds"] *= 0.5
    (one.metrics / "controller.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = calibrated(one, config_of()).engine
    assert engine.step_per_request == pytest.approx(0.0005)
    per_step = lines[-1]["time"] - lines[0]["time"]
    assert engine.step == pytest.approx(0.0025 + 0.5 * per_step / lines[-1]["engine/decode_steps"])


def test_the_journals_episodes_are_drawn(run: RunDirectory) -> None:
    drawn: Lengths = of_run(run.path, config_of())
    shapes = {drawn(seed) for seed in range(2000)}
    assert shapes == {lengths(seed) for seed in range(EPISODES)}
    with pytest.raises(ValueError, match=r"an episode of \d+ tokens; the config's environment.max_tokens = 20 allows"):
        of_run(run.path, make_config(environment={"max_tokens": 20, "max_turn_tokens": 10}))


def test_a_fleet_can_play_a_journals_episodes(run: RunDirectory) -> None:
    path = Path(__file__).parents[2] / "configs" / "glm_5_2_750b.yaml"
    config = load_config(path, ["simulate.steps=6", "simulate.discard=2"])
    for one in outcomes(config, [64], Work(40e9, 39e9, 1.8), run.path)[0]:
        tokens = one.tokens_per_s / one.trajectories_per_s
        assert tokens == pytest.approx(fmean(lengths(seed).tokens for seed in range(EPISODES)), rel=0.1)


@pytest.mark.parametrize("loop", [{}, {"batch_size": 8}, {"mode": "sync"}], ids=["itself", "smaller batch", "sync"])
def test_wall_time_is_predicted_within_15_percent(
    run: RunDirectory, tmp_path: Path, loop: dict[str, int | str]
) -> None:
    other = write_run(tmp_path / "other", config_of(**loop))
    found = measured(other)
    *_, waits, staleness, time = prediction(other, run)
    assert time == (pytest.approx(found.seconds, rel=0.15), pytest.approx(found.seconds, abs=0.06))
    assert waits == (pytest.approx(100 * found.waited, abs=10), pytest.approx(100 * found.waited, abs=0.06))
    assert staleness == (pytest.approx(found.staleness, abs=0.3), pytest.approx(found.staleness, abs=0.006))


def prediction(other: RunDirectory, run: RunDirectory) -> list[tuple[float, float]]:
    """The numbers of the last lines: predicted, measured."""
    said: list[str] = []
    predict(other.path, run.path, None, said.append)
    lines = said[0].splitlines()[-3:]
    assert [line.split(":")[0] for line in lines] == ["trainer waits", "mean staleness", "wall time"]
    pairs = [re.findall(r"(?:predicted|measured) ([0-9.]+)", line) for line in lines]
    return [(float(first), float(second)) for first, second in pairs]


def test_a_run_at_other_speeds_is_not(run: RunDirectory, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", config_of(), replace(RATES, training=replace(RATES.training, overhead=0.4)))
    predicted, found = prediction(other, run)[-1]
    assert predicted != pytest.approx(found, rel=0.15)


def test_a_run_whose_speed_changes_is_predicted_from_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first half is bound by the engine, its second by the trainer: with mean rates neither would ever wait."""
    pace = Pace(training=(*[0.1] * 4, *[1.5] * 4))
    one = write_run(tmp_path / "one", config_of(steps=60), replace(RATES, training=SLOW, pace=pace))
    *_, time = prediction(one, one)
    assert time[0] == pytest.approx(time[1], rel=0.05)
    found = calibrated(one, config_of(steps=60)).pace.training
    fast, slow = fmean(found[2:14]), fmean(found[16:])
    assert len(found) == 30 and slow / fast == pytest.approx(15, rel=0.1)
    monkeypatch.setattr("megasao.simulation.calibrate.pace_of", lambda *_: Pace())
    *_, time = prediction(one, one)
    assert time[0] < 0.85 * time[1], "constant rates would do"


def test_a_part_without_measurements_is_between_its_neighbours() -> None:
    assert _ratios(4, [0, 0, 3], [2.0, 4.0, 9.0], [1.0, 2.0, 2.0]) == pytest.approx((2.0, 2 + 2.5 / 3, 2 + 5 / 3, 4.5))
    assert _ratios(4, [], [], []) == (1.0,)


def without(name: str) -> Callable[[dict[str, float]], dict[str, float]]:
    return lambda row: {key: value for key, value in row.items() if not key.startswith(name)}


@pytest.mark.parametrize(
    ("role", "change", "message"),
    [
        ("controller", without("engine/"), "has no engine/ totals to compute speeds from"),
        ("trainer", without("time/actor"), "has no time/actor: was the run too short"),
        ("trainer", without("time/step"), "trainer.jsonl lacks time/step"),
        ("trainer", without("data/"), "lacks data/lag_mean, data/total_tokens, data/trajectories"),
        (
            "trainer",
            lambda row: row if row["step"] < 10 else None,
            "has 10 steps in metrics/trainer.jsonl; at least 20",
        ),
        (
            "trainer",
            lambda row: row if row["step"] < 30 else {**row, "time": row["time"] + 3600},
            "was interrupted for 3600 s",
        ),
    ],
)
def test_a_run_that_cannot_be_used_says_why(tmp_path: Path, role: str, change, message: str) -> None:
    one = write_run(tmp_path / "one", config_of())
    path = one.metrics / f"{role}.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))
    with pytest.raises(UserError, match=message):
        predict(one.path, one.path, None, print)


def test_a_directory_that_is_no_run_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    for pair in ((tmp_path, run.path), (run.path, tmp_path)):
        with pytest.raises(UserError, match="is not a run directory"):
            predict(*pair, None, print)
