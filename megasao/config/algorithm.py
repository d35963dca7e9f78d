"""The RL algorithm: objective, advantage estimator, loss denominator.

A new objective is a section here (with its ``needs_...`` and ``response_level``), an entry in ``ObjectiveConfig``,
and one function in ``megasao/algorithms/objectives.py``. A new estimator goes the same way.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from megasao.config.base import Section


class ObjectiveOptions(Section):
    """What every objective tells the rest of the system about itself."""

    needs_logprobs: ClassVar[bool] = False
    """Whether it reads the rollout engine's log-probabilities; if not, they are neither asked for nor stored."""
    needs_versions: ClassVar[bool] = False
    """Whether its method keeps account of the weights that produced each token; if not, they are not stored."""
    response_level: ClassVar[bool] = False
    """Whether it is a mean over responses, each a mean over its tokens: it is then divided by their number."""


class DisObjective(ObjectiveOptions):
    """Direct double-sided importance sampling (SAO, arXiv 2607.07508): tokens outside the band count zero."""

    needs_logprobs: ClassVar[bool] = True
    needs_versions: ClassVar[bool] = True
    name: Literal["dis"] = Field("dis", description="Direct double-sided importance sampling.")
    eps_low: float = Field(0.3, gt=0, lt=1, description="Lower band: ratio > 1 - eps_low.")
    eps_high: float = Field(5.0, gt=0, description="Upper band: ratio < 1 + eps_high.")


class PpoClipObjective(ObjectiveOptions):
    """PPO's clipped surrogate, token by token, against the rollout policy (GRPO, VAPO)."""

    needs_logprobs: ClassVar[bool] = True
    needs_versions: ClassVar[bool] = True
    name: Literal["ppo_clip"] = Field("ppo_clip", description="Clipped surrogate.")
    eps_low: float = Field(0.2, gt=0, lt=1, description="Where the advantage is negative: no gradient below 1 - this.")
    eps_high: float = Field(0.2, gt=0, description="Where the advantage is positive: no gradient above 1 + this.")
    dual_clip: float | None = Field(
        None, gt=1, description="Where the advantage is negative: no gradient above this ratio either; null is off."
    )


class NaiveObjective(ObjectiveOptions):
    """Group-relative policy gradient without any correction: mean over responses of A times mean token NLL."""

    response_level: ClassVar[bool] = True
    name: Literal["naive"] = Field("naive", description="Uncorrected group-relative policy gradient.")


class GpgObjective(ObjectiveOptions):
    """Group policy gradient: A times token NLL, summed over tokens, without ratio and without clip."""

    name: Literal["gpg"] = Field("gpg", description="Uncorrected policy gradient over tokens.")


class SpoObjective(ObjectiveOptions):
    """Naive with negative advantages scaled down (arXiv 2606.03070)."""

    response_level: ClassVar[bool] = True
    name: Literal["spo"] = Field("spo", description="Negative advantages are scaled by alpha.")
    alpha: float = Field(0.2, ge=0, le=1, description="Factor of negative advantages; 1 is naive, 0 positives only.")


class AsympoObjective(ObjectiveOptions):
    """Each response's loss divided by its own mean token NLL, held fixed (arXiv 2606.03070)."""

    response_level: ClassVar[bool] = True
    name: Literal["asympo"] = Field("asympo", description="Self-normalised group-relative policy gradient.")
    floor: float = Field(1e-3, gt=0, description="Least mean token NLL, nats, that a response is divided by.")


class EstimatorOptions(Section):
    """What every estimator tells the rest of the system about itself."""

    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False


class _GaeOptions(EstimatorOptions):
    needs_critic: ClassVar[bool] = True
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per action token.")
    policy_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["length_adaptive"] = Field(
        "length_adaptive",
        description="GAE lambda of the policy: a number in [0, 1], or length_adaptive = 1 - 1/(alpha * l).",
    )
    alpha: float = Field(1.5, ge=1, description="alpha of the length-adaptive lambda; l counts action tokens.")
    value_lambda: float = Field(1.0, ge=0, le=1, description="lambda of the critic's target; 1 is Monte Carlo.")


