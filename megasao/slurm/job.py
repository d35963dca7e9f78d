"""A run as a Slurm job: the batch script becomes this, on the controller's node.

Allocation, nodes, then the stages of the run as steps; what happened goes to the run's history.

Invariants (tests assert them):
- nothing starts on an allocation that does not fit, nor on nodes that fail their check;
- a step that died takes the job down where the nodes still pass their check; where one does not, the job requeues;
- on the signal before the limit the trainer saves a checkpoint and the job requeues itself; started again by Slurm,
  for whatever reason, the run goes on from its latest checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.rundir import Endpoints, RunDirectory, all_engine_names
from megasao.launch.local import PANEL_INTERVAL_S, every
from megasao.launch.prepare import prepared_run
from megasao.launch.process import Guardian
from megasao.launch.supervisor import Outcome, RoleFailed, StopSignals
from megasao.observability.history import Happening, latest_step, record
from megasao.slurm.allocation import Allocation, read_allocation, refuse_what_does_not_fit, slurm_command
from megasao.slurm.check import check_nodes, endpoints_of, meeting_ports, with_servers
from megasao.slurm.plan import ROLLOUT, JobPlan, plan_job, slurm_section
from megasao.slurm.report import NodeReport
from megasao.slurm.site import Site, read_site, refuse_missing_plugin
from megasao.slurm.stages import LeaveSignal, SlurmRun
from megasao.slurm.steps import Steps, absolute

LOCK_WAIT_S = 60.0
"""How long the launcher of a job that Slurm has given up may hold its run."""
REMEDY = "submit it with the arguments that `megasao slurm CONFIG --arguments` prints"

JobOutcome = Literal["finished", "interrupted", "requeued"]


@dataclass
class Job:
    """This job. ``ports``: where the ranks of each stage meet, known once the nodes are checked. ``has_run``: it holds
    the run, and what happens to it is of the run's history."""

    run: RunDirectory
    config: Config
    plan: JobPlan
    site: Site
    allocation: Allocation
    steps: Steps
    ports: dict[str, int] = field(default_factory=dict)
    has_run: bool = False

    @classmethod
    def of(cls, config: Config, environment: Mapping[str, str]) -> "Job":
        """The job that this process runs in. UserError if it does not fit ``config``, or the site cannot be."""
        site, plan = read_site(environment), plan_job(config)
        allocation = read_allocation(environment)
        refuse_missing_plugin(site, lambda: slurm_command("srun", "--help"))
        refuse_what_does_not_fit(plan, allocation, remedy=REMEDY)
        config = config.model_copy(update={"transport": config.transport.model_copy(update={"curve": True})})
        run = absolute(Path(config.run.directory) / config.run.name)
        steps = Steps(run, config, plan, site, allocation.shares[ROLLOUT].nodes, environment)
        return cls(run, config, plan, site, allocation, steps)

    def perform(self, *, resume: bool) -> JobOutcome:
        """The whole job; where it left early, or a node failed, it requeues itself.

        UserError if it cannot start, RoleFailed if a step died on nodes that are as they should be.
        """
        leave = LeaveSignal()
        again = self.allocation.restarts > 0 and self.run.config.is_file()
        with StopSignals().installed() as signals, Guardian() as guardian:
            try:
                with prepared_run(
                    self.config,
                    resume=resume or again,
                    place=lambda *_: self.place(guardian),
                    lock_wait_s=LOCK_WAIT_S if again else 0.0,
                ):
                    outcome = self.train(guardian, signals, leave)
            except UserError as failure:
                if self.has_run:  # else it may be of another job, which goes on
                    self.note("failed", str(failure))
                raise
            except RoleFailed as failure:
                if (reason := self.failed_nodes(guardian)) is None:
                    self.note("failed", str(failure))
                    raise
                print(f"launcher: {failure}\nlauncher: {reason}", flush=True)
                return self.requeue(reason)
        if leave.received and (latest_step(self.run) or 0) < self.config.loop.steps:
            return self.requeue("asked to leave")
        self.note("finished" if outcome == "finished" else "stopped")
        return outcome

    def place(self, guardian: Guardian) -> Endpoints:
        """Check the nodes, and say where the run's sockets are."""
        self.has_run = True
        self.note("started")
        reports = self.check(guardian)
        self.ports = meeting_ports(reports)
        endpoints = endpoints_of(reports)
        if self.plan.fleet is None:
            return endpoints
        return with_servers(endpoints, reports, self.plan.fleet, all_engine_names(self.config))

    def check(self, guardian: Guardian) -> list[NodeReport]:
        """The reports of all nodes; UserError if one cannot be used."""
        timeout_s = slurm_section(self.config).check_timeout_s
        return check_nodes(self.run, self.plan, self.site, self.allocation, self.steps, guardian, timeout_s=timeout_s)

    def failed_nodes(self, guardian: Guardian) -> str | None:
        """Which nodes cannot go on, after a step died; None where all can, and the program is to blame."""
        try:
            self.check(guardian)
        except UserError as failure:
            return str(failure)
        return None

    def train(self, guardian: Guardian, signals: StopSignals, leave: LeaveSignal) -> Outcome:
        """Every stage that is left, with a line for each step in the job's output."""
        from megasao.observability.panel import Panel

        panel = Panel(self.run, self.config)
        try:
            show = every(PANEL_INTERVAL_S, panel.update)
            stages = SlurmRun(self.run, self.config, self.steps, self.ports, guardian, signals, leave, show)
            return stages.perform("rl")
        finally:
            panel.close()

    def requeue(self, reason: str) -> JobOutcome:
        """Give the job back to Slurm, to be started again as a whole. Slurm ends this process soon after."""
        self.note("requeued", reason)
        step = latest_step(self.run) or 0
        print(f"launcher: to go on from step {step}; requeueing job {self.allocation.job}", flush=True)
        try:
            slurm_command("scontrol", "requeue", self.allocation.job)
        except UserError as failure:
            self.note("failed", str(failure))
            raise
        return "requeued"

    def note(self, event: Happening, detail: str = "") -> None:
        """Add a line to the run's history; of ``detail`` what fits a line."""
        nodes = [node for share in self.allocation.shares for node in share.nodes]
        job, restart = self.allocation.job, self.allocation.restarts
        first = " ".join(detail.splitlines()[:2])
        record(self.run, event, job=job, restart=restart, nodes=nodes, detail=first)
