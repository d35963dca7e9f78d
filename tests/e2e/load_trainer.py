"""What stands in the trainer's place in a load run: it trains nothing, and makes trouble.

    python load_trainer.py RUN '{"seconds": 600, "kill_every_s": 60, "warm": 1000}'

It takes batches as fast as they come, gives out new weights every few of them, kills one SGLang server after the other
and watches them come back, and measures the memory of the rollout worker and the controller. At the end it takes no
more, waits until every lease has ended, and writes ``RUN/load.json``. Everything else of the run is the product's.
"""

import json
import os
import signal
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
from megasao.config.rundir import RunDirectory, engine_names
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
        self._names, _ = engine_names(config, 0)
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
            name, how = self._names[number % len(self._names)], ("process", "group")[number // len(self._names) % 2]
            self._kill(name, how)
            self.kills.append(Kill(name, how, trajectories, time.monotonic()))

    def _kill(self, name: str, how: str) -> None:
        """The role's process leads a group of its own, which the server belongs to."""
        arguments = str(self._run.engine(name) / "args.json")
        for child in psutil.Process(os.getppid()).children(recursive=True):
            try:
                found = arguments in child.cmdline()
            except psutil.Error:
                continue
            if found:
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
        self._measured = 0.0

    def play(self) -> None:
        self._publish()
        while self._trajectories < self._options["warm"]:
            self._take_batch()
        killer = Killer(self._run, self._config, self._options["kill_every_s"])
        started, before = time.monotonic(), self._trajectories
        while time.monotonic() - started < self._options["seconds"] or killer.waiting:
            self._take_batch()
            killer.tick(self._trajectories)
            self._measure()
        seconds, trajectories = time.monotonic() - started, self._trajectories - before
        status = self._drain()
        report = {
            "seconds": seconds,
            "trajectories": trajectories,
            "versions": self._version + 1,
            "steps": self._step,
            "kills": [asdict(kill) for kill in killer.kills],
            "memory": self._memory,
            "counters": status.counters,
        }
        (self._run.path / "load.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        self._ask(FinishRequest("the load run is over"))
        self._publisher.close()

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
            words = child.cmdline()
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
