"""The roles of a run as commands and environments."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from megasao.config import Config
from megasao.config.rundir import RunDirectory, all_engine_names
from megasao.launch.process import Role

EVERYWHERE = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of every role."""

RoleCommand = Callable[[str, int], list[str]]
"""(role, index) -> command; roles: ``controller``, ``rollout``, ``engine`` and ``critic``, and the stages of a trainer:
``trainer``, ``sft`` and ``value``."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def megasao_command(run: RunDirectory, python: str = sys.executable) -> RoleCommand:
    """The commands of this package's own roles."""

    def command(role: str, index: int) -> list[str]:
        # -P: a file of the user's directory must not stand in for a module that a role imports.
        base = [python, "-P", "-m", "megasao"]
        where = ["--run", str(run.path)]
        if role == "rollout":
            return [*base, "rollout", *where, "--index", str(index)]
        if role == "engine":
            return [*base, "engine", *where, "--index", str(index)]
        if role in ("trainer", "sft", "value"):
            return [*base, "trainer", *where, "--stage", "rl" if role == "trainer" else role]
        return [*base, role, *where]

    return command


def worlds_of(config: Config, stage: str = "trainer") -> list[str]:
    """The process worlds of a stage: its ranks, and in RL those of a critic in a world of its own."""
    return [stage, "critic"] if stage == "trainer" and config.critic_is_separate else [stage]


def make_role(run: RunDirectory, name: str, command: list[str], environment: Mapping[str, str]) -> Role:
    """A role with its log and its heartbeat in the run directory."""
    return Role(name, command, run.logs / f"{name}.log", environment, run.heartbeat(name))


def controller_role(run: RunDirectory, config: Config, command: RoleCommand) -> Role:
    """The controller."""
    return make_role(run, "controller", command("controller", 0), child_environment(threads=1))


def rollout_role(run: RunDirectory, config: Config, command: RoleCommand, index: int) -> Role:
    """Rollout worker ``index``."""
    name = f"rollout-{index}"
    environment = child_environment(threads=config.rollout.embedded.threads)
    return make_role(run, name, command("rollout", index), environment)


def engine_role(run: RunDirectory, config: Config, command: RoleCommand, index: int) -> Role:
    """SGLang server ``index`` of the run."""
    name = all_engine_names(config)[index]
    return make_role(run, name, command("engine", index), child_environment(threads=1))


def trainer_roles(
    run: RunDirectory, config: Config, command: RoleCommand, *, stage: str, host: str, port: int
) -> list[Role]:
    """All ranks of one world, which meet at ``host:port``; ``stage``: ``trainer``, ``critic``, ``sft`` or ``value``."""
    ranks = (config.of_critic if stage in ("critic", "value") else config).parallel.ranks
    roles = []
    for rank in range(ranks):
        world = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        environment = {**child_environment(threads=1), **world}
        roles.append(make_role(run, f"{stage}-{rank}", command(stage, rank), environment))
    return roles


def child_environment(*, threads: int, parent: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a role: offline, unbuffered, and on a machine without CUDA no more threads than asked for."""
    environment = {name: value for name, value in parent.items() if name not in _WORLD_VARIABLES}
    environment |= EVERYWHERE
    if not has_nvidia_device():
        environment |= without_cuda(threads)
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not matter here
    return environment


def without_cuda(threads: int) -> dict[str, str]:
    """Variables of a role on a machine without CUDA: so many threads, and no compiler."""
    # Megatron's fused functions would otherwise compile.
    return {**{name: str(threads) for name in _THREAD_VARIABLES}, "TORCHDYNAMO_DISABLE": "1"}


def has_nvidia_device() -> bool:
    """True where a CUDA device may be present; decided without importing torch."""
    return Path("/dev/nvidiactl").exists()
