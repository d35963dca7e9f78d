"""What stands in the trainer's place in a load run: it trains nothing, and makes trouble.

    python load_trainer.py RUN '{"seconds": 600, "kill_every_s": 60, "warm": 1000, "change_at_s": 600}'

It takes batches as fast as they come, gives out new weights every few of them, kills one SGLang server after the other
and watches them come back, and measures the memory of the rollout worker and the controller. Once it adds a server, and
removes another. At the end it takes no more, waits until every lease has ended, and writes ``RUN/load.json``. All else
of the run is the product's.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory, engine_names, training_servers
from megasao.trajectories.schema import from_batch, from_ipc
from megasao.transport.client import ControllerClient
from megasao.transport.messages import (
    BatchRequest,
    CheckpointSaved,
    Fetched,
    FetchRequest,
    FinishRequest,
    Manifest,
    Status,
    StatusRequest,
)
from megasao.weights.publisher import WeightPublisher

REPLY_S = 60.0
BACK_S = 240.0
"""Longest absence of a killed server."""
DRAIN_S = 240.0
"""Longest wait for the leases that are out at the end."""
PUBLISH_EVERY = CHECKPOINT_EVERY = 8
MEASURE_EVERY_S = 2.0


@dataclass
class Kill:
    """A server that was killed, and for how long it was away."""

    server: str
    how: str
    trajectories: int
    at: float
    away_s: float | None = None


class Killer:
    """SIGKILL, every ``every_s`` seconds, to the servers for training in turn: to the one process that serves HTTP, or
    to all of them. The next one is killed only when the one before it serves again."""

    def __init__(self, run: RunDirectory, config: Config, every_s: float) -> None:
        self._run, self._every_s = run, every_s
        self._planned, _ = engine_names(config, 0)
        self._due = time.monotonic() + every_s / 2
        self.kills: list[Kill] = []

    @property
    def waiting(self) -> bool:
        """Whether the last one is still away."""
        return bool(self.kills) and self.kills[-1].away_s is None

    def tick(self, trajectories: int) -> None:
        now = time.monotonic()
        if self.waiting:
            last = self.kills[-1]
            if self._serves(last.server):
                last.away_s = now - last.at
            assert now - last.at < BACK_S, f"{last.server} did not come back"
        elif now >= self._due:
            self._due = now + self._every_s
            number = len(self.kills)
            names = [name for name in training_servers(self._run.read_endpoints(), 0) if name in self._planned]
            name, how = names[number % len(names)], ("process", "group")[number // len(names) % 2]
            self._kill(name, how)
            self.kills.append(Kill(name, how, trajectories, time.monotonic()))

    def _kill(self, name: str, how: str) -> None:
        """The role's process leads a group of its own, which the server belongs to."""
        arguments = str(self._run.engine(name) / "args.json")
        for child in psutil.Process(os.getppid()).children(recursive=True):
            if arguments in command_of(child):
                os.killpg(os.getpgid(child.pid), signal.SIGKILL) if how == "group" else child.kill()
                return
        raise AssertionError(f"{name} does not run")

    def _serves(self, name: str) -> bool:
        try:
            url = self._run.read_endpoints().engines[name]
            with urllib.request.urlopen(f"{url}/health_generate", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


class Change:
    """One more server by `megasao engine --add`, and when that is in use, one less by `--remove`."""

    REMOVED = "engine-0-1"

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._log = run, (run.logs / "changes.log").open("ab")
        self._adding: subprocess.Popen[bytes] | None = None
        self._removing: subprocess.Popen[bytes] | None = None
        self.is_done = False

    def tick(self) -> None:
        """The next step of the change, if it is time for it."""
        said = (self._run.logs / "rollout-0.log").read_text(encoding="utf-8")
        if self._adding is None:
            self._adding = self._start("--add", "0")
        elif self._removing is None and "was added" in said:
            self._removing = self._start("--remove", self.REMOVED)
        elif self._removing is not None and self._removing.poll() is not None:
            assert self._removing.returncode == 0, "see logs/changes.log"
            self.is_done = "was drained and let go" in said and not self._is_running()
        assert self._adding.poll() is None, "the server that was added has ended"

    def _is_running(self) -> bool:
        arguments = str(self._run.engine(self.REMOVED) / "args.json")
        tree = psutil.Process(os.getppid()).children(recursive=True)
        return any(arguments in command_of(child) for child in tree)

    def _start(self, *change: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "megasao", "engine", "--run", str(self._run.path), *change]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def close(self) -> None:
        """End the server that was added."""
        if self._adding is not None:
            self._adding.terminate()
            self._adding.wait(30)


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class LoadTrainer:
    """See the module."""

    def __init__(self, run: RunDirectory, config: Config, options: dict[str, float]) -> None:
        self._run, self._config, self._options = run, config, options
        endpoints = run.read_endpoints()
        self._client = ControllerClient(endpoints.controller)
        self._publisher = WeightPublisher(endpoints.weights, config=config.transport)
        self._weights = load_file(Path(config.model.path) / "model.safetensors")
        self._lifesign = LifeSign(run.heartbeat("trainer-0"))
        self._version, self._step, self._trajectories = -1, 0, 0
        self._memory: list[dict[str, int]] = []
        self._measured = self._seconds = 0.0

    def play(self) -> None:
        self._publish()
        while self._trajectories < self._options["warm"]:
            self._take_batch()
        killer, change = Killer(self._run, self._config, self._options["kill_every_s"]), Change(self._run)
        try:
            self._make_trouble(killer, change)
            status = self._drain()
        finally:
            change.close()
        report = {
            "seconds": self._seconds,
            "trajectories": self._trajectories,
            "versions": self._version + 1,
            "steps": self._step,
            "kills": [asdict(kill) for kill in killer.kills],
            "memory": self._memory,
            "counters": status.counters,
        }
        (self._run.path / "load.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        self._ask(FinishRequest("the load run is over"))
        self._publisher.close()

    def _make_trouble(self, killer: Killer, change: Change) -> None:
        """Until the time is over, every server is back, and the change is made."""
        started = time.monotonic()
        while (passed := time.monotonic() - started) < self._options["seconds"] or killer.waiting or not change.is_done:
            self._take_batch()
            if passed < self._options["seconds"] or killer.waiting:
                killer.tick(self._trajectories)
            if passed >= self._options["change_at_s"]:
                change.tick()
            self._measure()
            assert passed < self._options["seconds"] + 2 * BACK_S, "servers did not come or go; see the run's logs"
        self._seconds = passed

    def _take_batch(self) -> None:
        """One batch with all its rows, or nothing after a short wait."""
        self._lifesign.beat()
        answer, _ = self._ask(BatchRequest(self._step, self._version))
        if not isinstance(answer, Manifest):
            return
        names = [entry.trajectory_id for entry in answer.entries]
        reply, payload = self._ask(FetchRequest(names))
        assert isinstance(reply, Fetched), reply
        assert [row.trajectory_id for row in from_batch(from_ipc(payload))] == names
        self._step, self._trajectories = self._step + 1, self._trajectories + len(names)
        if self._step % PUBLISH_EVERY == 0:
            self._publish()
        if self._step % CHECKPOINT_EVERY == 0:
            self._ask(CheckpointSaved(self._step))

    def _publish(self) -> None:
        """The weights that the run began with, and every version a little different."""
        self._version += 1
        torch.manual_seed(self._version)
        moved = {name: weight + 1e-3 * torch.randn_like(weight) for name, weight in self._weights.items()}
        self._publisher.publish(self._version, moved)

    def _drain(self) -> Status:
        """Nothing is taken any more: the buffer fills, no new leases are given, and those that are out end."""
        deadline = time.monotonic() + DRAIN_S
        while True:
            self._lifesign.beat()
            status, _ = self._ask(StatusRequest())
            assert isinstance(status, Status)
            if not status.counters["leases"]:
                return status
            assert time.monotonic() < deadline, f"leases did not end: {status.counters}"
            time.sleep(0.2)

    def _measure(self) -> None:
        """Memory of the two processes: what is theirs alone, and their shares of what is not."""
        now = time.monotonic()
        if now - self._measured < MEASURE_EVERY_S:
            return
        self._measured = now
        found = {"trajectories": self._trajectories}
        for child in psutil.Process(os.getppid()).children():
            words = command_of(child)
            for role in ("rollout", "controller"):
                if "megasao" in words and role in words:
                    found[role] = child.memory_full_info().pss
        self._memory.append(found)

    def _ask(self, message: Any) -> Any:
        return self._client.request(message, timeout_s=REPLY_S)


def main() -> None:
    run = RunDirectory(Path(sys.argv[1]))
    LoadTrainer(run, load_config(run.config), json.loads(sys.argv[2])).play()


if __name__ == "__main__":
    main()
