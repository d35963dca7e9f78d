"""Whole runs whose rollout workers keep the trajectories: the trainer's ranks fetch them there, and the books balance
whoever is killed."""

import signal
import time
from pathlib import Path

import pyarrow as pa
import pytest

from megasao.config.rundir import RunDirectory
from megasao.observability.jsonl import read_metrics
from tests.e2e import runs

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_model(tmp_path_factory.mktemp("model"))


def kept(directory: Path) -> set[str]:
    """Ids in the workers' own journals, whole ones and one that is being written."""
    names: set[str] = set()
    for segment in directory.glob("rollout-*/segment-*.arrow"):
        with pa.OSFile(str(segment)) as source:
            try:
                for batch in pa.ipc.open_stream(source):
                    names.update(batch.column("trajectory_id").to_pylist())
            except (pa.ArrowInvalid, OSError):
                continue
    return names


def asked_again(run: RunDirectory) -> bool:
    return any("is asked for again" in log.read_text(encoding="utf-8") for log in run.logs.glob("trainer*.log"))


def test_whoever_is_killed_the_trajectories_are_trained_once(model: Path, tmp_path: Path) -> None:
    """Both ranks fetch. The trainer is killed while it waits for a host that is stopped: in the middle of a fetch."""
    total, place = 10, tmp_path / "disk"
    config = runs.write_config(
        tmp_path / "config.yaml",
        model,
        loop={"steps": total, "batch_size": 8},
        actor={"optimizer": {"lr": 1e-3}, "router_replay": True},
        parallel={"ranks": 2},
        weights={"transport": "embedded"},
        buffer={"payload": "rollout", "payload_directory": str(place)},
        supervision={"start_timeout_s": 120.0},
    )
    process = runs.start(config)
    run = runs.directory(config)
    for role, after in (("rollout", 2), ("controller", 4)):
        runs.wait_until(lambda after=after: len(runs.steps(run)) >= after, process, config)
        runs.kill_role(process, role)
    runs.wait_until(lambda: len(runs.steps(run)) >= 6, process, config)
    host = runs.role_process(process, "rollout")
    assert host is not None
    host.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    # What it has of the next step is asked for, if that is assembled before the controller misses it.
    runs.wait_until(lambda: asked_again(run) or time.monotonic() > stopped + 20, process, config)
    runs.kill_role(process, "trainer")
    host.send_signal(signal.SIGCONT)
    runs.finish(process, config)
    runs.check_books(run, total)
    assert [line["step"] for line in runs.steps(run)] == list(range(total))
    records = runs.read_ledger(run)
    trained = {name for record in records if isinstance(record, runs.Batch) for name in record.trajectory_ids}
    (own,) = place.iterdir()
    assert own.name.startswith("run-") and trained <= kept(own), "segments are not full: nothing was deleted yet"
    assert not list(run.journal.glob("segment-*")), "no payload passed through the controller"
    last = read_metrics(run.metrics / "controller.jsonl")[-1]
    assert last.get("fetched_bytes", 0) == 0
