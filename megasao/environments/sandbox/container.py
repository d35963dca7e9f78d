"""A container that lives as long as an episode: commands go in over its standard input, one after the other.

A small shell loop runs inside (``LOOP``): it reads a command with its input, runs it with a time limit, ends what the
command left running, and answers with the exit status behind the output. The same loop serves every runtime.

Invariants:
- a container that shares processes or network with the host is refused before any command runs, except for ``none``;
- a command ends in bounded time, and nothing of it runs on afterwards; output beyond the limit is dropped, not kept;
- files stay from command to command, and end with the container;
- when this process dies, however it dies, the container ends and is removed;
- a container that breaks is a ``ContainerFailure``: counted, never an outcome.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import tempfile
import time
from dataclasses import dataclass
from typing import Literal

import psutil

from megasao.environments.base import EnvironmentFailure
from megasao.environments.sandbox import bubblewrap
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.run import END_TIMEOUT_S, Outcome, memory_of
from megasao.environments.sandbox.runtimes import Runtime, Spot, command_line, removal, require, variables

START_TIMEOUT_S = 900.0
"""A runtime may have to fetch the image first."""

MAX_SCRIPT = 100_000
"""Bytes of one command: the kernel takes 128 KiB for one argument."""

_WATCH_S = 0.1

# head reads no byte too many, and neither does read. What a command leaves of its input is read to its end, so that the
# next line is the next command.
LOOP = r"""
cd "$1" || exit 125
export PYTHONDONTWRITEBYTECODE=1 GIT_CONFIG_COUNT=3 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
export GIT_CONFIG_KEY_1=user.name GIT_CONFIG_VALUE_1=agent GIT_CONFIG_KEY_2=user.email GIT_CONFIG_VALUE_2=agent
shell=$(command -v bash || echo sh)
printf 'ready %s %s\n' "$(readlink /proc/self/ns/pid)" "$(readlink /proc/self/ns/net)"
while read -r token seconds script_bytes input_bytes; do
    script=$(head -c "$script_bytes")
    head -c "$input_bytes" | {
        timeout -s KILL "$seconds" "$shell" -c "$script" 2>&1
        code=$?
        cat >/dev/null
        exit $code
    }
    code=$?
    [ "$2" = all ] && kill -9 -1 2>/dev/null
    printf '\n%s %s\n' "$token" "$code"
