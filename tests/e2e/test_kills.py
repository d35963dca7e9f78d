"""SIGKILL of each role, and of everything at once, in the middle of a run: it ends as if nothing had happened."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("hung")]
HANG_S = 60.0
"""Long enough for the start of a role on a slow machine; the other tests of this file pass meanwhile."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hung(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Popen[str], Path]]:
    """A run of 8 steps whose rollout worker is stopped after the third, and its config."""
    config = runs.write_config(
        tmp_path_factory.mktemp("hung") / "config.yaml",
        model,
        loop={"steps": 8, "batch_size": 8},
        supervision={"hang_timeout_s": HANG_S},
    )
    process = runs.start(config)
    runs.wait_until(lambda: len(runs.steps(runs.directory(config))) >= 1, process, config)
    worker = runs.role_process(process, "rollout")
    assert worker is not None
    runs.wait_until(lambda: len(runs.steps(runs.directory(config))) >= 3, process, config)
    worker.suspend()
    yield process, config
    process.kill()  # its roles with it, where a test ended early
    process.wait(60)


def test_each_role_is_killed_once_and_the_run_ends_right(model: Path, tmp_path: Path) -> None:
    """Weights travel by disk here: a worker that restarts catches up from it, a trainer publishes what it loaded."""
    total = 14
    config = runs.write_config(
        tmp_path / "config.yaml",
        model,
        loop={"steps": total, "batch_size": 8},
        weights={"transport": "disk"},
        checkpoint={"every": 2, "keep": total},  # else the segment of a killed controller goes with its last checkpoint
    )
    process = runs.start(config)
    run = runs.directory(config)
    runs.wait_until(lambda: len(runs.steps(run)) >= 1, process, config)
    roles = {role: runs.role_process(process, role) for role in ("rollout", "controller", "trainer")}
    for (role, victim), after in zip(roles.items(), (1, 3, 6), strict=True):
        # The step is past once its line is there; a later kill must not wait for lines of redone steps.
        runs.wait_until(lambda after=after: len(runs.steps(run)) >= after, process, config)
        assert victim is not None, f"no process of role {role}"
        victim.kill()  # looked up before: on a fast machine the rest of the run is short
    runs.finish(process, config)
    runs.check_books(run, total)
    lines = runs.steps(run)
    assert [line["step"] for line in lines] == list(range(total))
    assert [line["weight_version"] for line in lines] == list(range(total))
    assert all(line["data/lag_max"] <= 4 for line in lines)
    launcher_log = (run.logs / "launcher.log").read_text(encoding="utf-8")
    for role in ("rollout-0", "controller", "trainer"):
        assert role in launcher_log, f"the launcher does not say that {role} was restarted"
    left = sorted(path.name for path in (run.path / "weights" / "published").iterdir())
    assert left[-1].startswith(f"{total - 1:06d}-") and len(left) <= 3, left


def test_everything_is_killed_at_once_and_resumed(model: Path, tmp_path: Path) -> None:
    total = 8
    config = runs.write_config(tmp_path / "config.yaml", model, loop={"steps": total, "batch_size": 8})
    process = runs.start(config)
    run = runs.directory(config)
    runs.wait_until(lambda: len(runs.steps(run)) >= 1, process, config)
    children = psutil.Process(process.pid).children(recursive=True)
    runs.wait_until(lambda: len(runs.steps(run)) >= 3, process, config)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"orphans: {alive}"

    acknowledged = set(runs.journaled(run))
    before = {r.step: r.trajectory_ids for r in runs.read_ledger(run) if isinstance(r, runs.Batch)}
    runs.train(config, "--resume")
    runs.check_books(run, total)
    after = {r.step: r.trajectory_ids for r in runs.read_ledger(run) if isinstance(r, runs.Batch)}
    assert before == {step: ids for step, ids in after.items() if step in before}, "a batch was changed"
    assert acknowledged <= set(runs.journaled(run))


def test_a_role_that_hangs_is_restarted(hung: tuple[Popen[str], Path]) -> None:
    """SIGSTOP: alive for the kernel, silent for everyone else. Nobody would ever hear of it but by its heartbeat."""
    run = runs.finish(*hung)
    runs.check_books(run, 8)
    assert "rollout-0: no sign of life" in (run.logs / "launcher.log").read_text(encoding="utf-8")
