"""Running a command that a model wrote, with limits.

Invariants:
- a command ends in bounded time, and nothing of it runs on afterwards;
- a command that a limit stopped leaves the workspace as it was before it;
- output beyond the limit is dropped, not kept;
- a failure of the sandbox itself is an EnvironmentFailure; nothing that a command does, says or leaves is one.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from megasao.environments.base import EnvironmentFailure
from megasao.environments.sandbox import bubblewrap
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.workspace import is_workspace, pack

Kind = Literal["bubblewrap", "none"]

END_TIMEOUT_S = 20.0
_WATCH_S = 0.1
ARCHIVE_OVERHEAD = 4 << 20

# Said on standard output before the command runs: without it the sandbox did not start.
_BEGUN = b"begun\n"

# The workspace comes in on standard input and goes out on standard output; the command's output goes to standard error.
# What cannot be unpacked (2) is left out: a command may have made names that are too long, or files that swell.
_SCRIPT = f"""
said=$(tar -xf - --no-same-owner 2>&1)
code=$?
[ $code = 0 ] || printf '%.500s\\n' "$said" >&2
[ $code -le 2 ] || exit 125
printf '{_BEGUN.decode().strip()}\\n'
"$@" </dev/null >&2
code=$?
tar -cf - . 2>/dev/null
exit $code
"""


@dataclass(frozen=True)
class Outcome:
    """``exit_code`` is None where a limit (``stopped_by``) ended the command. ``output``: both streams, in order."""

    exit_code: int | None
    stopped_by: Literal["time", "memory"] | None
    output: str
    truncated: bool
    workspace: bytes
    seconds: float


class Sandbox:
    """Runs commands one by one; each gets a workspace and gives one back."""

    def __init__(self, kind: Kind = "bubblewrap", limits: SandboxLimits | None = None) -> None:
        """``none`` isolates nothing, and must be asked for by hand. SandboxUnavailable."""
        if kind == "bubblewrap":
            bubblewrap.require()
        elif kind != "none":
            raise ValueError(f"sandbox: expected bubblewrap or none, got {kind!r}")
        self.kind, self.limits = kind, limits or SandboxLimits()

    async def run(self, command: Sequence[str], workspace: bytes | None = None) -> Outcome:
        """Run ``command`` in the workspace (empty if None). EnvironmentFailure if the sandbox itself breaks."""
        before = pack({}) if workspace is None else workspace
        if not is_workspace(before):
            raise EnvironmentFailure("the sandbox did not start: the workspace is no archive")
        with tempfile.TemporaryDirectory() if self.kind == "none" else contextlib.nullcontext("/") as directory:
            started = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *self._command(command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                cwd=directory,
                **(bubblewrap.identity() if self.kind == "bubblewrap" else {}),
            )
            try:
                return await self._finish(process, before, started)
            finally:
                await _end(process)

    def _command(self, command: Sequence[str]) -> list[str]:
        limits = self.limits
        limited = [
            shutil.which("prlimit") or "prlimit",
            f"--nproc={limits.processes}",
            f"--as={limits.memory_bytes}",
            f"--fsize={limits.file_bytes}",
            "--core=0",
            "--",
            "/bin/sh",
            "-c",
            _SCRIPT,
            "sh",
            *command,
        ]
        if self.kind == "none":
            return limited
        variables = [("PYTHONDONTWRITEBYTECODE", "1")]  # else caches of bytecode fill the workspace
        return bubblewrap.wrap(limited, writable_bytes=limits.workspace_bytes, environment=variables)

    async def _finish(self, process: asyncio.subprocess.Process, before: bytes, started: float) -> Outcome:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        archive_limit = self.limits.workspace_bytes + ARCHIVE_OVERHEAD
        streams = asyncio.gather(
            _write(process.stdin, before),
            _read(process.stdout, len(_BEGUN) + archive_limit),
            _read(process.stderr, self.limits.output_bytes),
        )
        stopped_by = await self._watch(process, streams)
        if stopped_by is not None:
            await _end(process)
        try:
            _, (written, archive_cut), (output, cut) = await asyncio.wait_for(streams, END_TIMEOUT_S)
        except TimeoutError:
            raise EnvironmentFailure(
                f"a sandboxed command did not end within {END_TIMEOUT_S:g} s of its kill"
            ) from None
        code = await process.wait()
        said = output.decode(errors="replace")
        if stopped_by is None and not written.startswith(_BEGUN):
            raise EnvironmentFailure(f"the sandbox did not start: {said[-500:]}")
        archive = written[len(_BEGUN) :]
        # Without an archive the script was ended from inside, or something was written between: all stays as it was.
        whole = stopped_by is None and is_workspace(archive) and not archive_cut
        return Outcome(
            exit_code=code if stopped_by is None else None,
            stopped_by=stopped_by,
            output=said,
            truncated=cut,
            workspace=archive if whole else before,
            seconds=time.monotonic() - started,
        )

    async def _watch(
        self, process: asyncio.subprocess.Process, streams: "asyncio.Future[Any]"
    ) -> Literal["time", "memory"] | None:
        """Until the command ends by itself (None) or must be ended (why)."""
        deadline = time.monotonic() + self.limits.time_s
        while True:
            done, _ = await asyncio.wait([streams], timeout=_WATCH_S)
            if done:
                return None
            if time.monotonic() >= deadline:
                return "time"
            if memory_of(process.pid) > self.limits.memory_bytes:
                return "memory"


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it ended before it had read everything
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, limit: int) -> tuple[bytes, bool]:
    """The first ``limit`` bytes of a stream, read to its end; whether there were more."""
    kept, cut = bytearray(), False
    while data := await stream.read(1 << 16):
        room = limit - len(kept)
        kept += data[:room]
        cut = cut or len(data) > room
    return bytes(kept), cut


def memory_of(pid: int) -> int:
    """Resident bytes of a process and all it started."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the sandbox with everything in it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
