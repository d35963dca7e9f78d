"""Process worlds for tests: spawned once per size and test session, then sent tasks.

    results = run_world(2, "tests.megatron.cases:gradients", {"path": "...", "tensor": 2})

runs ``gradients(payload)`` on both ranks, inside an initialised torch.distributed world (no layout set), and gives the
JSON-able results by rank. An exception on any rank fails the test with that rank's traceback; a time-out names the
ranks that did not answer. After either the world is ended, and the next call starts a new one.
"""

import atexit
import gc
import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from megasao.launch.ports import free_ports

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
        self._logs = [tempfile.TemporaryFile(mode="w+b") for _ in range(size)]  # noqa: SIM115
        self._results: list[int] = []
        self._buffers = [b""] * size
        self._processes = []
        (port,) = free_ports(1)
        for rank in range(size):
            reader, writer = os.pipe()
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.megatron.world", str(writer)],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=self._logs[rank],
                    stderr=subprocess.STDOUT,
                    pass_fds=[writer],
                )
            )
            os.close(writer)
            os.set_blocking(reader, False)
            self._results.append(reader)
        self._answers(START_TIMEOUT_S, "start")

    def threads(self) -> int:
        """Threads of the rank that has most."""
        return max(psutil.Process(process.pid).num_threads() for process in self._processes)

    def alive(self) -> bool:
        """Whether every rank still runs."""
        return all(process.poll() is None for process in self._processes)

    def run(self, function: str, payload: Any, timeout_s: float) -> list[Any]:
        """Send one task to all ranks and wait for their answers."""
        task = json.dumps({"function": function, "payload": payload}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(task)
                process.stdin.flush()
            except BrokenPipeError as error:
                raise WorldFailure(f"a rank died before {function}") from error
        return self._answers(timeout_s, function)

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
        for process, reader in zip(self._processes, self._results, strict=True):
            process.wait()
            os.close(reader)

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
        chunk = os.read(self._results[rank], 1 << 20)
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


def _worker(result_descriptor: int) -> None:
    """Serve tasks until the pipe closes."""
    import torch

    from megasao.megatron import runtime

    torch.set_num_threads(1)
    runtime.initialize_world(COLLECTIVE_TIMEOUT_S)
    with os.fdopen(result_descriptor, "wb", buffering=0) as results:
        _write(results, {"result": None})
        for line in sys.stdin.buffer:
            task = json.loads(line)
            module, name = task["function"].split(":")
            try:
                answer = {"result": getattr(importlib.import_module(module), name)(task["payload"])}
                runtime.clear_layout()
                gc.collect()  # models in reference cycles hold process groups, whose threads poll
            except BaseException:
                answer = {"error": traceback.format_exc()}
            _write(results, answer)


def _write(results: Any, answer: Any) -> None:
    data = memoryview(json.dumps(answer).encode() + b"\n")
    while data:
        data = data[results.write(data) :]


if __name__ == "__main__":
    _worker(int(sys.argv[1]))
