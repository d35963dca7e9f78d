"""Policy objectives, chosen by configuration: typed tensors in, losses of single tokens out. No process groups here.

An objective is one function: ``PolicyInputs`` of a row and its options in, ``TokenLosses`` out. It is called with 0 at
masked positions and advantages without gradient; adding up, dividing and measuring are done here. One for which
``megasao.ops`` has an operator of whole rows is a ``row_objective``.

Invariants that the tests assert:
- the gradient is that of the formula in each docstring, in float64;
- a position with ``action_mask`` False gets exactly 0 loss and 0 gradient, whatever stands there (NaN, inf);
- losses are sums over tokens: any split into rows or ranks with the same denominator adds up to the whole. Where a
  response itself is split, ``PolicyInputs.responses`` must hold the totals of the whole response;
- no action token at all: loss 0, gradient 0, also when the denominator is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from megasao import ops
from megasao.config.algorithm import (
    AsympoObjective,
    DisObjective,
    GpgObjective,
    NaiveObjective,
    ObjectiveOptions,
    PpoClipObjective,
    SpoObjective,
)
from megasao.ops import dis
from megasao.ops.checks import check_flat, check_same_floats, clamped_denominator
from megasao.ops.reference import Stats, add_up, ratio_stats
from megasao.ops.response import Responses, RowSums, response_sums, sequence_of_tokens


@dataclass(frozen=True)
class PolicyInputs:
    """One packed row of B sequences, all [T] on one device: ``logprobs`` (with gradient), ``rollout_logprobs`` and
    ``advantages`` of one float dtype, ``action_mask`` bool; ``cu_seqlens`` int32 [B+1].

    ``rollout_logprobs`` is None where the rollout side was not asked for them. ``responses`` are the totals of the
    whole responses, to be given where the row holds only parts of them; None: the row holds them whole.
    """

    logprobs: Tensor
    rollout_logprobs: Tensor | None
    advantages: Tensor
    action_mask: Tensor
    cu_seqlens: Tensor
    responses: Responses | None = None

    def check(self) -> None:
        """ValueError if a shape, dtype or device is not as above."""
        floats = {"logprobs": self.logprobs, "advantages": self.advantages}
        if self.rollout_logprobs is not None:
            floats["rollout_logprobs"] = self.rollout_logprobs
        tokens = check_same_floats(**floats)
        check_flat("action_mask", self.action_mask, length=tokens, dtypes=(torch.bool,), device=self.logprobs.device)

    def clean(self) -> "PolicyInputs":
        """The same with 0 at masked positions, whatever stood there, and gradient into ``logprobs`` alone."""
        rollout = self.rollout_logprobs
        return replace(
            self,
            logprobs=torch.where(self.action_mask, self.logprobs, 0.0),
            rollout_logprobs=None if rollout is None else torch.where(self.action_mask, rollout.detach(), 0.0),
            advantages=torch.where(self.action_mask, self.advantages.detach(), 0.0),
        )

    def against_rollout(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors [T] of an objective with a ratio. ValueError without ``rollout_logprobs``."""
        if self.rollout_logprobs is None:
            raise ValueError("rollout_logprobs: the objective needs them, and the rollout side was not asked for them")
        return self.logprobs, self.rollout_logprobs, self.advantages, self.action_mask

    @cached_property
    def sums(self) -> RowSums:
        """What this row holds of its responses."""
        return response_sums(self.logprobs, self.advantages, self.action_mask, self.cu_seqlens)

    def totals(self) -> Responses:
        """Totals of the whole responses."""
        return self.sums.totals if self.responses is None else self.responses

    def per_token(self, per_response: Tensor) -> Tensor:
        """A number of each response [B] at each of its tokens [T]."""
        cu_seqlens = self.cu_seqlens.to(self.logprobs.device)
        return per_response[sequence_of_tokens(cu_seqlens, self.logprobs.numel())]


@dataclass(frozen=True)
class TokenLosses:
    """``losses`` [T] to be minimised, 0 where masked, undivided; ``kept`` bool [T], the action tokens that may carry
    gradient (None: all of them); ``shares``: bool [T] each, reported as shares of the action tokens."""

    losses: Tensor
    kept: Tensor | None = None
    shares: dict[str, Tensor] = field(default_factory=dict)


Options = TypeVar("Options", bound=ObjectiveOptions)
LossFunction = Callable[[PolicyInputs, Any], TokenLosses]
RowFunction = Callable[[PolicyInputs, Any, Tensor | float], tuple[Tensor, Stats]]
"""Inputs as they come, options and denominator in; (divided loss 0-d, sums behind its statistics, among them
``positive_loss`` and ``negative_loss``) out."""
KeptFunction = Callable[[PolicyInputs, Any], Tensor | None]
_FUNCTIONS: dict[type[ObjectiveOptions], tuple[RowFunction, KeptFunction]] = {}


