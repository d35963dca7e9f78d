"""What `megasao simulate` assumes: every rate with its source, which is printed beside it; nothing else reads it."""

from typing import Literal

from pydantic import Field

from megasao.config.base import Section

_SOURCE = "Where the number is from, in words; printed with the result."


class Rate(Section):
    """A number, and where it is from."""

    value: float = Field(ge=0, description="The number, in the unit of the field.")
    source: str = Field(min_length=3, description=_SOURCE)


class PositiveRate(Section):
    """A number above 0, and where it is from."""

    value: float = Field(gt=0, description="The number, in the unit of the field.")
    source: str = Field(min_length=3, description=_SOURCE)


class ShareRate(Section):
    """A share, and where it is from."""

    value: float = Field(gt=0, le=1, description="The share.")
    source: str = Field(min_length=3, description=_SOURCE)


class EpisodeConfig(Section):
    """How long episodes are; `--lengths RUN` takes them from a run's journal instead."""

    response: Literal["constant", "lognormal", "pareto"] = Field(
        "lognormal", description="Law of the tokens that the model generates in an episode, all turns together."
    )
    mean: PositiveRate = Field(description="Mean of the law, tokens; episodes end at environment.max_tokens.")
    sigma: float | None = Field(None, gt=0, description="lognormal: standard deviation of the logarithm.")
    alpha: float | None = Field(None, gt=1, description="pareto: exponent of the tail.")
    prompt_tokens: Rate = Field(description="Tokens of a prompt.")
    turns: int = Field(1, ge=1, description="Turns of an episode, of equal length.")
    observation_tokens: Rate = Field(description="Tokens that the environment answers with between two turns.")


class EngineRatesConfig(Section):
    """One engine, of ``plan.engine_gpus`` GPUs. A decode step gives one token to each running request."""

    step_s: PositiveRate = Field(description="Seconds of a decode step, whatever its batch.")
    step_per_request_s: Rate = Field(description="And for each running request.")
    step_per_cached_token_s: Rate = Field(description="And for each token in the running requests' KV cache.")
    prefill_per_token_s: Rate = Field(description="Seconds for each token of prompts and observations.")
    kv_tokens: PositiveRate = Field(
        description="Tokens that its KV cache holds; an episode reserves all that it will have, or waits."
    )
    concurrency: int = Field(64, ge=1, description="Most episodes of one engine.")
    commit_s: Rate = Field(description="Seconds that an engine stands still to take new weights that it has.")
    pause: Literal["commit", "transfer"] = Field(
        "commit",
        description="When engines stand still for new weights: only to take them, or while they arrive too.",
    )


class TrainingRatesConfig(Section):
    """The trainer: floating-point operations of `megasao plan` over the speed of its GPUs, and what does not shrink."""

    peak_tflops: PositiveRate = Field(description="Peak of one GPU, 10^12 operations a second.")
    mfu: ShareRate = Field(
        description="Share of the peak that 6 operations for each active parameter and token reach; recomputation, "
        "attention scores and bubbles are in it."
    )
    optimizer_s: Rate = Field(description="Seconds of one optimizer update, whatever the batch.")
    overhead_s: Rate = Field(description="Seconds of a step for all else: packing, fetching, logging.")
    publish_s: Rate = Field(description="Seconds that the trainer stands still to give its weights away.")


class SimulateConfig(Section):
    """A model of the fleet in time. GPUs are those of the trainer and of ``plan.rollout_gpus``, in that proportion."""

    steps: int = Field(30, ge=2, description="Training steps of each simulated run.")
    discard: int = Field(10, ge=0, description="Of them, first steps that the numbers leave out: queues fill up.")
    scale_batch: bool = Field(
        True, description="Batch and buffer grow with the GPUs; false keeps them as they are at any number."
    )
    episode: EpisodeConfig = Field(description="Lengths.")
    environment_s: Rate = Field(description="Seconds of the environment or tool between two turns.")
    delivery_s: Rate = Field(description="Seconds from an episode's end until the controller has it.")
    engine: EngineRatesConfig = Field(description="Generation.")
    training: TrainingRatesConfig = Field(description="Training.")
    transfer_s: Rate | None = Field(
        None, description="Seconds from publication until engines have the weights; null is what `megasao plan` says."
    )
