"""Process worlds for tests: started once per size and test session, then sent tasks. Ranks are forked by a process that
has imported what they all need: that takes seconds, and would be paid for each of them.

    results = run_world(2, "tests.megatron.cases:gradients", {"path": "...", "tensor": 2})

runs ``gradients(payload)`` on both ranks, inside an initialised torch.distributed world (no layout set), and gives the
JSON-able results by rank. An exception on any rank fails the test with that rank's traceback; a time-out names the
ranks that did not answer. After either the world is ended, and the next call starts a new one.
"""

import atexit
import gc
import importlib
import json
import multiprocessing
import multiprocessing.util  # before atexit is told of worlds: its own end waits for processes
import os
import selectors
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from megasao.launch.ports import free_ports

_ranks = multiprocessing.get_context("forkserver")
# Nothing that starts a thread, as what reads trajectories does: it would be missing in what is forked.
_ranks.set_forkserver_preload(["megasao.megatron", "tests.megatron.cases", "tests.megatron.family_cases"])
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 300.0
AFTER_FAILURE_S = 3.0
MOST_THREADS = 400
"""A world whose ranks have more is not used again: gloo threads of models that something still holds poll for ever."""


class WorldFailure(AssertionError):
    """A rank raised, died or did not answer."""


def run_world(size: int, function: str, payload: Any = None, *, timeout_s: float = 400.0) -> list[Any]:
    """Run ``module:function`` on every rank of a world of ``size`` processes; results by rank."""
    world = _worlds.get(size)
    if world is None or not world.alive():
        world = _worlds[size] = World(size)
    try:
        results = world.run(function, payload, timeout_s)
    except WorldFailure:
        world.kill()
        del _worlds[size]
        raise
    if world.threads() > MOST_THREADS:
        world.kill()
        del _worlds[size]
    return results


class World:
    """``size`` worker processes, each with a pipe for tasks and a pipe for results (JSON lines)."""

    def __init__(self, size: int) -> None:
        self._logs = [tempfile.NamedTemporaryFile(mode="w+b") for _ in range(size)]  # noqa: SIM115
        self._results: list[Connection] = []
        self._tasks: list[Connection] = []
        self._buffers = [b""] * size
        self._processes = []
        (port,) = free_ports(1)
        for rank in range(size):
            results, result = _ranks.Pipe(duplex=False)
            task, tasks = _ranks.Pipe(duplex=False)
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            process = _ranks.Process(target=_rank, args=(environment, self._logs[rank].name, task, result))
            process.start()
            for theirs in (task, result):
                theirs.close()
            os.set_blocking(results.fileno(), False)
            self._processes.append(process)
            self._tasks.append(tasks)
            self._results.append(results)
        self._answers(START_TIMEOUT_S, "start")

    def threads(self) -> int:
        """Threads of the rank that has most."""
        return max(psutil.Process(process.pid).num_threads() for process in self._processes)

    def alive(self) -> bool:
        """Whether every rank still runs."""
        return all(process.is_alive() for process in self._processes)

    def run(self, function: str, payload: Any, timeout_s: float) -> list[Any]:
        """Send one task to all ranks and wait for their answers."""
        task = json.dumps({"function": function, "payload": payload}).encode()
        for tasks in self._tasks:
            try:
                tasks.send_bytes(task)
            except BrokenPipeError as error:
                raise WorldFailure(f"a rank died before {function}") from error
        return self._answers(timeout_s, function)

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
        for process, tasks, results in zip(self._processes, self._tasks, self._results, strict=True):
            process.join()
            tasks.close()
            results.close()

    def _answers(self, timeout_s: float, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, reader in enumerate(self._results):
                selector.register(reader, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes) and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    line = self._read_line(key.data)
                    if line == b"":
                        selector.unregister(key.fileobj)
                        answers[key.data] = {"error": f"process ended\n{self._log(key.data)}"}
                    elif line is not None:
                        answers[key.data] = json.loads(line)
                if any("error" in answer for answer in answers.values()):
                    # The others may raise too, or wait for the failed one: not for long.
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        self._raise_failures(answers, what, timeout_s)
        return [answers[rank]["result"] for rank in range(len(self._processes))]

    def _read_line(self, rank: int) -> bytes | None:
        """A whole line; None if it is not whole yet; b"" at the end of the stream."""
        chunk = os.read(self._results[rank].fileno(), 1 << 20)
        if not chunk:
            return b""
        self._buffers[rank] += chunk
        if not self._buffers[rank].endswith(b"\n"):
            return None
        line, self._buffers[rank] = self._buffers[rank], b""
        return line

    def _raise_failures(self, answers: dict[int, Any], what: str, timeout_s: float) -> None:
        failures = [f"rank {rank}: {answer['error']}" for rank, answer in answers.items() if "error" in answer]
        silent = [rank for rank in range(len(self._processes)) if rank not in answers]
        if silent:
            failures += [f"rank {rank} did not answer; its log ends:\n{self._log(rank)}" for rank in silent]
        if failures:
            raise WorldFailure(f"{what} failed (time-out {timeout_s} s)\n" + "\n".join(failures))

    def _log(self, rank: int) -> str:
        log = self._logs[rank]
        log.flush()
        end = log.seek(0, os.SEEK_END)
        log.seek(max(0, end - 4000))
        return log.read().decode(errors="replace")


_worlds: dict[int, World] = {}


@atexit.register
def _kill_all() -> None:
    for world in _worlds.values():
        world.kill()


def _rank(environment: dict[str, str], log: str, tasks: Connection, results: Connection) -> None:
    """The process of one rank: serve tasks until the pipe closes."""
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    import torch

    from megasao.megatron import runtime

    torch.set_num_threads(1)
    runtime.initialize_world(COLLECTIVE_TIMEOUT_S)
    _write(results, {"result": None})
    with suppress(EOFError):
        while True:
            task = json.loads(tasks.recv_bytes())
            module, name = task["function"].split(":")
            try:
                answer = {"result": getattr(importlib.import_module(module), name)(task["payload"])}
                runtime.clear_layout()
                gc.collect()  # models in reference cycles hold process groups, whose threads poll
            except BaseException:
                answer = {"error": traceback.format_exc()}
            _write(results, answer)


def _write(results: Connection, answer: Any) -> None:
    data = memoryview(json.dumps(answer).encode() + b"\n")
    while data:
        data = data[os.write(results.fileno(), data) :]
