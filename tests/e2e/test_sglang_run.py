"""Whole runs with real SGLang servers: the engine and the trainer agree, and nothing of a run outlives it."""

import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e import runs
from tests.engines.sglang_server import PYTHON, needs_sglang

pytestmark = [pytest.mark.e2e, needs_sglang]

SGLANG = {"engine": "sglang", "concurrency": 8, "sglang": {"python": str(PYTHON), "silence_timeout_s": 30.0}}
PATIENT = {"start_timeout_s": 600.0, "hang_timeout_s": 900.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_model(tmp_path_factory.mktemp("model"))


def command(process: psutil.Process) -> list[str]:
    """Its command line; nothing if it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def processes_of(directory: Path) -> list[psutil.Process]:
    """Processes with the run directory in their command line, and all that they started."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        if any(str(directory) in word for word in command(process)):
            found.add(process)
            with suppress(psutil.NoSuchProcess):
                found.update(process.children(recursive=True))
    return sorted(found, key=lambda process: process.pid)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(900)
def test_trainer_and_servers_agree_and_a_killed_server_is_replaced(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On policy, the log-ratio is numerical difference alone: 1e-5 in fp32, at every version that was published."""
    monkeypatch.setattr(runs, "TIMEOUT_S", 800.0)
    config = runs.write_config(
        tmp_path / "config.yaml",
        model,
        loop={"mode": "sync", "steps": 6, "batch_size": 8, "batch_timeout_s": 600.0},
        rollout=SGLANG,
        supervision=PATIENT,
        evaluation={"problems": 16, "every": 3, "timeout_s": 600.0},
    )
    process = runs.start(config)
    run = runs.directory(config)
    metrics = run.metrics / "trainer.jsonl"
    runs.wait_until(lambda: metrics.exists() and len(runs.steps(run)) >= 2, process, config)
    started = processes_of(tmp_path)
    (server,) = [p for p in started if "serve" in command(p) and "engine-0-0" in command(p)[-2]]
    server.send_signal(signal.SIGKILL)
    runs.finish(process, config)

    runs.check_books(run, total_steps=6)
    lines = runs.steps(run)
    assert all(line["data/lag_max"] == 0 for line in lines)
    assert all(line["actor/current_tokens"] == line["actor/tokens"] for line in lines[1:])
    assert all(line["actor/current_log_ratio_abs_max"] < 1e-5 for line in lines[1:])
    assert all(line["alarms"] == 0 for line in lines)
    assert min(line["actor/grad_norm"] for line in lines[1:]) > 0, "a run that does not move agrees for nothing"
    assert "restarting engine-0-0 (1 of" in (run.logs / "launcher.log").read_text(encoding="utf-8")
    found = runs.evaluations(run)
    assert {("greedy", 0), ("sampled", 0)} <= {(e["mode"], e["newest_version"]) for e in found}
    assert all(e["oldest_version"] == e["newest_version"] for e in found)
    assert json.loads((run.path / "summary.json").read_text(encoding="utf-8"))
    assert not list(filter(alive, started + processes_of(tmp_path))), "servers end with the run"
    staged = list((run.path / "weights").glob("rollout-*/*/*/*.safetensors"))
    assert staged and all(file.name.startswith("rank-") for file in staged), "links to what the trainer wrote"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_servers_take_their_weights_from_the_memory_of_the_trainer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shared directory holds a version; a server that is killed catches up alone; engine and trainer agree."""
    monkeypatch.setattr(runs, "TIMEOUT_S", 800.0)
    nodes = tmp_path / "node"
    config = runs.write_config(
        tmp_path / "config.yaml",
        model,
        loop={"mode": "sync", "steps": 4, "batch_size": 8, "batch_timeout_s": 600.0},
        rollout=SGLANG,
        supervision=PATIENT,
        evaluation={"problems": 8, "every": 2, "timeout_s": 600.0},
        weights={"transport": "distributed", "node_directory": str(nodes)},
    )
    process = runs.start(config)
    run = runs.directory(config)
    metrics = run.metrics / "trainer.jsonl"
    runs.wait_until(lambda: metrics.exists() and len(runs.steps(run)) >= 2, process, config)
    assert list(nodes.glob("*/engine-0-0/*/*.safetensors")) and list(
        nodes.glob("*/engine-0-evaluation/*/*.safetensors")
    )
    (server,) = [p for p in processes_of(tmp_path) if "serve" in command(p) and "engine-0-0" in command(p)[-2]]
    server.send_signal(signal.SIGKILL)
    runs.finish(process, config)

    runs.check_books(run, total_steps=4)
    lines = runs.steps(run)
    assert all(line["actor/current_log_ratio_abs_max"] < 1e-5 for line in lines[1:])
    assert min(line["actor/grad_norm"] for line in lines[1:]) > 0, "a run that does not move agrees for nothing"
    assert all(line["data/lag_max"] == 0 for line in lines)
    assert "restarting engine-0-0 (1 of" in (run.logs / "launcher.log").read_text(encoding="utf-8")
    assert {("greedy", 0), ("greedy", 2)} <= {(e["mode"], e["newest_version"]) for e in runs.evaluations(run)}
    assert not list((run.path / "weights").rglob("*.safetensors")) and not list(nodes.rglob("*.safetensors"))


@pytest.mark.timeout(900)
def test_nothing_is_left_of_a_launcher_that_was_killed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "TIMEOUT_S", 800.0)
    config = runs.write_config(tmp_path / "config.yaml", model, rollout=SGLANG, supervision=PATIENT)
    process = runs.start(config)

    def schedulers() -> list[psutil.Process]:
        return [p for p in processes_of(tmp_path) if "scheduler" in " ".join(command(p))]

    runs.wait_until(lambda: len(schedulers()) == 2, process, config)
    everything = processes_of(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    deadline = time.monotonic() + 60
    while left := list(filter(alive, everything)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
