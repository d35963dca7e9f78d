"""Grading in processes that can be killed, for asyncio programs.

Invariants:
- ``grade`` returns a reward or raises VerifierError with a counted reason; a failure is never a reward;
- a bad answer hurts its own sample only: the others get the reward they would have got alone;
- every wait is bounded: start-up, each job once it runs, the foreman's silence, shutdown;
- after ``close``, or after this process dies, no verifier process is left.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megasao
from megasao.environments.base import EnvironmentFailure
from megasao.environments.verifiers.worker import Guarding

START_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 10.0
_SILENCE_S = 30.0
"""How much longer than one job's time limit the foreman may say nothing while jobs wait."""

MAX_ANSWER = 1 << 20
"""Longest text of one job, characters: no verifier has use for more."""


class VerifierError(EnvironmentFailure):
    """The answer could not be graded.

    ``reason`` is ``verifier_`` and the kind: timeout, memory, crash, output, refused, error or pool.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"verifier {kind}: {detail}")
        self.reason = f"verifier_{kind}"


@dataclass(frozen=True)
class Limits:
    """Of one pool. ``memory_bytes`` is address space of each process."""

    workers: int = 2
    time_limit_s: float = 10.0
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"verifier workers: expected 1 or more, got {self.workers}")
        if not 0 < self.time_limit_s < float("inf"):
            raise ValueError(f"verifier time limit: expected seconds above 0, got {self.time_limit_s}")
        if self.memory_bytes < 1 << 26:
            raise ValueError(f"verifier memory: expected at least 64 MiB, got {self.memory_bytes / 2**20:g} MiB")


Wrap = Callable[[Sequence[str], Mapping[str, str]], list[str]]
"""From a command and its environment to the command that runs it in a sandbox."""


class VerifierPool:
    """Graders of the given modules (each has a dict ``GRADERS``) in killable processes; started on first use."""

    def __init__(
        self,
        modules: Sequence[str],
        limits: Limits | None = None,
        *,
        guarding: Guarding = "full",
        wrap: Wrap | None = None,
    ) -> None:
        """``wrap`` puts all the processes into one sandbox; graders that evaluate answers need one."""
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        self._modules, self._guarding, self._wrap = list(modules), guarding, wrap
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[float]] = {}
        self._ids = itertools.count()

    async def grade(self, grader: str, **payload: Any) -> float:
        """The reward of one job, a finite number. VerifierError."""
        size = sum(len(value) for value in payload.values() if isinstance(value, str))
        if size > MAX_ANSWER:
            raise self._error("output", f"{size} characters, more than {MAX_ANSWER}")
        process = await self._running()
        job_id = next(self._ids)
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[job_id] = future
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"id": job_id, "grader": grader, "payload": payload}).encode() + b"\n")
            with contextlib.suppress(ConnectionError):  # then the reader has seen its end, and fails the future
                await process.stdin.drain()
            return await future
        finally:
            self._waiting.pop(job_id, None)

    async def close(self) -> None:
        """End every verifier process; jobs that wait fail. The pool may be used again, also in another event loop."""
        async with self._starting:  # not while they start
            process, reader = self._process, self._reader
            self._process = self._reader = self._loop = None
        self._starting = asyncio.Lock()
        if process is None or reader is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        await self._bury(process)
        await reader

    async def __aenter__(self) -> "VerifierPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # the foreman

    async def _running(self) -> asyncio.subprocess.Process:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise RuntimeError("a verifier pool belongs to the event loop that used it first; close it there")
        self._loop = loop
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()
                self._reader = asyncio.create_task(self._read(self._process), name="verifiers")
            return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        settings = {
            "modules": self._modules,
            "workers": self.limits.workers,
            "time_limit_s": self.limits.time_limit_s,
            "memory_bytes": self.limits.memory_bytes,
            "guarding": self._guarding,
        }
        command = [sys.executable, "-m", "megasao.environments.verifiers.foreman", json.dumps(settings)]
        variables = {"PYTHONPATH": os.pathsep.join(source_path()), "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *(self._wrap(command, variables) if self._wrap else command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={} if self._wrap else {**os.environ, **variables},
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            ready = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            ready = b""
        except asyncio.CancelledError:
            await self._bury(process)
            raise
        if not ready:
            await self._bury(process)
            said = (await process.stderr.read()).decode(errors="replace").strip()[-2000:]
            raise self._error("pool", f"the verifiers did not start: {said or f'silent for {START_TIMEOUT_S:g} s'}")
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Results, until the foreman ends or falls silent while jobs wait; then those fail."""
        assert process.stdout is not None
        patience = self.limits.time_limit_s + _SILENCE_S
        while True:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), patience)
            except TimeoutError:
                if not self._waiting:
                    continue
                line = b""
            if not line:
                break
            self._settle(json.loads(line))
        await self._bury(process)
        if self._process is process:
            self._process = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._error("pool", "the verifier processes ended"))

    def _settle(self, result: dict[str, Any]) -> None:
        future = self._waiting.get(result["id"])
        if future is None or future.done():  # its caller was cancelled
            return
        if "reward" in result:
            self.counts["graded"] += 1
            future.set_result(result["reward"])
        else:
            future.set_exception(self._error(result["error"], result["detail"]))

    def _error(self, kind: str, detail: str) -> VerifierError:
        self.counts[kind] += 1
        return VerifierError(kind, detail)

    @staticmethod
    async def _bury(process: asyncio.subprocess.Process) -> None:
        """Kill the foreman if it lives; its workers die with it."""
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # process.kill() may reap it before the loop does
        await process.wait()


def source_path() -> list[str]:
    """Where the verifier processes find this package and the graders: this process's own path, made absolute."""
    own = str(Path(megasao.__file__).parents[1])
    return [own, *(str(Path(entry).absolute()) for entry in sys.path if entry and Path(entry).absolute() != Path(own))]
