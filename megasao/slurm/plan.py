"""Which nodes a run needs: the components of one heterogeneous job, from the config alone.

There are three; a critic in a world of its own is a fourth.

Invariants (tests assert them):
- every trainer rank, rollout worker and SGLang server has its place, and every node of a component is filled alike;
- processes of a node never share a GPU;
- the launcher runs on the first component's first node, which is the controller's.
"""

from dataclasses import dataclass

from megasao.config import Config
from megasao.config.errors import UserError
from megasao.config.fleet import FleetLayout, fleet_layout
from megasao.config.slurm import SlurmConfig

CONTROLLER, TRAINER, ROLLOUT, CRITIC = range(4)
"""Numbers of the components (``srun --het-group``)."""
LEAVE_SIGNAL = "USR1"


@dataclass(frozen=True)
class Component:
    """Equal nodes: how many, and what each of them runs and has.

    Where SGLang servers and workers of different sizes share a node, a task is all that runs there.
    """

    name: str
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    memory: str

    @property
    def tasks(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.tasks_per_node

    @property
    def gpus_per_task(self) -> int:
        """GPUs that a process has for itself."""
        return self.gpus_per_node // self.tasks_per_node


@dataclass(frozen=True)
class JobPlan:
    """Everything that sbatch is asked for; ``components`` are in the order of their numbers.

    ``fleet``: how SGLang servers lie on the nodes of the last one; None where rollouts need none.
    """

    run_name: str
    components: tuple[Component, ...]
    time_limit_minutes: int
    leave_before_limit_s: int
    fleet: FleetLayout | None


def slurm_section(config: Config) -> SlurmConfig:
    """The section ``slurm``; UserError where there is none."""
    if config.slurm is None:
        raise UserError(
            "the config has no section slurm, which says how the run lies on nodes; write one, or give a field on the "
            "command line, for example slurm.rollout_nodes=1"
        )
    return config.slurm


def plan_job(config: Config) -> JobPlan:
    """The nodes of ``config``. UserError without a section slurm; the config's rules saw to the rest."""
    options = slurm_section(config)
    ranks, on_node = config.parallel.ranks, min(options.ranks_on_a_node(), config.parallel.ranks)
    gpus, memory = options.gpus_per_node, options.memory
    return JobPlan(
        run_name=config.run.name,
        components=(
            Component("controller", 1, 1, options.controller_cpus, 0, options.controller_memory),
            Component("trainer", ranks // on_node, on_node, options.cpus_per_rank, gpus, memory),
            _rollout_nodes(config, options),
            *_critic_nodes(config, options),
        ),
        time_limit_minutes=options.time_limit_minutes,
        leave_before_limit_s=options.leave_before_limit_s,
        fleet=fleet_layout(config),
    )


def _critic_nodes(config: Config, options: SlurmConfig) -> list[Component]:
    """Those of a critic in a world of its own, filled as the trainer's are."""
    if not config.critic_is_separate:
        return []
    ranks = config.of_critic.parallel.ranks
    on_node = min(options.ranks_on_a_node(), ranks)
    nodes = ranks // on_node
    return [Component("critic", nodes, on_node, options.cpus_per_rank, options.gpus_per_node, options.memory)]


def component_of(plan: JobPlan, stage: str) -> int:
    """Whose nodes have the ranks of a stage: ``trainer``, ``critic``, ``sft`` or ``value``."""
    return CRITIC if stage in ("critic", "value") and len(plan.components) > CRITIC else TRAINER


def _rollout_nodes(config: Config, options: SlurmConfig) -> Component:
    nodes, fleet = options.rollout_nodes, fleet_layout(config)
    if fleet is None:
        tasks, cpus = config.rollout.workers // nodes, options.cpus_per_worker
    else:
        tasks = 1
        cpus = fleet.per_node * options.cpus_per_server + fleet.most_workers_on_a_node * options.cpus_per_worker
    return Component("rollout", nodes, tasks, cpus, options.gpus_per_node, options.memory)


def node_of_worker(plan: JobPlan, index: int) -> int:
    """Which of the rollout nodes, from 0, has worker ``index``."""
    if plan.fleet is not None:
        return plan.fleet.node_of_worker(index)
    return index // plan.components[ROLLOUT].tasks_per_node
