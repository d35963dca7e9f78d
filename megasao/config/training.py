"""Actor, critic, loop, checkpoints and fine-tuning."""

from typing import Literal

from pydantic import Field

from megasao.config.base import Section
from megasao.config.model import ParallelConfig


class OptimizerConfig(Section):
    """Adam, with a linear warm-up and an optional linear decay; schedules count actor steps."""

    lr: float = Field(gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up, in actor steps.")
    decay_start: float | None = Field(
        None, ge=0, lt=1, description="Fraction of all steps after which lr falls linearly to 0; null is never."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam beta 1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Adam beta 2.")
    eps: float = Field(1e-8, gt=0, description="Adam epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    clip_grad: float = Field(1.0, ge=0, description="Global gradient norm clip; 0 is off.")


class ActorConfig(Section):
    """The policy."""

    optimizer: OptimizerConfig = Field(description="The actor's optimizer.")
    reset_optimizer: bool = Field(
        False, description="Forget Adam's moments and step count after each push of weights (GLM-5, arXiv 2602.15763)."
    )
    router_replay: bool = Field(
        False,
        description="Send every token to the experts that the engine sent it to (R3, mixtures of experts only): the "
        "engine records them, about 1 kB a token for GLM-5.2. Best with engines that keep their cache when new weights "
        "come (rollout.embedded.kv_after_update = keep, rollout.sglang.pause = in_place).",
    )


class CriticConfig(Section):
    """The value model: the actor's architecture with a value head on the last stage."""

    optimizer: OptimizerConfig = Field(description="The critic's optimizer; its schedule counts actor steps.")
    path: str | None = Field(
        None,
        description="Value model to start from, a directory that pretrain-value wrote; null is the policy with a new "
        "value head, or the result of value_pretraining where that section is there.",
    )
    updates_per_actor_update: int = Field(2, ge=1, description="K: critic updates for each actor update.")
    warmup_steps: int = Field(10, ge=0, description="First steps, in which only the critic is trained.")
    freeze_attention: bool = Field(True, description="Keep attention fixed: only FFN / experts and the head train.")
    head_bias: float = Field(0.0, description="Initial bias of the value head (its weight starts at zero).")
    placement: Literal["colocated", "separate"] = Field(
        "colocated",
        description="colocated: on the actor's ranks; separate: a world of its own, whose updates go on beside the "
        "actor's.",
    )
    parallel: ParallelConfig | None = Field(
        None, description="Layout of a separate critic's own ranks; null is that of the actor's, parallel."
    )
    token_budget: int | None = Field(
        None, ge=16, description="Most tokens in one packed row of a separate critic; null is trainer.token_budget."
    )
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Longest wait of the actor's world for a separate critic: its start, values, or updates. Make it "
        "longer than a step of either.",
    )
    value_clip: float | None = Field(
        None, gt=0, description="PPO's value clipping: how far values may profit from moving in one step; null is off."
    )


class LoopConfig(Section):
    """How long, how large, and how asynchronous."""

    mode: Literal["async", "sync"] = Field(
        "async", description="async: rollouts never wait; sync: a barrier between rollouts and training."
    )
    steps: int = Field(gt=0, description="Training steps, critic warm-up included.")
    batch_size: int = Field(128, ge=1, description="Trajectories per step.")
    group_size: int = Field(1, ge=1, description="Rollouts of each prompt; a batch holds whole groups.")
    partial_groups: Literal["drop", "shrink"] = Field(
        "drop",
        description="A group that loses a rollout (given up after failures, or stale): drop the rest of it, or go on "
        "with what is left, as long as that is at least 2.",
    )
    max_lag: int = Field(
        4, ge=0, description="Hard bound: trainer version minus the oldest version in a trajectory, at consumption."
    )
    max_stale_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Most trajectories of a batch, as a share, that may begin with older weights than the trainer's; "
        "0.5 is the staleness threshold of arXiv 2606.03070, 1 is off.",
    )
    batch_timeout_s: float = Field(300.0, gt=0, description="Longest wait for one batch before the run fails.")


class TrainerConfig(Section):
    """How a step is cut into packed rows."""

    token_budget: int = Field(8192, ge=16, description="Most tokens in one packed micro-batch row.")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="What the backward pass computes again instead of keeping it: full is every layer from its input, "
        "selective the parts named in megatron.model.recompute_modules (attention by default).",
    )


class CheckpointConfig(Section):
    """What is saved when. A checkpoint holds everything that a resumed run needs."""

    every: int = Field(50, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep: int = Field(2, ge=1, description="Newest complete checkpoints that are kept.")
    asynchronous: bool = Field(
        False, description="Write while training goes on: it waits only for a copy of the state in host memory."
    )
    format: Literal["safetensors", "torch_dist"] = Field(
        "safetensors",
        description="How models are stored: safetensors under Hugging Face names, or Megatron-Core's torch_dist. "
        "Either loads under any layout.",
    )
    timeout_s: float = Field(1800.0, gt=0, description="Longest wait for a checkpoint to be written.")


class SftConfig(Section):
    """Fine-tuning on the environment's demonstrations before RL; actor and critic both start from its result."""

    steps: int = Field(gt=0, description="Optimizer steps.")
    batch_size: int = Field(64, ge=1, description="Demonstrations per step.")
    demonstrations: int = Field(16384, ge=1, description="Size of the demonstration set.")
    optimizer: OptimizerConfig = Field(description="Fine-tuning optimizer.")


class ValuePretrainingConfig(Section):
    """Regression of the critic on the returns of trajectories at hand, before RL."""

    trajectories: list[str] = Field(
        min_length=1,
        description="Arrow files in the trajectory schema, directories of such, or run directories (their journals).",
    )
    steps: int = Field(gt=0, description="Optimizer steps.")
    batch_size: int = Field(64, ge=1, description="Trajectories per step.")
    held_out: float = Field(
        0.1, gt=0, lt=1, description="Share of the prompts that are not trained on: explained variance is theirs."
    )
    evaluate_every: int = Field(50, ge=1, description="Steps between looks at the held-out part; always at the end.")
    optimizer: OptimizerConfig = Field(description="Optimizer of this stage; RL begins with a fresh one.")