def objective(options: type[Options]) -> Callable[[LossFunction], LossFunction]:
    """Decorator: this function is the objective that a section of type ``options`` configures."""

    def register(function: LossFunction) -> LossFunction:
        def row(inputs: PolicyInputs, options: Any, denominator: Tensor | float) -> tuple[Tensor, Stats]:
            inputs = inputs.clean()
            parts = function(inputs, options)
            loss, sides = add_up(parts.losses, inputs.advantages, clamped_denominator(denominator, inputs.logprobs))
            shares = {
                f"share/{name}": (inputs.action_mask & flags).sum(dtype=torch.float64)
                for name, flags in parts.shares.items()
            }
            return loss.to(inputs.logprobs.dtype), {**_ratio_stats(inputs), **shares, **sides}

        _FUNCTIONS[options] = row, lambda inputs, options: function(inputs.clean(), options).kept
        return function

    return register


def row_objective(options: type[Options], kept: KeptFunction) -> Callable[[RowFunction], RowFunction]:
    """Decorator: the same for an operator of whole rows, which deals with masked positions by itself.

    ``kept`` gives the action tokens that may carry gradient, bool [T]; None: all of them.
    """

    def register(function: RowFunction) -> RowFunction:
        _FUNCTIONS[options] = function, kept
        return function

    return register


def _inside_band(inputs: PolicyInputs, options: DisObjective) -> Tensor:
    logprobs, rollout, _, mask = inputs.against_rollout()
    return ops.accepted_tokens(logprobs, rollout, mask, eps_low=options.eps_low, eps_high=options.eps_high)


@row_objective(DisObjective, kept=_inside_band)
def dis_objective(inputs: PolicyInputs, options: DisObjective, denominator: Tensor | float) -> tuple[Tensor, Stats]:
    """-f(r) A log p with r = exp(log p - log p_rollout); f(r) = r inside the band, else 0, without gradient.

    SAO (arXiv 2607.07508), section on DIS; see ``megasao.ops.dis``. Divide by tokens. ValueError without
    ``rollout_logprobs``.
    """
    return ops.dis_loss(*inputs.against_rollout(), **options.model_dump(exclude={"name"}), denominator=denominator)


def _unclipped(inputs: PolicyInputs, options: PpoClipObjective) -> Tensor:
    return ops.unclipped_tokens(*inputs.against_rollout(), **options.model_dump(exclude={"name"}))


