"""Command lines that run a program in bubblewrap: no network, a read-only system, private and bounded places to write.

Invariants:
- of the host only /usr and the directories named as ``read_only`` are visible, and nothing of the host is writable;
- the program sees its own processes only, runs without any capability, and dies with its parent;
- every place that can be written is a tmpfs with a size.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megasao

WORKSPACE = "/workspace"
NOBODY = 65534

TRIAL_TIMEOUT_S = 20.0


class SandboxUnavailable(ValueError):
    """There is no sandbox on this machine; says why, and what to do."""


def wrap(
    command: Sequence[str],
    *,
    writable_bytes: int,
    read_only: Sequence[str] = (),
    environment: Sequence[tuple[str, str]] = (),
    as_init: bool = False,
) -> list[str]:
    """``command`` in a sandbox, to be started with ``identity()``; it begins in the empty directory WORKSPACE.

    ``as_init``: it is the first process there, which nothing in the sandbox can kill; it must reap what it is left.
    """
    size = str(writable_bytes)
    mounts = ["--ro-bind", "/usr", "/usr"]
    for link, target in (("/bin", "usr/bin"), ("/sbin", "usr/sbin"), ("/lib", "usr/lib"), ("/lib64", "usr/lib64")):
        mounts += ["--symlink", target, link]
    mounts += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    mounts += ["--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", WORKSPACE]
    for directory in read_only:  # last: one of them may lie under /tmp
        mounts += ["--ro-bind", directory, directory]
    mounts += ["--remount-ro", "/"]
    variables = [("PATH", "/usr/local/bin:/usr/bin:/bin"), ("HOME", WORKSPACE), ("LANG", "C.UTF-8"), *environment]
    settings = [word for name, value in variables for word in ("--setenv", name, value)]
    return [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        *(["--as-pid-1"] if as_init else []),
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
        *mounts,
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--chdir",
        WORKSPACE,
        "--clearenv",
        *settings,
        "--",
        *command,
    ]


def wrap_python(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """A command of this interpreter with this package, for long-lived helpers: it sees both, and nothing else more.

    It may be started as root, who then is nobody in the sandbox too, but whom a limit on processes does not bind.
    """
    package = str(Path(megasao.__file__).parent)
    visible = dict.fromkeys([sys.base_prefix, sys.prefix, package])
    outside = [directory for directory in visible if not Path(directory).is_relative_to("/usr")]
    return wrap(command, writable_bytes=1 << 20, read_only=outside, environment=list(environment.items()))


def identity() -> dict[str, Any]:
    """For starting a sandbox.

    Root steps down, since the limit on processes does not bind it. The environment is empty: the first process of a
    sandbox shows its own in /proc, whatever it hands on.
    """
    return {"env": {}, **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {})}


def require() -> None:
    """SandboxUnavailable where bubblewrap is not installed or cannot make namespaces."""
    reason = _why_not()
    if reason is not None:
        raise SandboxUnavailable(
            f"no sandbox: {reason}. Install bubblewrap and allow user namespaces; or set sandbox: none, with which "
            "what a model writes runs on this machine with no isolation"
        )


@functools.cache
def _why_not() -> str | None:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (no bwrap in PATH)"
    try:
        trial = subprocess.run(
            wrap(["/usr/bin/true"], writable_bytes=1 << 20),
            capture_output=True,
            text=True,
            timeout=TRIAL_TIMEOUT_S,
            check=False,
            **identity(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run here ({error})"
    return f"bubblewrap does not run here ({trial.stderr.strip()})" if trial.returncode else None
