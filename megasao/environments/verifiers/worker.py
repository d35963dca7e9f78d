"""One worker of the verifier pool: a forked process that grades one answer at a time, under limits.

Invariants:
- a job ends in a reward that is a finite number, or in an error with its reason, never in both;
- memory is bounded by the kernel, and a job that came near the bound is an error even if a library caught the
  exception; the process is then replaced;
- what a job prints goes nowhere; its files and its core would be empty; it dies with its parent.
"""

import ctypes
import json
import math
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any, Literal

from megasao.environments.verifiers import guard

Grader = Callable[..., float]

Guarding = Literal["full", "evaluate", "off"]
"""``full``: nothing is executed from text, no files, processes or sockets. ``evaluate``: text may be executed."""

JOBS_PER_PROCESS = 512
"""Jobs after which a process is replaced: parsers keep caches."""

_NEAR = 0.9
"""Share of the memory limit from which on a job counts as stopped by it."""

_PR_SET_PDEATHSIG = 1


def serve(channel: socket.socket, graders: dict[str, Grader], *, memory_bytes: int, guarding: Guarding) -> None:
    """Answer jobs, a JSON line each, until the channel is closed or this process should be replaced."""
    restrict(memory_bytes)
    if guarding != "off":
        guard.install(may_evaluate=guarding == "evaluate")
    with channel.makefile("rb") as jobs:
        for number, line in enumerate(jobs, 1):
            job = json.loads(line)
            reply = attempt(graders, job)
            if peak_memory() > _NEAR * memory_bytes:
                reply = {"error": "memory", "detail": f"more than {memory_bytes >> 20} MiB"}
            reply["id"] = job["id"]
            reply["retire"] = reply.get("error") == "memory" or number == JOBS_PER_PROCESS
            channel.sendall(json.dumps(reply).encode() + b"\n")
            if reply["retire"]:
                return


def attempt(graders: dict[str, Grader], job: dict[str, Any]) -> dict[str, Any]:
    """``{"reward": r}`` or ``{"error": reason, "detail": text}``."""
    guard.take_refusals()
    reply: dict[str, Any]
    try:
        reward = float(graders[job["grader"]](**job["payload"]))
    except MemoryError:
        return {"error": "memory", "detail": "out of memory"}
    except BaseException as error:  # also SystemExit: nothing that a grader raises may end in a reward
        reply = {"error": "error", "detail": f"{type(error).__name__}: {error}"[:500]}
    else:
        reply = {"error": "error", "detail": f"the grader returned {reward}"}
        if math.isfinite(reward):
            reply = {"reward": reward}
    refused = guard.take_refusals()
    return {"error": "refused", "detail": "; ".join(refused)[:500]} if refused else reply


def restrict(memory_bytes: int) -> None:
    """Limits of this process, for good."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))


def peak_memory() -> int:
    """Most bytes of address space that this process ever had."""
    return _status("VmPeak")


def memory_in_use() -> int:
    """Bytes of address space that this process has."""
    return _status("VmSize")


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024
