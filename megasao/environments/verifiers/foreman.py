"""The process between a verifier pool and its workers: it forks them, hands out jobs, and kills those that overstay.

Standard input has a job a line, ``{"id", "grader", "payload"}``; standard output a result a line, ``{"id", "reward"}``
or ``{"id", "error", "detail"}``, after a first line ``{"ready": true}``. The graders are imported here once, so a new
worker is one fork.

Invariants:
- every job that came in gets exactly one result, in time: a worker has ``time_limit_s`` for a job, then it is killed
  with everything it started;
- no more than ``workers`` jobs run at once; a worker that dies takes one job with it, and is replaced;
- a worker is believed one reply, to the job that it is at; whatever else it says ends it, and nobody else's job;
- the end of standard input ends this process, and its workers with it.
"""

import contextlib
import importlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from megasao.environments.verifiers.worker import Grader, Guarding, memory_in_use, serve

MAX_REPLY = 64 * 1024
"""Longest reply of a worker, bytes."""

_HEADROOM = 64 << 20


@dataclass
class Worker:
    """A forked process, and the job it is at."""

    pid: int
    channel: socket.socket
    job_id: Any = None
    job: bytes = b""
    used: bool = False
    """Whether it has answered a job before this one."""
    deadline: float = float("inf")
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)

    @property
    def idle(self) -> bool:
        """Whether it may get a job."""
        return self.job_id is None


