"""An audit hook for verifier processes: no text becomes code, and nothing outside the process is touched.

A grader reads text that a model wrote, with libraries that parse formulas. If one of them tried to evaluate the text,
to start a process, to open a socket, or to write a file, the attempt is refused before it happens, and noted, because
such libraries catch every exception.

Where graders must evaluate text, and run in a sandbox for it, the rest is still refused.

Invariants:
- after ``install`` no source text can be executed in this process (unless ``may_evaluate``), and the hook cannot be
  removed;
- importing modules from files still works, except those whose only use is to reach outside;
- ``take_refusals`` gives every attempt since the last call, whether or not its exception was caught.
"""

import os
import sys
from types import CodeType
from typing import Any

_REFUSED = {
    "code.__new__",
    "os.chdir",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.killpg",
    "os.link",
    "os.mkdir",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.unsetenv",
    "pickle.find_class",
    "pty.spawn",
    "signal.pthread_kill",
    "subprocess.Popen",
    "sys.addaudithook",
    "urllib.Request",
}
_REFUSED_FAMILIES = ("ctypes.", "ftplib.", "http.", "imaplib.", "shutil.", "smtplib.", "socket.", "webbrowser.")
_REFUSED_MODULES = {"ctypes", "ftplib", "multiprocessing", "pty", "smtplib", "socket", "subprocess", "webbrowser"}

_OWN_TEXT = {"collections", "dataclasses", "typing", "sympy.polys.monomials"}
"""Modules that execute text of their own making: for new classes, and products of monomials of n variables."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_refusals: list[str] = []
_installed = False
_may_evaluate = False


class Refused(RuntimeError):
    """What the process tried is not allowed in it."""


def install(*, may_evaluate: bool = False) -> None:
    """Guard this process for the rest of its life."""
    global _installed, _may_evaluate
    if not _installed:
        _installed, _may_evaluate = True, may_evaluate
        sys.addaudithook(_audit)


def take_refusals() -> list[str]:
    """What was refused since the last call."""
    found = _refusals[:]
    _refusals.clear()
    return found


def refuse(attempt: str) -> Refused:
    """Note an attempt; the exception to raise."""
    _refusals.append(attempt[:200])
    return Refused(attempt[:200])


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _is_refused(event, arguments):
        return
    raise refuse(f"{event} {arguments[0]!r}" if arguments else event)


def _is_refused(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        return _opens_for_writing(arguments)
    if event == "exec":
        return not _may_evaluate and _is_from_text(arguments[0])
    if event == "import":
        return str(arguments[0]).partition(".")[0] in _REFUSED_MODULES
    return event in _REFUSED or event.startswith(_REFUSED_FAMILIES)


def _opens_for_writing(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    return any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITES)


def _is_from_text(code: CodeType) -> bool:
    """Whether code about to run came from a string, and not from a module's file or one of ``_OWN_TEXT``."""
    name = code.co_filename
    if not name.startswith("<") or name.startswith("<frozen "):
        return False
    frame: Any = sys._getframe(3)  # the one that calls exec or eval: beyond this, _is_refused and _audit
    return frame.f_globals.get("__name__") not in _OWN_TEXT
