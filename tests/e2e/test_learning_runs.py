"""The laptop's runs on two tasks of reasoning-gym and on repositories to be mended, from a sloppy warm start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megasao.config.rundir import RunDirectory
from megasao.environments.sandbox import bubblewrap
from tests.e2e import runs

pytestmark = pytest.mark.e2e
TASKS = ("reasoning_gym", "code_agent")
FEW = (
    *("sft.steps=2", "sft.batch_size=4", "sft.demonstrations=64", "loop.steps=3", "loop.batch_size=4"),
    *("sft.optimizer.warmup_steps=0", "actor.optimizer.warmup_steps=0", "critic.warmup_steps=1"),
    *("rollout.concurrency=4", "evaluation.problems=4", "evaluation.every=0", "environment.max_turns=2", "run.seed=1"),
)
MINUTES = 9
SIZES: dict[str, tuple[str, ...]] = {"reasoning_gym": (), "code_agent": ("--spaces-apart",)}


@pytest.fixture(autouse=True)
def needs_sandbox() -> None:
    try:
        bubblewrap.require()
    except bubblewrap.SandboxUnavailable as error:
        pytest.skip(str(error))


def run_shipped(task: str, directory: Path, size: tuple[str, ...], *changes: str) -> RunDirectory:
    """`make demo-reasoning` or `make demo-code`, with changes."""
    if task == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    config, model = f"configs/laptop_{task}.yaml", f"model.path={directory / 'model'}"
    here = (model, f"run.directory={directory}", "run.name=run", "observability.panel=lines", *changes)
    for command in (["tools/make_task_model.py", config, model, *size], ["-m", "megasao", "train", config, *here]):
        done = subprocess.run(
            [sys.executable, *command], cwd=runs.ROOT, capture_output=True, text=True, timeout=60 * MINUTES
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return RunDirectory(directory / "run")


@pytest.mark.parametrize("task", TASKS)
def test_the_shipped_config_makes_a_few_steps(task: str, tmp_path: Path) -> None:
    run = run_shipped(task, tmp_path, ("--hidden", "32", "--layers", "1", "--experts", "0"), *FEW)
    runs.check_books(run, total_steps=3)
    lines = runs.evaluations(run)
    assert {line["failures"] for line in lines} == {0} and len(lines) == 4
    names = {"reasoning_gym": {"gcd", "rotate_matrix"}, "code_agent": {"code_agent"}}[task]
    assert all(set(line["success_by_task"]) == names for line in lines)


@pytest.mark.full
@pytest.mark.timeout(2 * 60 * MINUTES)
@pytest.mark.parametrize("task", TASKS)
def test_the_shipped_config_learns(task: str, tmp_path: Path) -> None:
    """On held-out problems; at T = 1 the warm start is right on some and wrong on some."""
    run = run_shipped(task, tmp_path, SIZES[task])
    modes = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))["modes"]
    assert 0.1 < modes["sampled"]["before"]["success"] < 0.7
    for name, least in (("greedy", 0.2), ("sampled", 0.1)):
        assert modes[name]["mean"] > modes[name]["before"]["success"] + least
