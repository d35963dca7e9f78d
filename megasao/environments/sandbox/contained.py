"""The sandbox of single commands in a container runtime, for machines without bubblewrap: a container a command.

Invariants: those of ``run``; the image must have /bin/sh, GNU tar and coreutils, and the program that is run.
"""

import shlex
from collections.abc import Sequence

from megasao.environments.sandbox.container import Container, ContainerFailure
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.run import ARCHIVE_OVERHEAD, Outcome, Sandbox
from megasao.environments.sandbox.runtimes import WITH_IMAGES, Runtime, require
from megasao.environments.sandbox.workspace import pack

KINDS = ("bubblewrap", "none", *WITH_IMAGES)

_PLACE = "/tmp/workspace"
_UNPACK = f"mkdir -p {_PLACE} && cd {_PLACE} || exit 125; tar -xf - --no-same-owner; [ $? -le 2 ] || exit 125"
"""What cannot be unpacked (2) is left out, as in bubblewrap."""


class ContainerSandbox(Sandbox):
    """Runs commands one by one, each in a container of its own."""

    def __init__(self, runtime: Runtime, image: str, limits: SandboxLimits) -> None:
        """SandboxUnavailable where the runtime is not there."""
        require(runtime)
        self.runtime, self.image, self.limits = runtime, image, limits

    async def run(self, command: Sequence[str], workspace: bytes | None = None) -> Outcome:
        """Run ``command`` in the workspace (empty if None). ContainerFailure if the container breaks."""
        before = pack({}) if workspace is None else workspace
        container = Container(self.runtime, self.image, "/", self.limits)
        try:
            await container.start()
            put = await container.run(_UNPACK, stdin=before)
            if put.exit_code != 0:
                raise ContainerFailure(f"{self.image}: the workspace could not be put there: {put.output[-500:]}")
            done = await container.capture(f"cd {_PLACE} && exec {shlex.join(command)}")
            limit = self.limits.workspace_bytes + ARCHIVE_OVERHEAD
            kept = await container.capture(f"cd {_PLACE} && tar -cf - . 2>/dev/null", output_bytes=limit)
        finally:
            await container.close()
        # As in bubblewrap: what a limit stopped, or what has grown too large, leaves the workspace as it was.
        whole = done.stopped_by is None and kept.exit_code == 0 and not kept.truncated
        return Outcome(
            exit_code=done.exit_code,
            stopped_by=done.stopped_by,
            output=done.output.decode(errors="replace"),
            truncated=done.truncated,
            workspace=kept.output if whole else before,
            seconds=done.seconds,
        )


def check_choice(kind: str, image: str) -> None:
    """ValueError for options ``sandbox`` and ``sandbox_image`` that do not go together."""
    if kind not in KINDS:
        raise ValueError(f"environment.options.sandbox: expected one of {', '.join(KINDS)}, got {kind!r}")
    if (kind in WITH_IMAGES) != bool(image):
        needed = f"{kind} needs an image" if kind in WITH_IMAGES else f"{kind} has no image"
        raise ValueError(f"environment.options.sandbox_image: {needed}, got {image!r}")


def chosen_sandbox(kind: str, image: str, limits: SandboxLimits) -> Sandbox:
    """The sandbox that the options ask for; SandboxUnavailable where this machine has none of the kind."""
    for runtime in WITH_IMAGES:
        if kind == runtime:
            return ContainerSandbox(runtime, image, limits)
    return Sandbox("none" if kind == "none" else "bubblewrap", limits)
