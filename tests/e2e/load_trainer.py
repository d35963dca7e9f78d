"""What stands in the trainer's place in a load run: it trains nothing, and makes trouble.

    python load_trainer.py RUN '{"seconds": 600, "kill_every_s": 60, "warm": 1000, "change_at_s": 600}'

It takes batches as fast as they come, gives out new weights every few of them, kills an SGLang server at every
``kill_every_s`` of its clock and watches them come back, and measures the memory of the rollout worker and the
controller. Once it adds a server, and removes another. At the end it takes no more, waits until every lease has ended,
and writes ``RUN/load.json``. All else of the run is the product's.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
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

REPLY_S = 300.0
BACK_S = 1200.0
"""Longest absence of a killed server: a bound for what hangs, on any machine."""
DRAIN_S = 600.0
"""Longest wait for the leases that are out at the end."""
PUBLISH_EVERY = CHECKPOINT_EVERY = 8
MEASURE_EVERY_S = 2.0


@dataclass
class Kill:
    """A server that was killed ``at`` so many seconds of the run's clock, and for how long episodes did not use it."""

    server: str
    how: str
    trajectories: int
    at: float
    away_s: float | None = None


class Killer:
    """In a thread, so that nothing holds up its clock: in each ``every_s`` seconds one SIGKILL to a server for training
    that is up, to the one process that serves HTTP or to all of it. Up is what the rollout worker uses. Of two the one
    goes that was up for longer; where none is up this is noted, and nobody is killed."""

    def __init__(
        self, run: RunDirectory, config: Config, options: Mapping[str, float], count: Callable[[], int]
    ) -> None:
        self._run, self._every_s, self._count = run, options["kill_every_s"], count
        self._times = round(options["seconds"] / self._every_s)
        self._planned, _ = engine_names(config, 0)
        self._started, self._over = time.monotonic(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._returns: dict[str, int] = {}
        self.kills: list[Kill] = []
        self.nobody_up: list[float] = []
        self._thread.start()

    def is_done(self) -> bool:
        """Whether all was done, and every server is back. What went wrong in the thread is raised."""
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)

    @property
    def _clock(self) -> float:
        return time.monotonic() - self._started

    def _work(self) -> None:
        try:
            while not self._over.wait(0.25) and (self._done < self._times or self._away()):
                for kill in self._away():
                    self._look_for(kill)
                if self._done < self._times and self._clock >= self._every_s * (self._done + 0.5):
                    self._strike()
        except BaseException as error:  # raised where the run waits
            self._error = error

    @property
    def _done(self) -> int:
        return len(self.kills) + len(self.nobody_up)

    def _away(self) -> list[Kill]:
        return [kill for kill in self.kills if kill.away_s is None]

    def _strike(self) -> None:
        away = {kill.server for kill in self._away()}
        here = [name for name in training_servers(self._run.read_endpoints(), 0) if name in self._planned]
        last = {kill.server: kill.at for kill in self.kills}
        victims = sorted((name for name in here if name not in away), key=lambda name: last.get(name, -1.0))
        if not victims:
            self.nobody_up.append(self._clock)
            return
        how = ("process", "group")[len(self.kills) // 2 % 2]
        self._returns[victims[0]] = self._times_back(victims[0])
        self._kill(victims[0], how)
        self.kills.append(Kill(victims[0], how, self._count(), self._clock))

    def _kill(self, name: str, how: str) -> None:
        """The role's process leads a group of its own, which the server belongs to."""
        arguments = str(self._run.engine(name) / "args.json")
        for child in psutil.Process(os.getppid()).children(recursive=True):
            if arguments in command_of(child):
                os.killpg(os.getpgid(child.pid), signal.SIGKILL) if how == "group" else child.kill()
                return
        raise AssertionError(f"{name} does not run")

    def _look_for(self, kill: Kill) -> None:
        if self._times_back(kill.server) > self._returns[kill.server]:
            kill.away_s = self._clock - kill.at
        assert self._clock - kill.at < BACK_S, f"{kill.server} did not come back"

    def _times_back(self, name: str) -> int:
        """How often the worker has said that it uses the server again."""
        said = (self._run.logs / "rollout-0.log").read_text(encoding="utf-8")
        return said.count(f"{self._run.read_endpoints().engines[name]} is used again")


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
        change = Change(self._run)
        killer = Killer(self._run, self._config, self._options, lambda: self._trajectories)
        try:
            self._make_trouble(killer, change)
            status = self._drain()
        finally:
            killer.close()
            change.close()
        report = {
            "seconds": self._seconds,
            "trajectories": self._trajectories,
            "versions": self._version + 1,
            "steps": self._step,
            "kills": [asdict(kill) for kill in killer.kills],
            "nobody_up": killer.nobody_up,
            "memory": self._memory,
            "counters": status.counters,
        }
        (self._run.path / "load.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        self._ask(FinishRequest("the load run is over"))
        self._publisher.close()

    def _make_trouble(self, killer: Killer, change: Change) -> None:
        """Until the time is over, every server is back, the change is made, and versions were more than kills."""
        started = time.monotonic()
        while True:
            passed = time.monotonic() - started
            is_done = killer.is_done() and change.is_done and self._version >= len(killer.kills)
            if is_done and passed >= self._options["seconds"]:
                break
            self._take_batch()
            if passed >= self._options["change_at_s"] and not change.is_done:
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
        """Memory of the two processes that is theirs alone: shares of libraries change with whoever else runs."""
        now = time.monotonic()
        if now - self._measured < MEASURE_EVERY_S:
            return
        self._measured = now
        found = {"trajectories": self._trajectories}
        for child in psutil.Process(os.getppid()).children():
            words = command_of(child)
            for role in ("rollout", "controller"):
                if "megasao" in words and role in words:
                    found[role] = child.memory_full_info().uss
        self._memory.append(found)

    def _ask(self, message: Any) -> Any:
        return self._client.request(message, timeout_s=REPLY_S)


def main() -> None:
    run = RunDirectory(Path(sys.argv[1]))
    LoadTrainer(run, load_config(run.config), json.loads(sys.argv[2])).play()


if __name__ == "__main__":
    main()
