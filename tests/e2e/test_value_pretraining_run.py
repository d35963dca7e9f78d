"""From a run's journal to a pretrained value model to a run that starts from it, by the command line alone."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megasao.observability.jsonl import read_metrics
from megasao.trajectories.files import read_trajectories
from megasao.trajectories.ipc import to_ipc
from megasao.trajectories.schema import to_batch
from tests.e2e import runs

pytestmark = pytest.mark.e2e
TASK = {"environment": {"max_turns": 8, "max_tokens": 110, "max_turn_tokens": 16}}
EVALUATION = {"problems": 4, "every": 0, "sampled": False}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> runs.RunDirectory:
    """A run whose policy solves some problems and not others, and hardly moves."""
    directory = tmp_path_factory.mktemp("earlier")
    optimizer = {"lr": 4e-3, "warmup_steps": 20, "decay_start": 0.5}
    config = runs.write_config(
        directory / "config.yaml",
        runs.write_model(directory / "model"),
        **TASK,
        sft={"steps": 400, "batch_size": 64, "demonstrations": 8192, "optimizer": optimizer},
        algorithm={"objective": {"name": "gpg"}, "advantages": {"name": "running_mean"}},
        critic=None,
        actor={"optimizer": {"lr": 1e-6}},
        loop={"steps": 20, "batch_size": 64},
        rollout={"concurrency": 64, "embedded": {"slots": 64}},
        evaluation=EVALUATION,
        checkpoint={"every": 0},
    )
    return runs.train(config)


def pretrain(earlier: runs.RunDirectory, directory: Path, trajectories: Path) -> tuple[str, list[dict[str, Any]]]:
    """(what the command printed, the stage's metrics)"""
    directory.mkdir()
    config = runs.write_config(
        directory / "config.yaml",
        earlier.sft,
        **TASK,
        critic={"head_bias": 0.3},
        value_pretraining={
            "trajectories": [str(trajectories)],
            "steps": 60,
            "batch_size": 64,
            "held_out": 0.25,
            "evaluate_every": 20,
            "optimizer": {"lr": 3e-3, "warmup_steps": 5, "decay_start": 0.5},
        },
    )
    command = [sys.executable, "-m", "megasao", "pretrain-value", str(config)]
    result = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, timeout=runs.TIMEOUT_S)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout, read_metrics(runs.directory(config).metrics / "value.jsonl")


def test_a_critic_learns_from_the_journal_of_an_earlier_run(earlier: runs.RunDirectory, tmp_path: Path) -> None:
    stored = read_trajectories([earlier.journal])
    rows = stored.fetch(range(len(stored)))
    totals = [sum(row.rewards) for row in rows]
    assert 0.1 < sum(totals) / len(totals) < 0.9
    random.Random(0).shuffle(totals)
    shuffled = [replace(r, rewards=[0.0] * (len(r.tokens) - 1) + [t]) for r, t in zip(rows, totals, strict=True)]
    (tmp_path / "shuffled.arrow").write_bytes(to_ipc(to_batch(shuffled)))
    with ThreadPoolExecutor(2) as pool:
        right = pool.submit(pretrain, earlier, tmp_path / "value", earlier.path)
        wrong = pool.submit(pretrain, earlier, tmp_path / "control", tmp_path / "shuffled.arrow")
        (text, lines), (_, control) = right.result(), wrong.result()
    looks = [line["value/held_out/explained_variance"] for line in lines if "value/held_out/tokens" in line]
    assert len(looks) == 3 and looks[-1] > 0.1, looks
    assert lines[0]["value/before/explained_variance"] == pytest.approx(0, abs=1e-6), "a new head is a constant"
    assert "value pretraining 60/60" in text and f"held-out trajectories: {looks[-1]:.3f}" in text

    assert control[-1]["value/held_out/explained_variance"] < 0.03, "negative control: rewards of other trajectories"

    config = runs.write_config(
        tmp_path / "config.yaml",
        earlier.sft,
        **TASK,
        critic={"path": str(tmp_path / "value" / "run" / "value"), "warmup_steps": 0},
        loop={"steps": 1, "batch_size": 64},
        evaluation=EVALUATION,
    )
    [line] = runs.steps(runs.train(config))
    assert line["critic/explained_variance"] > 0.05, "before its first update in RL"
