"""How a run is laid over the nodes of a Slurm cluster; only `megasao slurm` and slurm/glm_scale.sh read it."""

from pydantic import Field

from megasao.config.base import Section

_MEMORY = r"^[0-9]+[KMGT]?$"


class SlurmConfig(Section):
    """A heterogeneous job of three components: the controller, the trainer's nodes, the rollout nodes.

    A critic in a world of its own has nodes of its own, as the trainer's: a fourth component.
    """

    gpus_per_node: int = Field(8, ge=0, description="GPUs of a trainer or rollout node; 0 is a node without.")
    ranks_per_node: int | None = Field(
        None, ge=1, description="Trainer processes of a node; null is one a GPU, or one a node without GPUs."
    )
    cpus_per_rank: int = Field(8, ge=1, description="CPUs of a trainer process.")
    rollout_nodes: int = Field(
        1, ge=1, description="Nodes of the rollout fleet; rollout.workers, or their SGLang servers, spread evenly."
    )
    nodes_per_server: int = Field(
        1,
        ge=1,
        description="Nodes that one SGLang server spans, all of each; more than 1 where a node has too few GPUs.",
    )
    cpus_per_worker: int = Field(16, ge=1, description="CPUs of a rollout worker.")
    cpus_per_server: int = Field(8, ge=1, description="CPUs of an SGLang server on each of its nodes.")
    controller_cpus: int = Field(4, ge=2, description="CPUs of the controller's node; the launcher runs there too.")
    controller_memory: str = Field("16G", pattern=_MEMORY, description="Memory of the controller's node, for sbatch.")
    memory: str = Field("0", pattern=_MEMORY, description="Memory of each other node, for sbatch; 0 is all it has.")
    time_limit_minutes: int = Field(1440, ge=1, description="Time limit of one job; the run goes on in the next.")
    leave_before_limit_s: int = Field(
        900,
        ge=10,
        le=65535,
        description="Seconds before the limit at which the run saves a checkpoint and requeues itself; longer than the "
        "longest training step and the writing of a checkpoint together.",
    )
    check_timeout_s: float = Field(
        45.0,
        gt=0,
        description="Longest check of the nodes before anything starts; what a node that hangs still runs is ended in "
        "at most 15 s more.",
    )

    def ranks_on_a_node(self) -> int:
        """Trainer processes of a full node."""
        return self.ranks_per_node or max(1, self.gpus_per_node)
