"""Whole runs as processes: a tiny model, few steps, the real `megasao train`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from megasao.config.rundir import RunDirectory
from megasao.observability.jsonl import read_metrics
from megasao.trajectories.journal import Journal
from megasao.trajectories.ledger import Batch, Dropped, HostedAt, Ledger, Record

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0


def write_model(directory: Path) -> Path:
    """A checkpoint of the calculator's vocabulary, smaller than the demo's."""
    command = [sys.executable, "tools/make_laptop_model.py", str(directory), "--hidden", "32", "--moe-hidden", "32"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=TIMEOUT_S)
    return directory


def write_config(path: Path, model: Path, **sections: dict[str, Any] | None) -> Path:
    """A config of a few quick steps; ``sections`` are merged into it."""
    config: dict[str, Any] = {
        "run": {"name": "run", "directory": str(path.parent)},
        "model": {"path": str(model)},
        "environment": {"max_turns": 3, "max_tokens": 64, "max_turn_tokens": 8},
        "algorithm": {"objective": {"name": "dis", "eps_low": 0.8, "eps_high": 3.0}},
        "actor": {"optimizer": {"lr": 1e-3}},
        "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 1, "head_bias": 0.5},
        "loop": {"steps": 6, "batch_size": 8, "max_lag": 4},
        "parallel": {"ranks": 1},
        "rollout": {"concurrency": 8, "embedded": {"slots": 8}},
        "evaluation": {"problems": 16, "every": 2},
        "checkpoint": {"every": 2, "keep": 5},
        "transport": {"heartbeat_s": 0.5, "dead_after_s": 5.0},
        "observability": {"panel": "lines", "examples_every": 2},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section} if section is not None else None
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """`megasao train` in its own process group; its output goes to ``train.log`` beside the config."""
    log = (config.parent / "train.log").open("a", encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "megasao", "train", str(config), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], config: Path) -> RunDirectory:
    """Wait for a good end; the assertion shows the output."""
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    output = (config.parent / "train.log").read_text(encoding="utf-8")
    assert process.returncode == 0, output[-6000:]
    return directory(config)


def train(config: Path, *arguments: str) -> RunDirectory:
    """A whole run."""
    return finish(start(config, *arguments), config)


def directory(config: Path) -> RunDirectory:
    """Where the run of ``config`` keeps its files."""
    return RunDirectory(config.parent / "run")


def steps(run: RunDirectory) -> list[dict[str, Any]]:
    """The trainer's line of each step."""
    return read_metrics(run.metrics / "trainer.jsonl")


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], config: Path) -> None:
    """Poll until the condition holds; fails with the run's output when the run ends or the time is up first."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, (config.parent / "train.log").read_text(
            encoding="utf-8"
        )[-6000:]
        time.sleep(0.05)


def role_process(launcher: subprocess.Popen[str], role: str) -> psutil.Process | None:
    """The process of a role below the launcher."""
    for child in psutil.Process(launcher.pid).children(recursive=True):
        try:
            command = child.cmdline()
        except psutil.Error:
            continue
        if "megasao" in command and role in command and "-m" in command:
            return child
    return None


def kill_role(launcher: subprocess.Popen[str], role: str) -> None:
    """SIGKILL, as a crash or the kernel's memory killer would."""
    process = role_process(launcher, role)
    assert process is not None, f"no process of role {role}"
    process.send_signal(signal.SIGKILL)


def read_ledger(run: RunDirectory) -> list[Record]:
    """Every record, also of a running or killed controller."""
    path = run.journal / "ledger.jsonl"
    if not path.exists():
        return []
    copy = run.path / "ledger-copy.jsonl"
    copy.write_bytes(path.read_bytes())
    ledger = Ledger.open(copy)
    ledger.close()
    return ledger.recovered


def journaled(run: RunDirectory) -> list[str]:
    """Ids of all trajectories in the journal, or that a rollout host was acknowledged to have in its own; in order."""
    ids = [each.trajectory_id for r in read_ledger(run) if isinstance(r, HostedAt) for each in r.summaries]
    for batch, _ in Journal(run.journal).recover():
        ids += batch.column("trajectory_id").to_pylist()
    return ids


def check_books(run: RunDirectory, total_steps: int) -> None:
    """Every step has one batch; nothing is trained twice; everything journaled is trained, dropped or still waiting."""
    records = read_ledger(run)
    batches = [record for record in records if isinstance(record, Batch)]
    assert sorted(batch.step for batch in batches) == list(range(total_steps))
    trained = [name for batch in batches for name in batch.trajectory_ids]
    assert len(trained) == len(set(trained)), "a trajectory is in two batches"
    dropped = {name for record in records if isinstance(record, Dropped) for name in record.trajectory_ids}
    assert not dropped & set(trained)
    stored = journaled(run)
    assert len(stored) == len(set(stored)), "a trajectory is journaled twice"
    assert set(trained) | dropped <= set(stored), "something was handed out that is not in the journal"
    prompts = [name.rsplit("-", 1)[0] for name in trained]
    assert len(prompts) == len(set(prompts)), "a prompt was trained on twice"


def evaluations(run: RunDirectory) -> list[dict[str, Any]]:
    """Finished evaluations."""
    return [json.loads(line) for line in run.evaluations.read_text(encoding="utf-8").splitlines()]