class Foreman:
    """The loop of this process."""

    def __init__(self, graders: dict[str, Grader], settings: dict[str, Any]) -> None:
        self._graders = graders
        self._limit = int(settings["workers"])
        self._time_limit_s = float(settings["time_limit_s"])
        self._memory_bytes = int(settings["memory_bytes"])
        self._guarding: Guarding = settings["guarding"]
        self._waiting: deque[tuple[Any, bytes]] = deque()
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._unread = bytearray()

    def run(self) -> None:
        """Serve until standard input ends."""
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, None)
        try:
            while True:
                self._hand_out()
                for key, events in self._selector.select(self._patience()):
                    if key.data is None:
                        if not self._take_jobs():
                            return
                    elif key.data in self._workers:
                        self._attend(key.data, events)
                self._end_overdue()
        finally:
            for worker in list(self._workers):
                self._end(worker)

    # jobs in, results out

    def _take_jobs(self) -> bool:
        """Read what is there; False at the end of input."""
        data = os.read(0, 1 << 20)
        if not data:
            return False
        self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        for line in lines:
            self._waiting.append((json.loads(line)["id"], bytes(line) + b"\n"))
        return True

    def _report(self, job_id: Any, reply: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({"id": job_id, **reply}) + "\n")
        sys.stdout.flush()

    def _hand_out(self) -> None:
        while self._waiting:
            worker = next((w for w in self._workers if w.idle), None)
            if worker is None:
                if len(self._workers) >= self._limit:
                    return
                worker = self._fork()
            worker.job_id, worker.job = self._waiting.popleft()
            worker.outgoing = worker.job
            worker.deadline = time.monotonic() + self._time_limit_s
            self._send(worker)

    # workers

    def _fork(self) -> Worker:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._become_worker(theirs)
        with contextlib.suppress(OSError):  # the child does it too; whoever is first
            os.setpgid(pid, pid)
        theirs.close()
        ours.setblocking(False)
        worker = Worker(pid, ours)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return worker

    def _become_worker(self, channel: socket.socket) -> None:
        """The child: never returns."""
        status = 1
        try:
            os.setpgid(0, 0)
            self._selector.close()
            for worker in self._workers:
                worker.channel.close()
            serve(channel, self._graders, memory_bytes=self._memory_bytes, guarding=self._guarding)
            status = 0
        finally:
            os._exit(status)

    def _send(self, worker: Worker) -> None:
        """What the channel takes now; the rest when it is writable again."""
        try:
            sent = worker.channel.send(worker.outgoing) if worker.outgoing else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lost(worker)
            return
        worker.outgoing = worker.outgoing[sent:]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        self._selector.modify(worker.channel, wanted, worker)

    def _attend(self, worker: Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(worker)
        if events & selectors.EVENT_READ and worker in self._workers:
            self._receive(worker)

    def _receive(self, worker: Worker) -> None:
        try:
            data = worker.channel.recv(MAX_REPLY)
        except OSError:
            data = b""
        worker.incoming += data
        if not data or worker.idle:
            self._lost(worker)
        elif len(worker.incoming) > MAX_REPLY:
            self._misled(worker, f"a reply of more than {MAX_REPLY} bytes")
        elif worker.incoming.endswith(b"\n"):
            self._finished(worker)

    def _finished(self, worker: Worker) -> None:
        reply = read_reply(bytes(worker.incoming))
        if reply is None or reply["id"] != worker.job_id:
            self._misled(worker, "the verifier process wrote what is no reply")
            return
        retire, _ = reply.pop("retire"), reply.pop("id")
        job_id, worker.job_id = worker.job_id, None
        worker.used, worker.deadline, worker.incoming = True, float("inf"), bytearray()
        if retire:
            self._end(worker)
        self._report(job_id, reply)

    def _misled(self, worker: Worker, detail: str) -> None:
        """It did not answer its job, or not alone. An earlier one may have left that behind, and it may have come with
        this one's answer: then this one runs again, on a process of its own."""
        if worker.used:
            self._waiting.appendleft((worker.job_id, worker.job))
            self._end(worker)
        else:
            self._fail(worker, "output", detail)

    def _lost(self, worker: Worker) -> None:
        """It died by itself."""
        job_id, status = worker.job_id, self._end(worker)
        if job_id is not None:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
            self._report(job_id, {"error": "crash", "detail": f"the verifier process ended with {how}"})

    def _fail(self, worker: Worker, reason: str, detail: str) -> None:
        job_id = worker.job_id
        self._end(worker)
        self._report(job_id, {"error": reason, "detail": detail})

    def _end(self, worker: Worker) -> int:
        """Kill it, with everything it started; its wait status."""
        self._selector.unregister(worker.channel)
        worker.channel.close()
        self._workers.remove(worker)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        return os.waitpid(worker.pid, 0)[1]

    # time

    def _patience(self) -> float | None:
        nearest = min((w.deadline for w in self._workers), default=float("inf"))
        return None if nearest == float("inf") else max(0.0, nearest - time.monotonic())

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now]:
            self._fail(worker, "timeout", f"longer than {self._time_limit_s:g} s")


def read_reply(line: bytes) -> dict[str, Any] | None:
    """``id``, ``retire``, and either a finite ``reward`` or ``error`` and ``detail``; None for anything else."""
    try:
        said = json.loads(line)
        found = {"id": said["id"], "retire": bool(said["retire"])}
        if "error" in said:
            return {**found, "error": str(said["error"])[:100], "detail": str(said["detail"])[:1000]}
        reward = said["reward"]
        is_number = isinstance(reward, int | float) and math.isfinite(reward)
        return {**found, "reward": float(reward)} if is_number else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def load_graders(modules: list[str]) -> dict[str, Grader]:
    """The ``GRADERS`` of each module, by name."""
    graders: dict[str, Grader] = {}
    for name in modules:
        graders |= importlib.import_module(name).GRADERS
    return graders


def main() -> None:
    """The process: its settings are one JSON argument."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which closes our input
    graders = load_graders(settings["modules"])
    needed = memory_in_use() + _HEADROOM
    if needed > settings["memory_bytes"]:
        sys.exit(
            f"verifiers need at least {(needed >> 20) + 1} MiB a process, got {settings['memory_bytes'] >> 20} MiB"
        )
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    with contextlib.suppress(BrokenPipeError):
        Foreman(graders, settings).run()


if __name__ == "__main__":
    main()
