"""The stages of a run as steps of a Slurm job, and the signal that tells it to leave.

Invariants (tests assert them):
- a controller or trainer step that dies fails the run, with the last lines of the rank that died first; the step of a
  rollout worker or of a server is replaced while the trainer goes on;
- the signal is passed on once, to whom it concerns.
"""

import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from megasao.config import Config
from megasao.config.rundir import RunDirectory, all_engine_names
from megasao.launch.local import LocalRun, Stage
from megasao.launch.process import Guardian, Role, tail
from megasao.launch.roles import megasao_command, worlds_of
from megasao.launch.supervisor import LOG_LINES, Outcome, RoleFailed, StopSignals, Unit
from megasao.slurm.plan import CRITIC, LEAVE_SIGNAL, TRAINER, component_of
from megasao.slurm.steps import Steps

_ALL_LINES = 100_000
_LONGEST_STACK = 300
_ERRORS = ("Fatal Python error", "Traceback (most recent call last)")


class LeaveSignal:
    """Whether the signal before the time limit has come."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(getattr(signal, f"SIG{LEAVE_SIGNAL}"), self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True


class SlurmRun(LocalRun):
    """The stages of a run whose roles are steps of this job."""

    def __init__(
        self,
        run: RunDirectory,
        config: Config,
        steps: Steps,
        ports: Mapping[str, int],
        guardian: Guardian,
        signals: StopSignals,
        leave: LeaveSignal,
        show: Callable[[dict[str, int]], None],
    ) -> None:
        command = megasao_command(run, steps.site.step_python)
        super().__init__(run, config, command, guardian, signals, self._tick)
        self._steps, self._leave, self._stop, self._show = steps, leave, signals, show
        endpoints = run.read_endpoints()
        self._hosts = {TRAINER: endpoints.torch_host, CRITIC: host_of(endpoints.critic)}
        self._ports = ports
        self._ranks: Unit | None = None
        self._told = False

    def controller(self) -> Unit:
        """A step on its own node."""
        return Unit("controller", lambda: [self._steps.controller()], max_restarts=0)

    def rollout(self, index: int) -> Unit:
        """A step of its own, which can be replaced."""
        return Unit(f"rollout-{index}", lambda: [self._steps.rollout(index)])

    def engine(self, index: int) -> Unit:
        """A step on all of the server's nodes, which can be replaced."""
        name = all_engine_names(self.config)[index]
        return Unit(name, lambda: [self._steps.engine(index)], ends_by_itself=False)

    def world(self, stage: str) -> Unit:
        """One step of all ranks, and one of those of a separate critic: together, as on one machine."""
        worlds = worlds_of(self.config, stage)
        self._ranks = Unit(stage, lambda: [self._world(world) for world in worlds], max_restarts=0)
        return self._ranks

    def _world(self, stage: str) -> Role:
        host = self._hosts[component_of(self._steps.plan, stage)]
        return self._steps.world(stage, host, self._ports[stage])

    def perform(self, last: Stage) -> Outcome:
        """The stages that are left, until one does not end by itself. RoleFailed if a step died for good."""
        for stage in self.stages(last):
            try:
                outcome = stage()
            except RoleFailed as failure:
                told = f"{failure}{self._first_to_die(str(failure))}"
                if not self._leave.received:
                    raise RoleFailed(told) from failure
                print(f"launcher: while leaving: {told}", flush=True)
                return "interrupted"
            if outcome != "finished":
                return outcome
        return "finished"

    def _tick(self, restarts: dict[str, int]) -> None:
        """Show what goes on; pass the signal on to whom it concerns, once."""
        self._show(restarts)
        if not self._leave.received or self._told or self._ranks is None:
            return
        self._told = True
        if self._ranks.name != "trainer":
            self._stop.receive(signal.SIGTERM, None)  # the stages before RL start over
            return
        for process in self._ranks.running:
            if process.role.name == "trainer":  # a critic in a world of its own follows it
                process.notify(signal.SIGUSR1)

    def _first_to_die(self, failure: str) -> str:
        """The last lines of the rank that died first, where it was the world of all ranks that failed."""
        stage = failure.partition(": ")[0]
        if self._ranks is None or stage not in worlds_of(self.config, self._ranks.name):
            return ""
        rank = first_dead_task(tail(self.run.logs / f"{stage}.log", _ALL_LINES))
        if rank is None:
            return ""
        log = self.run.logs / f"{stage}-{rank}.log"
        return f"\nRank {rank} died first; the last lines of {log}:\n{last_words(log)}"


def last_words(log: Path) -> str:
    """The last lines of a log, from the last error's first line on where that is further up: stacks can be long."""
    lines = tail(log, _LONGEST_STACK).splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith(_ERRORS)]
    begin = min(len(lines) - LOG_LINES, errors[-1] if errors else len(lines))
    return "\n".join(lines[max(0, begin) :])


def host_of(address: str) -> str:
    """The host of ``tcp://HOST:PORT``, an IPv6 address without its brackets; empty for an empty address."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def first_dead_task(said: str) -> int | None:
    """The task that srun's messages since its last start name first; None where they name none."""
    since = said.rpartition("\n--- ")[2]
    found = re.search(r"^srun: error: \S+: tasks? (\d+)", since, flags=re.MULTILINE)
    return int(found.group(1)) if found else None
