"""The status of a run, from its files alone."""

import json
import os
from pathlib import Path

import pytest

from megasao.config.errors import UserError
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.observability.history import latest_step, read_history, record
from megasao.observability.status import describe_status

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"
NOW = 1_000_000.0


def lines(run: RunDirectory) -> dict[str, str]:
    text = describe_status(run, load_config(LAPTOP, ["loop.steps=40", "rollout.workers=2"]), now=NOW)
    return {line[:12].strip(): line[12:] for line in text.splitlines() if line[0] != " "}


def write(path: Path, *rows: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    shown = lines(RunDirectory(tmp_path))
    assert shown["steps"] == "0 of 40, weight version -"
    assert shown["job"] == "not a Slurm job" and shown["checkpoint"] == "none yet"
    assert shown["throughput"].startswith("trainer - tokens/s, rollout - tokens/s, - a step")
    assert shown["errors"] == "none" and shown["excluded"] == "nothing"
    assert sorted(tmp_path.iterdir()) == [], "reading wrote something"


def test_a_run_under_way(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    step = {"throughput/trainer_tokens_per_s": 100.0, "throughput/rollout_tokens_per_s": 50.0, "time/step": 4.0}
    more = {"idle/trainer": 0.25, "data/lag_mean": 1.5, "data/lag_max": 3.0}
    write(
        run.metrics / "trainer.jsonl",
        {"step": 6, "time": NOW - 70, "weight_version": 6, **step, **more},
        {"step": 7, "time": NOW - 65, "weight_version": 7, **step, **more, "data/lag_max": 2.0},
    )
    counters = {"workers": 1, "leases": 30, "buffer": 5, "dropped/stale/calculator": 4.0}
    write(run.metrics / "controller.jsonl", {"step": 7, "time": NOW - 1, **counters})
    write(run.checkpoints / "latest")
    (run.checkpoints / "latest").write_text("step_000005")
    os.utime(run.checkpoints / "latest", (NOW - 120, NOW - 120))
    for name, age in (("trainer-0", 1), ("rollout-10", 400), ("rollout-9", 2)):
        run.heartbeat(name).parent.mkdir(exist_ok=True)
        run.heartbeat(name).touch()
        os.utime(run.heartbeat(name), (NOW - age, NOW - age))
    run.logs.mkdir()
    (run.logs / "launcher.log").write_text("rollout-0: exit code 1; restarting rollout-0 (1 of 3)\n")
    record(run, "started", job="17", restart=0, nodes=["a", "b", "b"])
    shown = lines(run)
    assert shown["steps"] == "8 of 40, weight version 7, 1:05 ago"
    assert (
        shown["throughput"] == "trainer 100 tokens/s, rollout 50 tokens/s, 4 s a step, of which the trainer waits 25 %"
    )
    assert shown["staleness"] == "mean 1.50, most 3, bound 4 versions"
    assert shown["rollouts"] == "1 of 2 workers, 30 episodes under way, 5 trajectories waiting, 1 s ago"
    assert shown["checkpoint"] == "step 5, 2:00 ago" and latest_step(run) == 5
    assert shown["processes"] == "2 of 3 show signs of life; rollout-10 silent for 6:40"
    assert shown["excluded"] == "dropped/stale/calculator 4"
    assert shown["errors"].startswith("rollout-0: exit code 1")
    assert shown["job"].startswith("17: started") and shown["job"].endswith("start 1 of the run, on 2 nodes")


def test_the_history_survives_a_torn_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDirectory(tmp_path)
    record(run, "started", job="1", restart=0, nodes=["a"])
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"time": 1')
    record(run, "stopped", job="1", restart=0, nodes=["a"])
    assert [(event.event, event.step) for event in read_history(run)] == [("started", None), ("stopped", None)]
    assert "cut off" in caplog.text


@pytest.mark.parametrize("pointer", [b"hello", b"\xff\xfe", b""])
def test_a_damaged_pointer_is_named(tmp_path: Path, pointer: bytes) -> None:
    run = RunDirectory(tmp_path)
    run.checkpoints.mkdir()
    (run.checkpoints / "latest").write_bytes(pointer)
    with pytest.raises(UserError, match=r"checkpoints/latest names .* which is no checkpoint"):
        lines(run)


def test_a_history_of_another_version_is_named(tmp_path: Path) -> None:
    write(tmp_path / "history.jsonl", {"event": "started"})
    with pytest.raises(UserError, match=r"history\.jsonl has a line that is no event of this version"):
        lines(RunDirectory(tmp_path))
