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
    (run.checkpoints / "step_000005").mkdir()
    (run.checkpoints / "step_000005" / "COMPLETE").touch()
    os.utime(run.checkpoints / "latest", (NOW - 120, NOW - 120))
    for name, age in (("trainer-0", 1), ("rollout-10", 400), ("rollout-9", 2), ("rollout-1", 3)):
        run.heartbeat(name).parent.mkdir(exist_ok=True)
        run.heartbeat(name).touch()
        os.utime(run.heartbeat(name), (NOW - age, NOW - age))
    run.logs.mkdir()
    (run.logs / "launcher.log").write_text("rollout-0: exit code 1; restarting rollout-0 (1 of 3)\n")
    record(run, "started", job="17", restart=0, nodes=["a", "b", "b"])
    shown = lines(run)
    assert shown["steps"] == "8 of 40, weight version 7, 1:05 ago"
    assert (
        shown["throughput"]
        == "trainer 100 tokens/s, rollout 50 tokens/s, 4.00 s a step, of which the trainer waits 25 %"
    )
    assert shown["staleness"] == "mean 1.50, most 3, bound 4 versions"
    assert shown["rollouts"] == "1 of 2 workers, 30 episodes under way, 5 trajectories waiting, 1 s ago"
    assert shown["checkpoint"] == "step 5, 2:00 ago" and latest_step(run) == 5
    assert shown["engines"] == "1 of 2 embedded in rollout workers show signs of life; rollout-0 started again 1x"
    assert shown["processes"] == "3 of 4 show signs of life; rollout-10 silent for 6:40"
    assert shown["excluded"] == "dropped/stale/calculator 4"
    assert shown["errors"].startswith("rollout-0: exit code 1")
    assert shown["job"].startswith("17: started") and shown["job"].endswith("start 1 of the run, on 2 nodes")


def test_a_run_that_has_ended_is_not_shown_as_one_that_hangs(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write(run.metrics / "trainer.jsonl", {"step": 39, "time": NOW - 500, "weight_version": 30, "time/step": 0.55})
    run.heartbeat("x").parent.mkdir(exist_ok=True)
    for name in ("sft-0", "trainer-0", "rollout-0", "rollout-1"):
        run.heartbeat(name).touch()
        os.utime(run.heartbeat(name), (NOW - 500, NOW - 500))
    shown = lines(run)
    assert "0.55 s a step" in shown["throughput"]
    assert shown["processes"].startswith("0 of 4 show signs of life; rollout-0 silent"), "it may have been killed"
    run.sft.mkdir()
    (run.sft / "COMPLETE").touch()
    assert shown["engines"].startswith("0 of 2") and "0 of 3" in lines(run)["processes"], "fine-tuning is over"
    run.final_policy.mkdir()
    assert lines(run)["engines"] == lines(run)["processes"] == "none, the run has ended"
    os.utime(run.heartbeat("trainer-0"), (NOW - 1, NOW - 1))
    assert lines(run)["processes"].startswith("1 of 3 show signs of life")


def test_the_history_survives_a_torn_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDirectory(tmp_path)
    record(run, "started", job="1", restart=0, nodes=["a"])
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"time": 1')
    record(run, "stopped", job="1", restart=0, nodes=["a"])
    assert [(event.event, event.step) for event in read_history(run)] == [("started", None), ("stopped", None)]
    assert "cut off" in caplog.text


def test_a_checkpoint_that_is_gone_is_not_shown_as_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.checkpoints.mkdir()
    (run.checkpoints / "latest").write_text("step_000005")
    begin = "none to go on from: checkpoints/latest names step_000005, which is not"
    assert lines(run)["checkpoint"] == f"{begin} there; no other is complete"
    for step in (2, 3, 5):
        (run.checkpoints / f"step_{step:06d}").mkdir()
        (run.checkpoints / f"step_{step:06d}" / "COMPLETE").touch()
    (run.checkpoints / "step_000005" / "COMPLETE").unlink()
    assert lines(run)["checkpoint"] == f"{begin} complete; the newest that is complete is step 3"
    (run.checkpoints / "step_000005" / "COMPLETE").touch()
    assert lines(run)["checkpoint"].startswith("step 5, ")


def test_servers_are_counted_apart(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.heartbeat("x").parent.mkdir()
    for name, age in (("engine-0-0", 1), ("engine-0-evaluation", 400), ("rollout-0", 1)):
        run.heartbeat(name).touch()
        os.utime(run.heartbeat(name), (NOW - age, NOW - age))
    run.logs.mkdir()
    said = "".join(f"engine-0-0: exit code 1; restarting engine-0-0 ({number} of 3)\n" for number in (1, 2))
    (run.logs / "launcher.log").write_text(f"{said}engine-0-00: exit code 1; restarting engine-0-00 (1 of 3)\n")
    config = load_config(LAPTOP, ["rollout.engine=sglang", "rollout.workers=1"])
    shown = describe_status(run, config, now=NOW)
    assert "engines     1 of 2 SGLang servers show signs of life; engine-0-0 started again 2x\n" in shown


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