done
"""


# Waits beside the container for the end of this process, or its word, and then ends what is left.
_REAPER = """
read -r group
cat >/dev/null
[ -z "$group" ] || kill -KILL -- "-$group" 2>/dev/null
[ $# = 0 ] || exec "$@"
"""


class ContainerFailure(EnvironmentFailure):
    """A container did not start, ended by itself, or does not answer."""

    reason = "container_failure"


@dataclass(frozen=True)
class Captured:
    """What a command wrote, as bytes. ``exit_code`` and ``stopped_by`` as in ``Outcome``."""

    exit_code: int | None
    stopped_by: Literal["time", "memory"] | None
    output: bytes
    truncated: bool
    seconds: float


class Container:
    """One container. Use ``start``, and ``close`` whatever happens."""

    def __init__(self, runtime: Runtime, image: str, directory: str, limits: SandboxLimits) -> None:
        """``directory``: where commands begin. SandboxUnavailable where the runtime is not there."""
        require(runtime)
        self.runtime, self.limits = runtime, limits
        self.name = f"megasao-{os.getpid()}-{secrets.token_hex(6)}"
        # What runs without a container; and podman's monitor leaves a file where it runs when memory runs out.
        self._home = tempfile.TemporaryDirectory() if runtime in ("none", "podman", "docker") else None
        inside = {"bubblewrap": bubblewrap.WORKSPACE, "none": self._home.name if self._home else ""}
        self._spot = Spot(self.name, image, inside.get(runtime, directory), limits)
        self._process: asyncio.subprocess.Process | None = None
        self._reaper: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Begin. ContainerFailure if it does not, or shares more with the host than it may."""
        ends = "own" if self.runtime == "none" else "all"
        inside = ["/bin/sh", "-c", LOOP, "sh", self._spot.directory, ends]
        if self.runtime != "bubblewrap":  # which dies with its parent
            self._reaper = await self._start_reaper()
        options = bubblewrap.identity() if self.runtime == "bubblewrap" else {"env": variables(self.runtime)}
        self._process = await asyncio.create_subprocess_exec(
            *command_line(self.runtime, self._spot, inside),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            cwd=self._cwd(),
            **options,
        )
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.write(f"{self._process.pid}\n".encode())
        self._complaints = asyncio.create_task(_drain(self._process.stderr))
        try:
            namespaces = await asyncio.wait_for(self._namespaces(), START_TIMEOUT_S)
        except TimeoutError:
            raise ContainerFailure(f"{self._spot.image}: not started in {START_TIMEOUT_S:g} s") from None
        if len(namespaces) != 2:
            raise await self._lost("did not start")
        shared = [kind for kind, word in zip(("pid", "net"), namespaces, strict=True) if _is_ours(kind, word)]
        if shared and self.runtime != "none":
            raise ContainerFailure(f"{self.runtime} shares its {' and '.join(shared)} namespace with the host")

    async def run(self, script: str, *, stdin: bytes = b"", time_s: float | None = None) -> Outcome:
        """Run a shell script in the directory, on the files as the last one left them."""
        captured = await self.capture(script, stdin=stdin, time_s=time_s)
        return Outcome(
            exit_code=captured.exit_code,
            stopped_by=captured.stopped_by,
            output=captured.output.decode(errors="replace"),
            truncated=captured.truncated,
            workspace=b"",
            seconds=captured.seconds,
        )

    async def capture(
        self, script: str, *, stdin: bytes = b"", time_s: float | None = None, output_bytes: int | None = None
    ) -> Captured:
        """As ``run``, with the output as bytes. ValueError for a script of more than MAX_SCRIPT bytes."""
        words, seconds, started = script.encode(errors="replace"), time_s or self.limits.time_s, time.monotonic()
        if len(words) > MAX_SCRIPT or b"\0" in words:
            raise ValueError(f"a command of {len(words)} bytes: expected up to {MAX_SCRIPT}, none of them 0")
        token = secrets.token_hex(16)
        header = f"{token} {seconds:g} {len(words)} {len(stdin)}\n".encode()
        answer = asyncio.create_task(self._exchange(header + words + stdin, token, output_bytes))
        try:
            too_much = await self._watch(answer, started + seconds + END_TIMEOUT_S)
            output, cut, code = answer.result()
        finally:
            answer.cancel()
        elapsed = time.monotonic() - started
        stopped: Literal["time", "memory"] | None = None
        if too_much or (code == 128 + signal.SIGKILL and elapsed >= seconds):
            stopped = "memory" if too_much else "time"
        return Captured(None if stopped else code, stopped, output, cut, elapsed)

    async def close(self) -> None:
        """End the container and everything in it; it is gone afterwards."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            if self._reaper is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
        for ending in (self._reaper, process):
            if ending is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), 3 * END_TIMEOUT_S)
        if process is not None:
            self._complaints.cancel()
        if self._home is not None:
            self._home.cleanup()

    async def _start_reaper(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _REAPER, "sh", *(removal(self.runtime, self.name) or [])),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    async def _watch(self, answer: "asyncio.Task[tuple[bytes, bool, int]]", deadline: float) -> bool:
        """Until there is an answer; whether a process was ended for its memory. ContainerFailure without one."""
        too_much = False
        while True:
            done, _ = await asyncio.wait([answer], timeout=_WATCH_S)
            if done:
                return too_much
            if time.monotonic() >= deadline:
                raise ContainerFailure(f"{self.name} does not answer, {END_TIMEOUT_S:g} s after its command's time")
            if self._process is not None and memory_of(self._process.pid) > self.limits.memory_bytes:
                too_much = True
                _kill_largest(self._process.pid)

    async def _exchange(self, request: bytes, token: str, output_bytes: int | None) -> tuple[bytes, bool, int]:
        """Send a request; its output, whether it was cut, and its exit status."""
        process = self._process
        if process is None:
            raise ContainerFailure(f"{self.name} is not running")
        assert process.stdin is not None and process.stdout is not None
        limit = self.limits.output_bytes if output_bytes is None else output_bytes
        mark, kept, cut, pending = f"\n{token} ".encode(), bytearray(), False, b""
        with contextlib.suppress(ConnectionError):  # it ended: the reader says so
            process.stdin.write(request)
            await process.stdin.drain()
        while True:
            chunk = await process.stdout.read(1 << 16)
            if not chunk:
                raise await self._lost("ended by itself")
            pending += chunk
            body, found, code = pending.partition(mark)
            if not found:  # the mark may have begun
                body, pending = pending[: -len(mark)], pending[-len(mark) :]
            cut = cut or len(body) > limit - len(kept)
            kept += body[: limit - len(kept)]
            if found:
                while not code.endswith(b"\n"):
                    code += await process.stdout.read(1 << 10) or b"\n"
                return bytes(kept), cut, int(code)

    def _cwd(self) -> str | None:
        """The worker's own directory where images may be files that lie there."""
        return self._home.name if self._home is not None else "/" if self.runtime == "bubblewrap" else None

    async def _namespaces(self) -> list[str]:
        """Those of processes and of network, as the loop says them; fewer if it ends, or cannot see them."""
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():  # some runtimes greet first
            if line.startswith(b"ready "):
                return line.decode(errors="replace").split()[1:]
        return []

    async def _lost(self, what: str) -> ContainerFailure:
        """The failure, with what the runtime said about it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._complaints), 2.0)
        said = self._complaints.result() if self._complaints.done() else ""
        return ContainerFailure(f"{self.runtime} container of {self._spot.image or 'the host'} {what}: {said[-500:]}")


def _is_ours(kind: str, word: str) -> bool:
    return word == os.readlink(f"/proc/self/ns/{kind}")


async def _drain(stream: asyncio.StreamReader | None) -> str:
    """What a runtime itself says; the first 64 KiB."""
    assert stream is not None
    said = b""
    while chunk := await stream.read(1 << 12):
        said += chunk[: max(0, (1 << 16) - len(said))]
    return said.decode(errors="replace").strip()


def _kill_largest(pid: int) -> None:
    """As the kernel does when memory runs out."""
    sizes = {}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                sizes[process] = process.memory_info().rss
    with contextlib.suppress(psutil.Error, ValueError):
        max(sizes, key=lambda process: sizes[process]).kill()
