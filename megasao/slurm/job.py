"""A run as a Slurm job: the batch script becomes this, on the controller's node.

Allocation, nodes, then the stages of the run as steps; what happened goes to the run's history.

Invariants (tests assert them):
- nothing starts on an allocation that does not fit, nor on nodes that fail their check;
- a controller or trainer step that dies takes the job down, with the last lines of its log in the job's output; a
  rollout step is replaced while the trainer goes on;
- on the signal before the limit the trainer saves a checkpoint and the job requeues itself; started again by Slurm,
  for whatever reason, the run goes on from its latest checkpoint.
"""

import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.rundir import Endpoints, RunDirectory
from megasao.launch.local import PANEL_INTERVAL_S, LocalRun, Stage, every
from megasao.launch.prepare import prepared_run
from megasao.launch.process import Guardian, tail
from megasao.launch.roles import megasao_command
from megasao.launch.supervisor import LOG_LINES, Outcome, RoleFailed, StopSignals, Unit
from megasao.observability.history import Happening, latest_step, record
from megasao.slurm.allocation import Allocation, read_allocation, refuse_what_does_not_fit, slurm_command
from megasao.slurm.check import check_nodes, endpoints_of, meeting_ports
from megasao.slurm.plan import LEAVE_SIGNAL, ROLLOUT, plan_job, slurm_section
from megasao.slurm.site import read_site
from megasao.slurm.steps import Steps, absolute

LOCK_WAIT_S = 60.0
"""How long the launcher of a job that Slurm has given up may hold its run."""
REMEDY = "submit it with the arguments that `megasao slurm CONFIG --arguments` prints"
_ALL_LINES = 100_000

JobOutcome = Literal["finished", "interrupted", "requeued"]


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
        self._host, self._ports = run.read_endpoints().torch_host, ports
        self._ranks: Unit | None = None
        self._told = False

    def controller(self) -> Unit:
        """A step on its own node."""
        return Unit("controller", lambda: [self._steps.controller()], max_restarts=0)

    def rollout(self, index: int) -> Unit:
        """A step of its own, which can be replaced."""
        return Unit(f"rollout-{index}", lambda: [self._steps.rollout(index)])

    def world(self, stage: str) -> Unit:
        """One step of all ranks."""
        self._ranks = Unit(stage, lambda: [self._steps.world(stage, self._host, self._ports[stage])], max_restarts=0)
        return self._ranks

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
            process.notify(signal.SIGUSR1)

    def _first_to_die(self, failure: str) -> str:
        """The last lines of the rank that died first, where it was the world of all ranks that failed."""
        stage = self._ranks.name if self._ranks is not None else ""
        if not failure.startswith(f"{stage}: "):
            return ""
        rank = first_dead_task(tail(self.run.logs / f"{stage}.log", _ALL_LINES))
        if rank is None:
            return ""
        log = self.run.logs / f"{stage}-{rank}.log"
        return f"\nRank {rank} died first; the last lines of {log}:\n{tail(log, LOG_LINES)}"


def first_dead_task(said: str) -> int | None:
    """The task that srun's messages since its last start name first; None where they name none."""
    since = said.rpartition("\n--- ")[2]
    found = re.search(r"^srun: error: \S+: tasks? (\d+)", since, flags=re.MULTILINE)
    return int(found.group(1)) if found else None


def run_job(config: Config, environment: Mapping[str, str], *, resume: bool) -> tuple[JobOutcome, RunDirectory]:
    """The whole job; where it left early it requeues itself.

    UserError if it cannot start, RoleFailed if a step died for good.
    """
    site, plan = read_site(environment), plan_job(config)
    allocation = read_allocation(environment)
    refuse_what_does_not_fit(plan, allocation, remedy=REMEDY)
    config = config.model_copy(update={"transport": config.transport.model_copy(update={"curve": True})})
    run = absolute(Path(config.run.directory) / config.run.name)
    again = allocation.restarts > 0 and run.config.is_file()
    ports: dict[str, int] = {}
    steps = Steps(run, config, plan, site, allocation.shares[ROLLOUT].nodes, environment)
    leave = LeaveSignal()
    with StopSignals().installed() as signals, Guardian() as guardian:

        def place(_: RunDirectory, config: Config) -> Endpoints:
            _note(run, allocation, "started")
            timeout_s = slurm_section(config).check_timeout_s
            reports = check_nodes(run, plan, site, allocation, steps, guardian, timeout_s=timeout_s)
            ports.update(meeting_ports(reports))
            return endpoints_of(reports)

        try:
            with prepared_run(config, resume=resume or again, place=place, lock_wait_s=LOCK_WAIT_S if again else 0.0):
                outcome = _train(run, config, steps, ports, guardian, signals, leave)
        except (UserError, RoleFailed) as failure:
            if run.config.is_file():
                _note(run, allocation, "failed", str(failure).splitlines()[0])
            raise
        if leave.received and (latest_step(run) or 0) < config.loop.steps:
            requeue(run, allocation)
            return "requeued", run
        _note(run, allocation, "finished" if outcome == "finished" else "stopped")
    return outcome, run


def _train(
    run: RunDirectory,
    config: Config,
    steps: Steps,
    ports: Mapping[str, int],
    guardian: Guardian,
    signals: StopSignals,
    leave: LeaveSignal,
) -> Outcome:
    """Every stage that is left, with a line for each step in the job's output."""
    from megasao.observability.panel import Panel

    panel = Panel(run, config)
    try:
        show = every(PANEL_INTERVAL_S, panel.update)
        return SlurmRun(run, config, steps, ports, guardian, signals, leave, show).perform("rl")
    finally:
        panel.close()


def requeue(run: RunDirectory, allocation: Allocation) -> None:
    """Give the job back to Slurm, to be started again as a whole. Slurm ends this process soon after."""
    _note(run, allocation, "requeued")
    step = latest_step(run) or 0
    print(f"launcher: left before step {step}, with a checkpoint; requeueing job {allocation.job}", flush=True)
    try:
        slurm_command("scontrol", "requeue", allocation.job)
    except UserError as failure:
        _note(run, allocation, "failed", str(failure))
        raise


def _note(run: RunDirectory, allocation: Allocation, event: Happening, detail: str = "") -> None:
    nodes = [node for share in allocation.shares for node in share.nodes]
    record(run, event, job=allocation.job, restart=allocation.restarts, nodes=nodes, detail=detail)
