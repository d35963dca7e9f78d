"""The steps of a job: the same sub-commands as on one machine, each started by srun.

Invariants (tests assert them):
- a task gets the variables that ``--export`` names and Slurm's own, nothing else;
- sockets of every library use the cluster's interface;
- srun ends its step when it is asked to end, and is never killed before it was asked: its step would live on.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megasao.config import Config
from megasao.config.rundir import RunDirectory, all_engine_names
from megasao.config.slurm import SlurmConfig
from megasao.launch.process import Role
from megasao.launch.roles import EVERYWHERE, megasao_command, without_cuda, worlds_of
from megasao.slurm.plan import CONTROLLER, ROLLOUT, Component, JobPlan, component_of, node_of_worker, slurm_section
from megasao.slurm.site import Site

INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables that tasks get as they are here, where they are set."""
ASK_BEFORE_KILL_S = 15.0


@dataclass(frozen=True)
class Steps:
    """Makes the steps of a run. ``rollout_nodes`` are names, in order; ``environment`` is the launcher's own."""

    run: RunDirectory
    config: Config
    plan: JobPlan
    site: Site
    rollout_nodes: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def check(self, index: int) -> Role:
        """The check of every node of component ``index``, one task a node."""
        component = self.plan.components[index]
        base = [self.site.step_python, "-P", "-m", "megasao", "slurm-node", "--run", str(self.run.path)]
        name = f"nodes-{component.name}"
        options = [f"--nodes={component.nodes}", f"--ntasks={component.nodes}", "--ntasks-per-node=1", "--label"]
        return self._role(name, index, [*options, *_gpus(component.gpus_per_node)], [*base, "--component", str(index)])

    def controller(self) -> Role:
        """The controller."""
        command = self._command("controller", 0)
        return self._role("controller", CONTROLLER, ["--nodes=1", "--ntasks=1"], command, heartbeat="controller")

    def rollout(self, index: int) -> Role:
        """Rollout worker ``index``, a step of its own so that it can be replaced."""
        component, name = self.plan.components[ROLLOUT], f"rollout-{index}"
        node = self.rollout_nodes[node_of_worker(self.plan, index)]
        with_servers = self.plan.fleet is not None
        # Steps of one node share neither CPUs nor GPUs, and those without get none only where they say so.
        gpus = ["--gres=none"] if with_servers else _gpus(component.gpus_per_task)
        return self._role(
            name,
            ROLLOUT,
            ["--nodes=1", "--ntasks=1", f"--nodelist={node}", "--exact", *(gpus if component.gpus_per_node else [])],
            self._command("rollout", index),
            heartbeat=name,
            cpus=self._options.cpus_per_worker,
            without_gpus=with_servers,
        )

    def engine(self, index: int) -> Role:
        """SGLang server ``index`` of the run, a step on all of its nodes, one task each."""
        fleet, name = self.plan.fleet, all_engine_names(self.config)[index]
        assert fleet is not None
        nodes = [self.rollout_nodes[node] for node in fleet.place(index).nodes]
        options = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        options += [f"--nodelist={','.join(nodes)}", "--exact", "--kill-on-bad-exit=1"]
        if self.plan.components[ROLLOUT].gpus_per_node:
            options += _gpus(fleet.gpus_on_node)
        command = self._command("engine", index)
        return self._role(name, ROLLOUT, options, command, heartbeat=name, cpus=self._options.cpus_per_server)

    def world(self, stage: str, host: str, port: int) -> Role:
        """Every rank of a stage, one step; rank r writes ``logs/STAGE-r.log``."""
        index = component_of(self.plan, stage)
        component = self.plan.components[index]
        options = [
            f"--nodes={component.nodes}",
            f"--ntasks={component.tasks}",
            f"--ntasks-per-node={component.tasks_per_node}",
            "--distribution=block",
            "--kill-on-bad-exit=1",
            *_gpus(component.gpus_per_node),
            f"--output={self.run.logs / stage}-%t.log",
            "--open-mode=append",
        ]
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        return self._role(stage, index, options, self._command(stage, 0), heartbeat=f"{stage}-0", extra=meeting)

    def describe(self) -> list[str]:
        """The commands of a whole training run, in order of their start."""
        roles = [self.check(index) for index in range(len(self.plan.components))]
        roles += [self.controller(), *(self.rollout(index) for index in range(self.config.rollout.workers))]
        roles += [self.engine(index) for index in range(len(all_engine_names(self.config)))]
        roles += [self.world(stage, "", 0) for stage in worlds_of(self.config)]
        return [" ".join(_quoted(word) for word in role.command) for role in roles]

    @property
    def _options(self) -> SlurmConfig:
        return slurm_section(self.config)

    def _command(self, role: str, index: int) -> list[str]:
        return megasao_command(self.run, self.site.step_python)(role, index)

    def _role(
        self,
        name: str,
        index: int,
        options: list[str],
        command: list[str],
        *,
        heartbeat: str | None = None,
        extra: Mapping[str, str] | None = None,
        cpus: int | None = None,
        without_gpus: bool = False,
    ) -> Role:
        """``cpus``: of a task, where those of its component are for more than it."""
        component = self.plan.components[index]
        exported = {**self._exported(component, without_gpus=without_gpus), **(extra or {})}
        srun = [
            "srun",
            f"--job-name={name}",
            f"--het-group={index}",
            f"--cpus-per-task={cpus or component.cpus_per_task}",
            "--mem=0",
            "--input=none",
            "--unbuffered",
            f"--export={','.join(exported)}",
            *options,
            *self.site.srun_args,
        ]
        # What the batch script was given would contradict the options of a step.
        own = {key: value for key, value in self.environment.items() if not key.startswith("SLURM_MEM_PER_")}
        return Role(
            name=name,
            command=[*srun, *self.site.step_command, *command],
            log=self.run.logs / f"{name}.log",
            env={**own, **exported},
            heartbeat=self.run.heartbeat(heartbeat) if heartbeat is not None else None,
            ask_before_kill_s=ASK_BEFORE_KILL_S,
        )

    def _exported(self, component: Component, *, without_gpus: bool = False) -> dict[str, str]:
        names = [*INHERITED, *self.site.export]
        exported = {name: self.environment[name] for name in names if name in self.environment}
        exported |= EVERYWHERE | socket_environment(self.site)
        with_gpus = component.gpus_per_node and not without_gpus
        return exported if with_gpus else exported | without_cuda(self._threads(component))

    def _threads(self, component: Component) -> int:
        return self.config.rollout.embedded.threads if component.name == "rollout" else 1


def socket_environment(site: Site) -> dict[str, str]:
    """The variables by which NCCL and gloo choose their interface and address family."""
    variables = {f"{library}_SOCKET_IFNAME": site.interface for library in ("NCCL", "GLOO", "TP")}
    return variables | ({"NCCL_SOCKET_FAMILY": "AF_INET6"} if site.ipv6 else {})


def absolute(path: Path) -> RunDirectory:
    """The run directory by the name that is the same in every step."""
    return RunDirectory(Path(os.path.abspath(path)))


def _quoted(word: str) -> str:
    """As a shell would read it; variables stay variables."""
    return word if "$" in word else shlex.quote(word)


def _gpus(count: int) -> list[str]:
    return [f"--gres=gpu:{count}"] if count else []
