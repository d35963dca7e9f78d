"""One role as a process in its own session, with its output in a log file.

Invariants:
- a role, and whatever it started, is gone once ``poll`` reported its exit, and soon after its launcher's death;
- ending a role is bounded, also where the kernel or a debugger holds it back;
- an interrupt from the terminal reaches the launcher only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

KILLED_WITHIN_S = 30.0
"""How long a role that was sent SIGKILL is waited for. One in a debugger, or in a call to a device, may take longer."""
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Role:
    """What to run: ``env`` is the whole environment of the process."""

    name: str
    command: list[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    heartbeat: Path | None = None
    """The file that the role touches while it works; None is not watched."""
    ask_before_kill_s: float = 0.0
    """Longest time between SIGTERM and SIGKILL, in which a program that stands for another elsewhere ends that one."""


class Guardian:
    """The process that kills what is left of the roles when this launcher dies without a chance to."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("guardian.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def __enter__(self) -> "Guardian":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and has not read the last lines
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def watch(self, group: int) -> None:
        """``group`` lives: kill it if the launcher dies."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """``group`` is gone."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # without its guardian a run still works; the kernel kills the roles
            self._process.stdin.write(line)
            self._process.stdin.flush()


class RoleProcess:
    """A started role."""

    def __init__(self, role: Role, guardian: Guardian, attempt: int = 1) -> None:
        self.role = role
        self.code: int | None = None
        self._guardian = guardian
        self._asked_at: float | None = None
        self._last_beat = -1.0
        self._alive_at = time.monotonic()
        script = Path(__file__).with_name("child.py")
        with role.log.open("ab") as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- {stamp} {role.name}, start {attempt}: {' '.join(role.command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), str(os.getpid()), *role.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(role.env),
                start_new_session=True,
            )
        guardian.watch(self.pid)

    @property
    def pid(self) -> int:
        """Process id, and id of the role's process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code (negative: the signal that ended it), or None while it runs. Ends what the role left behind."""
        if self.code is None and self._has_exited():
            self._signal(signal.SIGKILL)  # before the process is reaped: its id cannot belong to another group yet
            self.code = self._process.wait()
            self._guardian.forget(self.pid)
        return self.code

    def silent_s(self) -> float:
        """Seconds since its last sign of life, or since its start; 0 for a role that is not watched.

        Counted on this process's own clock from when it saw the file change: a suspended machine hangs nobody.
        """
        if self.role.heartbeat is None:
            return 0.0
        try:
            beat = self.role.heartbeat.stat().st_mtime
        except OSError:  # not there yet; or a file system that fails for a moment, which must not end the run
            beat = self._last_beat
        if beat != self._last_beat:
            self._last_beat, self._alive_at = beat, time.monotonic()
        return time.monotonic() - self._alive_at

    def terminate(self) -> None:
        """Ask the role to end."""
        if self.poll() is None:
            self._signal(signal.SIGTERM)

    def notify(self, number: signal.Signals) -> None:
        """Send a signal to the role's own process, not to what it started, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the role and everything it started, and reap it; without that after KILLED_WITHIN_S."""
        self.ask()
        if self._asked_at is not None:
            deadline = self._asked_at + self.role.ask_before_kill_s
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        if self.poll() is None:
            self._signal(signal.SIGKILL)
            try:
                self.code = self._process.wait(timeout=KILLED_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.code = -signal.SIGKILL  # it dies when whatever holds it lets go
            else:
                self._guardian.forget(self.pid)

    def ask(self) -> None:
        """Begin to end a role that must be asked before it is killed; several can end at once so."""
        if self.role.ask_before_kill_s > 0 and self._asked_at is None and self.poll() is None:
            self._asked_at = time.monotonic()
            self._signal(signal.SIGTERM)

    def _has_exited(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    known = {int(member): member.name for member in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def tail(path: Path, lines: int) -> str:
    """The last lines of a log file; empty if there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
