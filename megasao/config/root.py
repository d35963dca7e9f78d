"""The whole configuration of a run."""

from typing import Literal

from pydantic import Field, model_validator

from megasao.config.algorithm import AlgorithmConfig
from megasao.config.base import Section
from megasao.config.combinations import impossible_combinations
from megasao.config.errors import CombinationError
from megasao.config.megatron import MegatronConfig
from megasao.config.model import ModelConfig, ParallelConfig
from megasao.config.ops import OpsConfig
from megasao.config.plan import PlanConfig
from megasao.config.rollout import (
    BenchmarksConfig,
    BufferConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ObservabilityConfig,
    RolloutConfig,
    SupervisionConfig,
    TransportConfig,
)
from megasao.config.simulate import SimulateConfig
from megasao.config.slurm import SlurmConfig
from megasao.config.training import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    LoopConfig,
    SftConfig,
    TrainerConfig,
    ValuePretrainingConfig,
)
from megasao.config.weights import WeightsConfig


class RunConfig(Section):
    """Name, place and seed."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", description="Name of the run.")
    directory: str = Field("runs", description="Parent directory of run directories.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of everything random.")


class Config(Section):
    """A run: what is trained, on what, how, and where the results go."""

    run: RunConfig = Field(description="Name, place and seed.")
    model: ModelConfig = Field(description="Checkpoint and precision.")
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig, description="The task.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="The RL algorithm.")
    actor: ActorConfig = Field(description="The policy.")
    critic: CriticConfig | None = Field(
        None, description="The value model; null exactly where algorithm.advantages needs none."
    )
    loop: LoopConfig = Field(description="Steps, batch and staleness.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Trainer layout.")
    megatron: MegatronConfig = Field(default_factory=MegatronConfig, description="Options passed on to Megatron-Core.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="Micro-batching.")
    ops: OpsConfig = Field(default_factory=OpsConfig, description="The numerical core.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Generation.")
    buffer: BufferConfig = Field(default_factory=BufferConfig, description="Trajectory buffer.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation.")
    benchmarks: BenchmarksConfig = Field(default_factory=BenchmarksConfig, description="What `megasao eval` measures.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    transport: TransportConfig = Field(default_factory=TransportConfig, description="Sockets.")
    weights: WeightsConfig = Field(
        default_factory=WeightsConfig, description="New weights on their way to the engines."
    )
    supervision: SupervisionConfig = Field(default_factory=SupervisionConfig, description="Restarts.")
    observability: ObservabilityConfig = Field(default_factory=ObservabilityConfig, description="Metrics.")
    plan: PlanConfig = Field(default_factory=PlanConfig, description="Assumptions of `megasao plan`.")
    simulate: SimulateConfig | None = Field(
        None,
        description="Rates that `megasao simulate` assumes, each with its source; null is none.",
    )
    slurm: SlurmConfig | None = Field(None, description="Nodes of a Slurm cluster; null is a run on one machine.")
    sft: SftConfig | None = Field(None, description="Fine-tuning before RL; null starts from model.path as it is.")
    value_pretraining: ValuePretrainingConfig | None = Field(
        None, description="Pretraining of the critic, after fine-tuning and before RL; null is none."
    )

    @property
    def value_model(self) -> CriticConfig:
        """The critic's section. ValueError where there is none."""
        if self.critic is None:
            raise ValueError("critic: null, and this needs the value model's section")
        return self.critic

    @property
    def critic_is_separate(self) -> bool:
        """Whether the critic is in a world of its own."""
        return self.critic is not None and self.critic.placement == "separate"

    @property
    def of_critic(self) -> "Config":
        """What the critic's ranks read: of a separate critic, with its own layout and rows as those of the trainer."""
        if self.critic is None or not self.critic_is_separate:
            return self
        budget = self.critic.token_budget or self.trainer.token_budget
        trainer = self.trainer.model_copy(update={"token_budget": budget})
        return self.model_copy(update={"parallel": self.critic.parallel or self.parallel, "trainer": trainer})

    @property
    def warmup_steps(self) -> int:
        """First steps, in which only the critic is trained."""
        return self.critic.warmup_steps if self.critic is not None else 0

    @property
    def wants_logprobs(self) -> bool:
        """Whether the rollout side is asked for the log-probabilities of what it samples."""
        asked = self.rollout.logprobs
        return self.algorithm.objective.needs_logprobs if asked == "auto" else asked == "always"

    @property
    def wants_versions(self) -> bool:
        """Whether the rollout side is asked for the weight versions that produced its tokens."""
        asked = self.rollout.weight_versions
        return self.algorithm.objective.needs_versions if asked == "auto" else asked == "always"

    @property
    def weight_transport(self) -> Literal["stream", "disk", "distributed", "embedded"]:
        """How weights travel in this run."""
        if self.weights.transport != "auto":
            return self.weights.transport
        return "disk" if self.rollout.engine == "sglang" else "stream"

    @property
    def wants_entropy(self) -> bool:
        """Whether the trainer computes the entropy of the policy at every action token."""
        return self.algorithm.entropy_bonus > 0 or self.observability.entropy

    @model_validator(mode="after")
    def _can_work(self) -> "Config":
        problems = impossible_combinations(self)
        if problems:
            raise CombinationError(problems)
        return self
