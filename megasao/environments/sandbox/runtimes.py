"""What can hold a container for a whole episode, each as one attached command line that reads commands on its input.

The process that is started stays in the foreground and ends with its standard input, so nothing is left to run when the
program that talks to it dies, however it dies.

Invariants:
- no command line gives a network, a host directory, a capability or a variable of the host to what runs inside;
- every line carries the limits of ``SandboxLimits`` that its runtime has a place for (docs/environments.md);
- a runtime that is not there, or does not answer, is refused with what to do about it.
"""

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megasao.environments.sandbox import bubblewrap
from megasao.environments.sandbox.bubblewrap import SandboxUnavailable
from megasao.environments.sandbox.limits import SandboxLimits

Runtime = Literal["bubblewrap", "podman", "docker", "apptainer", "enroot", "pyxis", "none"]

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
WITH_IMAGES: tuple[Runtime, ...] = ("podman", "docker", "apptainer", "enroot", "pyxis")

TRIAL_TIMEOUT_S = 60.0

_PROGRAM = {"pyxis": "srun"}
_TRIALS = {
    "podman": ["podman", "info"],
    "docker": ["docker", "info"],
    "apptainer": ["apptainer", "version"],
    "enroot": ["enroot", "version"],
    "pyxis": ["srun", "--container-image=none", "--help"],
}


@dataclass(frozen=True)
class Spot:
    """One container to be: its name, the image, the directory that commands begin in, and its limits."""

    name: str
    image: str
    directory: str
    limits: SandboxLimits


def command_line(runtime: Runtime, spot: Spot, inside: Sequence[str]) -> list[str]:
    """What starts ``inside`` in a container, attached: standard input and output are those of ``inside``."""
    return _LINES[runtime](spot, inside)


def removal(runtime: Runtime, name: str) -> list[str] | None:
    """What removes a container that its own end has not removed; None where there is nothing to remove."""
    match runtime:
        case "podman":
            return ["podman", "rm", "--force", "--time=0", "--volumes", name]
        case "docker":
            return ["docker", "rm", "--force", "--volumes", name]
    return None


def require(runtime: Runtime) -> None:
    """SandboxUnavailable where this runtime is not installed, or does not answer."""
    if runtime == "bubblewrap":
        bubblewrap.require()
    elif runtime != "none" and (reason := _why_not(runtime)) is not None:
        raise SandboxUnavailable(
            f"no container runtime {runtime}: {reason}. Install it, choose another ({', '.join(WITH_IMAGES)}), or set "
            "sandbox: none, with which what a model writes runs on this machine with no isolation"
        )


def first_with_images() -> Runtime:
    """The first container runtime that this machine has; SandboxUnavailable says what is wrong with each."""
    reasons = {}
    for runtime in WITH_IMAGES:
        reason = _why_not(runtime)
        if reason is None:
            return runtime
        reasons[runtime] = reason
    raise SandboxUnavailable(
        f"no container runtime: {'; '.join(f'{name}: {why}' for name, why in reasons.items())}. Install one; small "
        "repositories can run in bubblewrap instead (repositories), and with sandbox: none without any isolation"
    )