class SkipObservationGae(_GaeOptions):
    """GAE over action tokens only (SAO, arXiv 2607.07508), with Monte-Carlo targets for the critic."""

    name: Literal["skip_observation_gae"] = Field("skip_observation_gae", description="Skip-observation GAE.")


class Gae(_GaeOptions):
    """GAE over all tokens from the first action on, observations too: SAO's ablation."""

    name: Literal["gae"] = Field("gae", description="GAE that does not skip observations.")


class GroupBaseline(EstimatorOptions):
    """The mean reward of a prompt's rollouts as baseline (GRPO and its relatives); no critic."""

    needs_groups: ClassVar[bool] = True
    name: Literal["group"] = Field("group", description="Reward minus the mean of its group.")
    std: bool = Field(False, description="Divide by the group's standard deviation (plus 1e-6).")
    leave_one_out: bool = Field(False, description="The baseline of a rollout is the mean of the others.")
    rescale: bool = Field(
        False, description="Multiply by trajectories / those in groups whose rewards differ (GPG's alpha)."
    )


class RunningMean(EstimatorOptions):
    """The mean of earlier rewards as baseline (SAO's ablation); no critic, no groups."""

    name: Literal["running_mean"] = Field("running_mean", description="Reward minus the mean of earlier rewards.")
    window: int = Field(8, ge=1, description="Newest earlier rewards that count.")
    scope: Literal["prompt", "task", "global"] = Field(
        "prompt", description="Whose earlier rewards: those of the same prompt, the same task, or all."
    )
    initial: float = Field(0.0, description="Baseline where there is no earlier reward.")


def _named(default: str) -> Any:
    """A union's branch is named by ``name``; a section without it is the default branch."""

    def name_of(value: Any) -> Any:
        return value.get("name", default) if isinstance(value, dict) else getattr(value, "name", default)

    return Discriminator(name_of)


ObjectiveConfig = Annotated[
    Annotated[DisObjective, Tag("dis")]
    | Annotated[PpoClipObjective, Tag("ppo_clip")]
    | Annotated[NaiveObjective, Tag("naive")]
    | Annotated[GpgObjective, Tag("gpg")]
    | Annotated[SpoObjective, Tag("spo")]
    | Annotated[AsympoObjective, Tag("asympo")],
    _named("dis"),
]

AdvantagesConfig = Annotated[
    Annotated[SkipObservationGae, Tag("skip_observation_gae")]
    | Annotated[Gae, Tag("gae")]
    | Annotated[GroupBaseline, Tag("group")]
    | Annotated[RunningMean, Tag("running_mean")],
    _named("skip_observation_gae"),
]


class KlConfig(Section):
    """A penalty on the distance from the policy that the run started from, which is kept as a frozen copy."""

    coefficient: float = Field(
        0.0,
        ge=0,
        description="Times the mean KL estimate of the step's action tokens, nats; 0 is off: no copy is kept.",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="d = log p - log p_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."
    )


class AlgorithmConfig(Section):
    """What is optimised, and what the sums are divided by."""

    objective: ObjectiveConfig = Field(default_factory=DisObjective, description="Policy objective.")
    advantages: AdvantagesConfig = Field(default_factory=SkipObservationGae, description="Advantage estimator.")
    denominator: Literal["action_tokens", "accepted_tokens", "sequences"] = Field(
        "action_tokens",
        description="Global denominator of the policy loss: all action tokens of the step, those inside the "
        "DIS band, or the number of trajectories.",
    )
    whiten: bool = Field(
        False, description="Bring the advantages of a step's action tokens, over all ranks, to mean 0 and variance 1."
    )
    kl: KlConfig = Field(default_factory=KlConfig, description="Distance from the starting policy.")
    entropy_bonus: float = Field(
        0.0,
        ge=0,
        description="Times the mean entropy of the laws that the step's action tokens were sampled from, nats: "
        "subtracted from the loss; 0 is off.",
    )
    allow_uncorrected: bool = Field(
        False, description="Permit ppo_clip on asynchronous rollouts, whose ratio it bounds on one side only."
    )
