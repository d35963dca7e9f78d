"""`megasao train` with a critic in a world of its own: killed on the way, it has the numbers of a colocated one."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import runs

pytestmark = pytest.mark.e2e
TOTAL = 10
SEPARATE: dict[str, Any] = {"critic": {"placement": "separate", "parallel": {"ranks": 1}, "timeout_s": 120.0}}
OF_TIME = ("time", "time/", "idle/", "throughput/", "rollout/", "critic/seconds")


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    """What a step's line says of the learning, not of the clock."""
    return {name: value for name, value in line.items() if not name.startswith(OF_TIME)}


def replay_colocated(config: Path, directory: Path) -> runs.RunDirectory:
    """The same run from its start, with the critic on the actor's ranks: the ledger has every step's trajectories."""
    shutil.copytree(runs.directory(config).path, directory / "run")
    shutil.rmtree(directory / "run" / "checkpoints")
    (directory / "run" / "metrics" / "trainer.jsonl").unlink()
    for path in (config, directory / "run" / "config.yaml"):
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        document["run"]["directory"] = str(directory)
        document["critic"] |= {"placement": "colocated", "parallel": None}
        (directory / "config.yaml" if path == config else path).write_text(yaml.safe_dump(document), encoding="utf-8")
    return runs.train(directory / "config.yaml", "--resume")


def test_killed_and_resumed_it_gives_the_numbers_of_a_colocated_critic(tmp_path: Path) -> None:
    config = runs.write_config(
        tmp_path / "config.yaml",
        runs.write_model(tmp_path / "model"),
        loop={"steps": TOTAL, "batch_size": 8},
        checkpoint={"every": 5, "keep": 9},
        evaluation={"problems": 4, "every": 0, "sampled": False},
        **SEPARATE,
    )
    process = runs.start(config)
    run = runs.directory(config)
    runs.wait_until(lambda: len(runs.steps(run)) >= 1, process, config)
    trainer, critic = (runs.role_process(process, role) for role in ("trainer", "critic"))
    assert critic is not None
    # After the checkpoint of five steps, and long before the next, however fast the steps are.
    runs.wait_until(lambda: len(runs.steps(run)) >= 6, process, config)
    critic.kill()
    runs.finish(process, config)

    runs.check_books(run, TOTAL)
    launcher_log = (run.logs / "launcher.log").read_text(encoding="utf-8")
    assert "critic-0: killed by SIGKILL" in launcher_log and "restarting trainer (1 of" in launcher_log
    assert trainer is not None and not trainer.is_running(), "the actor's world was restarted with it"
    lines = [json.loads(line) for line in (run.metrics / "trainer.jsonl").read_text(encoding="utf-8").splitlines()]
    said = [line["step"] for line in lines if "step" in line]
    assert sorted(set(said)) == list(range(TOTAL)) and said.count(5) == 2, "steps after the checkpoint were done again"
    assert {"actor", "critic", "rng-0.safetensors", "rng-critic-0.safetensors"} <= set(
        os.listdir(run.checkpoints / f"step_{TOTAL:06d}")
    )

    (tmp_path / "replay").mkdir()
    replayed = runs.steps(replay_colocated(config, tmp_path / "replay"))
    expected = {line["step"]: numbers(line) for line in replayed}
    for line in lines:
        if "step" in line:
            assert numbers(line) == expected[line["step"]], "also of the steps that were done twice"
    losses = [expected[step]["critic/loss"] for step in range(TOTAL)]
    assert len(set(losses)) == TOTAL
