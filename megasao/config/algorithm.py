"""The RL algorithm: objective, advantage estimator, loss denominator."""

from typing import Annotated, Literal

from pydantic import Field

from megasao.config.base import Section


class DisObjective(Section):
    """Direct double-sided importance sampling (SAO, arXiv 2607.07508): tokens outside the band count zero."""

    name: Literal["dis"] = Field("dis", description="Direct double-sided importance sampling.")
    eps_low: float = Field(0.3, gt=0, lt=1, description="Lower band: ratio > 1 - eps_low.")
    eps_high: float = Field(5.0, gt=0, description="Upper band: ratio < 1 + eps_high.")


class SkipObservationGae(Section):
    """GAE over action tokens only (SAO, arXiv 2607.07508), with Monte-Carlo targets for the critic."""

    name: Literal["skip_observation_gae"] = Field("skip_observation_gae", description="Skip-observation GAE.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per action token.")
    policy_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["length_adaptive"] = Field(
        "length_adaptive",
        description="GAE lambda of the policy: a number in [0, 1], or length_adaptive = 1 - 1/(alpha * l).",
    )
    alpha: float = Field(1.5, ge=1, description="alpha of the length-adaptive lambda; l counts action tokens.")
    value_lambda: float = Field(1.0, ge=0, le=1, description="lambda of the critic's target; 1 is Monte Carlo.")


class AlgorithmConfig(Section):
    """What is optimised, and what the sums are divided by."""

    objective: DisObjective = Field(default_factory=DisObjective, description="Policy objective.")
    advantages: SkipObservationGae = Field(default_factory=SkipObservationGae, description="Advantage estimator.")
    denominator: Literal["action_tokens", "accepted_tokens", "sequences"] = Field(
        "action_tokens",
        description="Global denominator of the policy loss: all action tokens of the step, those inside the "
        "DIS band, or the number of trajectories.",
    )