@functools.cache
def _why_not(runtime: Runtime) -> str | None:
    program = _PROGRAM.get(runtime, runtime)
    if runtime == "pyxis" and "SLURM_JOB_ID" not in os.environ:
        return "it runs steps of a Slurm job, and this is none"
    if shutil.which(program) is None:
        return f"{program} is not in PATH"
    try:
        trial = subprocess.run(
            _TRIALS[runtime], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{' '.join(_TRIALS[runtime])}`: {error}"
    if trial.returncode != 0:
        said = (trial.stderr or trial.stdout).strip().splitlines()
        return f"`{' '.join(_TRIALS[runtime])}`: {said[-1] if said else f'exit status {trial.returncode}'}"
    return None


def _bubblewrap(spot: Spot, inside: Sequence[str]) -> list[str]:
    """``spot.image`` is not used: the system is the host's /usr, read-only, and the directory is empty."""
    limits = spot.limits
    variables = [("HOME", "/tmp")]
    inner = [*_limited(limits, processes=True), *inside]
    return bubblewrap.wrap(inner, writable_bytes=limits.workspace_bytes, environment=variables, as_init=True)


def _none(spot: Spot, inside: Sequence[str]) -> list[str]:
    return [*_limited(spot.limits, processes=False), *inside]


def _podman_or_docker(program: str) -> Callable[[Spot, Sequence[str]], list[str]]:
    def line(spot: Spot, inside: Sequence[str]) -> list[str]:
        limits = spot.limits
        return [
            program,
            "run",
            "--rm",
            "--interactive",
            f"--name={spot.name}",
            "--network=none",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            f"--memory={limits.memory_bytes}b",
            f"--memory-swap={limits.memory_bytes}b",
            f"--pids-limit={limits.processes}",
            f"--ulimit=fsize={limits.file_bytes}:{limits.file_bytes}",
            "--ulimit=core=0:0",
            "--ulimit=nofile=4096:4096",
            "--ulimit=nproc=4096:4096",
            "--log-driver=none",
            "--entrypoint=",
            f"--workdir={spot.directory}",
            spot.image,
            *inside,
        ]

    return line


def _apptainer(spot: Spot, inside: Sequence[str]) -> list[str]:
    limits = spot.limits
    return [
        *_limited(limits, processes=False),
        "apptainer",
        "--silent",
        "exec",
        "--containall",
        "--cleanenv",
        "--no-home",
        "--no-privs",
        "--writable-tmpfs",
        "--net",
        "--network=none",
        f"--memory={limits.memory_bytes}",
        f"--memory-swap={limits.memory_bytes}",
        f"--pids-limit={limits.processes}",
        f"--pwd={spot.directory}",
        spot.image,
        *inside,
    ]


_NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _enroot(spot: Spot, inside: Sequence[str]) -> list[str]:
    """enroot gives a file system of its own only; unshare gives it processes and a network (without any) of its own."""
    limits = spot.limits
    return [*_NAMESPACES, *_limited(limits, processes=True), "enroot", "start", "--rw", spot.image, *inside]


def _pyxis(spot: Spot, inside: Sequence[str]) -> list[str]:
    """A step of the job that is running; its memory is also bounded by Slurm."""
    limits = spot.limits
    return [
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--unbuffered",
        "--export=NONE",
        f"--nodelist={platform.node()}",
        f"--job-name={spot.name}",
        f"--container-image={spot.image}",
        "--container-writable",
        "--no-container-mount-home",
        "--no-container-entrypoint",
        f"--container-workdir={spot.directory}",
        *_NAMESPACES,
        *_limited(limits, processes=True),
        *inside,
    ]


def _limited(limits: SandboxLimits, *, processes: bool) -> list[str]:
    """The kernel's limits on each process, and on the number of them where the user namespace counts for itself."""
    return [
        shutil.which("prlimit") or "prlimit",
        *([f"--nproc={limits.processes}"] if processes else []),
        f"--as={limits.memory_bytes}",
        f"--fsize={limits.file_bytes}",
        "--core=0",
        "--",
    ]


_LINES: dict[Runtime, Callable[[Spot, Sequence[str]], list[str]]] = {
    "bubblewrap": _bubblewrap,
    "podman": _podman_or_docker("podman"),
    "docker": _podman_or_docker("docker"),
    "apptainer": _apptainer,
    "enroot": _enroot,
    "pyxis": _pyxis,
    "none": _none,
}


def variables(runtime: Runtime) -> dict[str, str]:
    """What the command line itself finds in its environment; the others give nothing of it to the container."""
    if runtime == "none":
        return {"PATH": os.environ.get("PATH", os.defpath)}
    if runtime == "enroot":  # which hands its own environment on
        known = ("PATH", "HOME", "USER", "TMPDIR")
        kept = {k: v for k, v in os.environ.items() if k in known or k.startswith(("XDG_", "ENROOT_"))}
        return {**kept, "ENROOT_MOUNT_HOME": "no"}
    return dict(os.environ)
