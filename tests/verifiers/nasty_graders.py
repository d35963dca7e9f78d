"""Graders that do what a verifier must survive. Each does it for an answer of its name, and gives 1 for ``good``."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time


def grade(answer: str) -> float:
    return NASTY[answer]()


def _loop():
    while True:
        pass


def _ignores_everything():
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    return _loop()


def _memory():
    return float(len([bytearray(1 << 24) for _ in range(1000)]))


def _memory_swallowed():
    try:
        return _memory()
    except MemoryError:
        return 1.0


def _output():
    for _ in range(1024):
        os.write(1, b"x" * (1 << 20))
        os.write(2, b"x" * (1 << 20))
    return 1.0


def _child_that_stays():
    if os.fork() == 0:
        time.sleep(1000)
    return _loop()


def _swallowed(attempt):
    try:
        attempt()
    except Exception:
        return 1.0
    return 1.0


def _every_descriptor():
    for descriptor in range(64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b'{"reward": 1.0, "retire": false}' * 4000)
    return _loop()


def _writes_everywhere(data):
    for descriptor in range(64):
        with contextlib.suppress(OSError):
            os.write(descriptor, data)
    return 0.0


def _answers_twice():
    """The second answer, its own, comes when the process may be at the next job."""
    job = sys._getframe(2).f_locals["job"]
    reply = {"id": job["id"], "reward": 0.5, "retire": False}
    return _writes_everywhere(json.dumps(reply).encode() + b"\n") + 0.25


NASTY = {
    "good": lambda: 1.0,
    "bad": lambda: 0.0,
    "loop": _loop,
    "ignores": _ignores_everything,
    "sleep": lambda: time.sleep(1000),
    "segfault": lambda: ctypes.string_at(0),
    "memory": _memory,
    "memory_swallowed": _memory_swallowed,
    "output": _output,
    "exit": lambda: sys.exit(0),
    "hard_exit": lambda: os._exit(0),
    "abort": lambda: os.abort(),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "child": _child_that_stays,
    "descriptors": _every_descriptor,
    "garbage": lambda: _writes_everywhere(b"no reply\n"),
    "nameless": lambda: _writes_everywhere(b'{"reward": 1.0, "retire": false}\n'),
    "answers_twice": _answers_twice,
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "raise": lambda: 1 / 0,
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "recursion": lambda: NASTY["recursion"]() + 1,
    "evaluates": lambda: eval("1.0"),
    "evaluates_swallowed": lambda: _swallowed(lambda: eval("1.0")),
    "shell": lambda: _swallowed(lambda: os.system("true")),
    "writes": lambda: _swallowed(lambda: os.open("never-written", os.O_CREAT)),
    "socket": lambda: _swallowed(lambda: __import__("socket").socket()),
    "imports": lambda: _swallowed(lambda: __import__("webbrowser")),
    "forks": lambda: _swallowed(os.fork),
    "kills_parent": lambda: _swallowed(lambda: os.kill(os.getppid(), 9)),
}

GRADERS = {"nasty": grade}
