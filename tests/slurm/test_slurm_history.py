"""What a job writes into the history of its run, without a cluster."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasao.config.errors import UserError
from megasao.config.load import dump_config, load_config
from megasao.config.rundir import RunDirectory
from megasao.observability.history import read_history, record
from megasao.slurm.allocation import Allocation
from megasao.slurm.check import check_nodes
from megasao.slurm.job import Job

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def leave_signal() -> Iterator[None]:
    """A job handles it from its start on."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that another job has started, and goes on with."""
    run = RunDirectory(tmp_path / "laptop")
    run.create()
    run.config.write_text(dump_config(load_config(ROOT / "configs" / "laptop.yaml", [f"run.directory={tmp_path}"])))
    record(run, "started", job="7", restart=0, nodes=["n1"])
    return run


def job(run: RunDirectory, number: str, *changes: str) -> Job:
    unused: dict[str, Any] = dict.fromkeys(("plan", "site", "steps"))
    config = load_config(run.config, changes)
    return Job(run=run, config=config, allocation=Allocation(number, (), 0), **unused)


def events(run: RunDirectory) -> list[tuple[str, str]]:
    return [(event.job, event.event) for event in read_history(run)]


def test_a_job_that_is_refused_is_nothing_that_happened_to_the_run(run: RunDirectory) -> None:
    with pytest.raises(UserError, match="already exists"):
        job(run, "8").perform(resume=False)
    with pytest.raises(UserError, match="started with another configuration"):
        job(run, "8", "loop.batch_size=2").perform(resume=True)
    assert events(run) == [("7", "started")], "the run goes on in job 7, and status must say so"


def test_a_job_that_has_the_run_and_cannot_go_on_is(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_nodes(*_: object, **__: object) -> None:
        raise UserError("the nodes of this job cannot run it: n2")

    monkeypatch.setattr("megasao.slurm.job.check_nodes", bad_nodes)
    monkeypatch.setattr("megasao.slurm.job.slurm_section", lambda _: SimpleNamespace(check_timeout_s=1.0))
    with pytest.raises(UserError, match="n2"):
        job(run, "8").perform(resume=True)
    assert events(run) == [("7", "started"), ("8", "started"), ("8", "failed")]


def test_nodes_are_checked_again_though_a_file_of_the_last_check_cannot_be_removed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system one that a hung node has open stays until that ends."""
    (run.path / "nodes").mkdir()
    (run.path / "nodes" / ".nfs0001").touch()
    monkeypatch.setattr("megasao.slurm.check.shutil.rmtree", lambda *_, **__: None)
    plan: Any = SimpleNamespace(components=[], fleet=None)
    site: Any = SimpleNamespace(interface="lo", ipv6=False)
    unused: Any = SimpleNamespace(config=None)
    assert check_nodes(run, plan, site, Allocation("8", (), 0), unused, unused, timeout_s=1.0) == []