@row_objective(PpoClipObjective, kept=_unclipped)
def ppo_clip_objective(
    inputs: PolicyInputs, options: PpoClipObjective, denominator: Tensor | float
) -> tuple[Tensor, Stats]:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = exp(log p - log p_rollout), token by token.

    With ``dual_clip`` = c, where A < 0 it is -max(that minimum, c A). The objective of GRPO and VAPO in the papers'
    comparisons (arXiv 2607.07508, 2606.03070); see ``megasao.ops.ppo``. Divide by tokens. ValueError without
    ``rollout_logprobs``.
    """
    return ops.ppo_clip_loss(*inputs.against_rollout(), **options.model_dump(exclude={"name"}), denominator=denominator)


@objective(GpgObjective)
def gpg_objective(inputs: PolicyInputs, options: GpgObjective) -> TokenLosses:
    """-A log p of each token: no ratio, no clip. A baseline of arXiv 2606.03070. Divide by tokens, not by responses."""
    return TokenLosses(-inputs.logprobs * inputs.advantages)


def _all(inputs: PolicyInputs, options: ObjectiveOptions) -> None:
    """Every action token carries gradient."""


@row_objective(NaiveObjective, kept=_all)
def naive_objective(inputs: PolicyInputs, options: NaiveObjective, denominator: Tensor | float) -> tuple[Tensor, Stats]:
    """-A log p / m, m the action tokens of the whole response: (1/G) sum_g A_g S_g when divided by responses.

    arXiv 2606.03070, the naive group-relative loss; S_g is the mean token NLL, nats.
    """
    return _response_loss(inputs, denominator)


@row_objective(SpoObjective, kept=_all)
def spo_objective(inputs: PolicyInputs, options: SpoObjective, denominator: Tensor | float) -> tuple[Tensor, Stats]:
    """The naive loss with A replaced by alpha A where A < 0 (arXiv 2606.03070, SPO). Divide by responses."""
    return _response_loss(inputs, denominator, alpha=options.alpha)


@row_objective(AsympoObjective, kept=_all)
def asympo_objective(
    inputs: PolicyInputs, options: AsympoObjective, denominator: Tensor | float
) -> tuple[Tensor, Stats]:
    """A S_g / sg(max(S_g, floor)), token by token: -A log p / (m max(S_g, floor)), the divisor without gradient.

    arXiv 2606.03070, ASymPO. With sum A = 0 over a group and no S below the floor (nats) the loss VALUE is 0 and the
    gradient is not. S_g is that of the whole response. Divide by responses.
    """
    return _response_loss(inputs, denominator, scale=inputs.totals().mean_nll.clamp_min(options.floor))


def _response_loss(
    inputs: PolicyInputs, denominator: Tensor | float, *, scale: Tensor | float = 1.0, alpha: float = 1.0
) -> tuple[Tensor, Stats]:
    """Mean token NLL of each whole response times its A, divided by ``scale``, a number or [B]."""
    weights = 1 / (inputs.totals().tokens.clamp_min(1) * scale)
    loss, sides = ops.response_loss(
        inputs.logprobs,
        inputs.advantages,
        inputs.action_mask,
        inputs.cu_seqlens,
        weights=weights,
        alpha=alpha,
        denominator=denominator,
    )
    return loss, {**_ratio_stats(inputs), **sides}


@dataclass(frozen=True)
class Objective:
    """The configured objective as the trainer uses it: a part of the loss, and sums that add up over parts."""

    options: ObjectiveOptions

    def loss(self, inputs: PolicyInputs, denominator: Tensor | float) -> tuple[Tensor, Stats]:
        """The row's part of the loss, 0-d in the dtype of ``logprobs``, and statistics that add up.

        ``denominator`` is a number or a 0-d tensor, the same on all ranks and micro-batches; clamped at 1e-8.
        Stats: of the ratio where there are ``rollout_logprobs``; of responses with positive and negative advantage
        (their number, sums of their S in nats, their parts of the loss); ``share/`` of clipped tokens.
        """
        inputs.check()
        run, _ = _FUNCTIONS[type(self.options)]
        loss, stats = run(inputs, self.options, denominator)
        return loss, {**stats, **_response_stats(inputs)}

    @torch.no_grad()
    def kept(self, inputs: PolicyInputs) -> Tensor:
        """bool [T]: the action tokens that may carry gradient."""
        inputs.check()
        kept = _FUNCTIONS[type(self.options)][1](inputs, self.options)
        return inputs.action_mask if kept is None else inputs.action_mask & kept

    def summarize(self, stats: Stats) -> dict[str, float | None]:
        """Metrics of the whole step from its combined statistics; None where there is nothing to average."""
        sums = {name: float(value) for name, value in stats.items()}
        summary: dict[str, float | None] = {"tokens": sums["tokens"]}
        if "ratio_sum" in stats:
            summary |= dis.summarize(stats)
        for name, value in sums.items():
            if name.startswith("share/"):
                summary[name.removeprefix("share/")] = value / sums["tokens"] if sums["tokens"] else None
        for side in ("positive", "negative"):
            number = sums[f"{side}_responses"]
            summary[f"{side}_responses"] = number
            summary[f"{side}_nll"] = sums[f"{side}_nll_sum"] / number if number else None
            summary[f"{side}_loss"] = sums[f"{side}_loss"]
        return summary


def _ratio_stats(inputs: PolicyInputs) -> Stats:
    if inputs.rollout_logprobs is None:
        return {"tokens": inputs.action_mask.sum(dtype=torch.float64)}
    log_ratio = torch.where(inputs.action_mask, inputs.logprobs.detach() - inputs.rollout_logprobs, 0.0)
    return ratio_stats(log_ratio, inputs.action_mask)


@torch.no_grad()
def _response_stats(inputs: PolicyInputs) -> Stats:
    """Of the responses whose advantage is positive, and of those where it is negative.

    A response of m action tokens counts 1/m at each: whole responses count 1, and parts of one add up.
    """
    totals, stats = inputs.totals(), {}
    for side, tokens in (("positive", inputs.sums.positive), ("negative", inputs.sums.negative)):
        share = tokens / totals.tokens.clamp_min(1)
        stats[f"{side}_responses"] = share.sum()
        stats[f"{side}_nll_sum"] = torch.where(tokens > 0, share * totals.mean_nll, 0.0).sum()
    return stats


def make_objective(options: ObjectiveOptions) -> Objective:
    """The objective that ``algorithm.objective`` names."""
    assert type(options) in _FUNCTIONS, f"no function is registered for {type(options).__name__}"
    return Objective(options)
