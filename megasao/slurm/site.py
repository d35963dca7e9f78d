"""What a cluster is like: the variables of slurm/site.env, checked.

Invariant: a variable ``MEGASAO_*`` of the environment that is not known here is refused, with the nearest right name.
"""

import difflib
import os
import re
import shlex
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megasao.config.errors import UserError

KNOWN = {
    "MEGASAO_PYTHON": "the Python that has megasao",
    "MEGASAO_STEP_PYTHON": "the same inside a container, if steps run in one",
    "MEGASAO_PARTITION": "partition of trainer and rollout nodes",
    "MEGASAO_CONTROLLER_PARTITION": "partition of the controller's node",
    "MEGASAO_ACCOUNT": "account that pays",
    "MEGASAO_INTERFACE": "network interface that the nodes reach each other by",
    "MEGASAO_ADDRESS_FAMILY": "ipv4 or ipv6",
    "MEGASAO_SBATCH_ARGS": "more arguments of sbatch, of every component",
    "MEGASAO_SRUN_ARGS": "more arguments of every srun",
    "MEGASAO_STEP_COMMAND": "what runs the step's Python in a container, in front of it",
    "MEGASAO_EXPORT": "more variables that steps get from this environment",
    "MEGASAO_SITE": "another file than slurm/site.env",
    "MEGASAO_HOME": "the directory of the repository",
}
_BUILD = ("MEGASAO_BUILD", "MEGASAO_CUDA", "MEGASAO_CUDA_ARCH", "MEGASAO_ISA")
"""Of setup.py and the compiled operators; they mean nothing here."""


@dataclass(frozen=True)
class Site:
    """See ``KNOWN`` and slurm/site.env."""

    python: str
    step_python: str
    partition: str | None
    controller_partition: str | None
    account: str | None
    interface: str
    ipv6: bool
    sbatch_args: tuple[str, ...]
    srun_args: tuple[str, ...]
    step_command: tuple[str, ...]
    export: tuple[str, ...]


def read_site(environment: Mapping[str, str] = os.environ) -> Site:
    """The site of ``environment``. UserError lists everything that is wrong with it."""
    problems = list(_problems(environment))
    if problems:
        where = environment.get("MEGASAO_SITE") or "slurm/site.env"
        raise UserError("\n".join([f"{where}: these variables cannot be used:", *(f"  {each}" for each in problems)]))

    def optional(name: str) -> str | None:
        return environment.get(f"MEGASAO_{name}") or None

    python = environment["MEGASAO_PYTHON"]
    return Site(
        python=python,
        step_python=optional("STEP_PYTHON") or python,
        partition=optional("PARTITION"),
        controller_partition=optional("CONTROLLER_PARTITION") or optional("PARTITION"),
        account=optional("ACCOUNT"),
        interface=environment["MEGASAO_INTERFACE"],
        ipv6=optional("ADDRESS_FAMILY") == "ipv6",
        sbatch_args=tuple(shlex.split(optional("SBATCH_ARGS") or "")),
        srun_args=tuple(shlex.split(optional("SRUN_ARGS") or "")),
        step_command=tuple(shlex.split(optional("STEP_COMMAND") or "")),
        export=tuple((optional("EXPORT") or "").split()),
    )


def refuse_missing_plugin(site: Site, srun_help: Callable[[], str]) -> None:
    """UserError where steps are to run in containers of a plugin (pyxis) whose options ``srun --help`` lacks."""
    asked = [word.partition("=")[0] for word in site.srun_args if word.startswith("--container-")]
    known = set(re.findall(r"--container-[a-z-]+", srun_help())) if asked else set()
    if unknown := [option for option in asked if option not in known]:
        raise UserError(
            f"MEGASAO_SRUN_ARGS: srun on {socket.gethostname()} does not know {', '.join(unknown)}: the plugin pyxis "
            "is not installed here, or not named in Slurm's plugstack.conf. Without it a container is started by "
            "MEGASAO_STEP_COMMAND"
        )


def _problems(environment: Mapping[str, str]) -> list[str]:
    found = []
    for name in environment:
        if name.startswith("MEGASAO_") and name not in KNOWN and name not in _BUILD:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            found.append(f"{name} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    for name in ("MEGASAO_PYTHON", "MEGASAO_INTERFACE"):
        if not environment.get(name):
            found.append(f"{name} is empty: {KNOWN[name]}")
    python = Path(environment.get("MEGASAO_PYTHON") or "/")
    if environment.get("MEGASAO_PYTHON") and not os.access(python, os.X_OK):
        found.append(f"MEGASAO_PYTHON = {python} is no program")
    family = environment.get("MEGASAO_ADDRESS_FAMILY") or "ipv4"
    if family not in ("ipv4", "ipv6"):
        found.append(f"MEGASAO_ADDRESS_FAMILY: expected ipv4 or ipv6, got {family!r}")
    for name in ("MEGASAO_SBATCH_ARGS", "MEGASAO_SRUN_ARGS", "MEGASAO_STEP_COMMAND"):
        try:
            shlex.split(environment.get(name, ""))
        except ValueError as error:
            found.append(f"{name} cannot be split into words: {error}")
    for name in environment.get("MEGASAO_EXPORT", "").split():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            found.append(f"MEGASAO_EXPORT: {name!r} is no name of a variable")
    return found
