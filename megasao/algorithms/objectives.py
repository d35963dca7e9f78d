"""Policy objectives, chosen by configuration: typed tensors in, losses of single tokens out. No process groups here.

An objective is one function: ``PolicyInputs`` of a row and its options in, ``TokenLosses`` out. ``Objective`` calls it
with 0 at masked positions and advantages without gradient, adds the losses up, and measures what is the same for all.

Invariants that the tests assert:
- the gradient is that of the formula in each docstring, in float64;
- a position with ``action_mask`` False gets exactly 0 loss and 0 gradient, whatever stands there (NaN, inf);
- losses are sums over tokens: any split into rows or ranks with the same denominator adds up to the whole. Where a
  response itself is split, ``PolicyInputs.responses`` must hold the totals of the whole response;
- no action token at all: loss 0, gradient 0, also when the denominator is 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

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
from megasao.ops.reference import LOG_RATIO_CLAMP, Stats, dis_token_losses, ratio_stats
from megasao.ops.response import Responses, response_totals, sequence_of_tokens


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

    def log_ratio(self) -> Tensor:
        """log p - log p_rollout [T], 0 where masked, with gradient. ValueError without ``rollout_logprobs``."""
        if self.rollout_logprobs is None:
            raise ValueError("rollout_logprobs: the objective needs them, and the rollout side was not asked for them")
        return torch.where(self.action_mask, self.logprobs - self.rollout_logprobs, 0.0)

    def totals(self) -> Responses:
        """Totals of the whole responses."""
        if self.responses is not None:
            return self.responses
        return response_totals(self.logprobs, self.action_mask, self.cu_seqlens.to(self.logprobs.device))

    def per_token(self, per_response: Tensor) -> Tensor:
        """A number of each response [B] at each of its tokens [T]."""
        cu_seqlens = self.cu_seqlens.to(self.logprobs.device)
        return per_response[sequence_of_tokens(cu_seqlens, self.logprobs.numel())]


@dataclass(frozen=True)
class TokenLosses:
    """``losses`` [T] to be minimised, 0 where masked, undivided; ``kept`` bool [T], the action tokens that may carry
    gradient (None: all of them); ``shares``: bool [T] each, reported as shares of the action tokens; ``stats``: sums
    that ``megasao.ops.dis.summarize`` knows."""

    losses: Tensor
    kept: Tensor | None = None
    shares: dict[str, Tensor] = field(default_factory=dict)
    stats: Stats = field(default_factory=dict)


Options = TypeVar("Options", bound=ObjectiveOptions)
LossFunction = Callable[[PolicyInputs, Any], TokenLosses]
_FUNCTIONS: dict[type[ObjectiveOptions], LossFunction] = {}


def objective(options: type[Options]) -> Callable[[LossFunction], LossFunction]:
    """Decorator: this function is the objective that a section of type ``options`` configures."""

    def register(function: LossFunction) -> LossFunction:
        _FUNCTIONS[options] = function
        return function

    return register


@objective(DisObjective)
def dis_objective(inputs: PolicyInputs, options: DisObjective) -> TokenLosses:
    """-f(r) A log p with r = exp(log p - log p_rollout); f(r) = r inside the band, else 0, without gradient.

    SAO (arXiv 2607.07508), section on DIS; see ``megasao.ops.dis``. Divide by tokens. ValueError without
    ``rollout_logprobs``.
    """
    inputs.log_ratio()
    assert inputs.rollout_logprobs is not None
    losses, accepted, stats = dis_token_losses(
        inputs.logprobs,
        inputs.rollout_logprobs,
        inputs.advantages,
        inputs.action_mask,
        eps_low=options.eps_low,
        eps_high=options.eps_high,
    )
    return TokenLosses(losses, kept=accepted, stats=stats)


@objective(PpoClipObjective)
def ppo_clip_objective(inputs: PolicyInputs, options: PpoClipObjective) -> TokenLosses:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = exp(log p - log p_rollout), token by token.

    With ``dual_clip`` = c, where A < 0 it is -max(that minimum, c A). The objective of GRPO and VAPO in the papers'
    comparisons (arXiv 2607.07508, 2606.03070). Decided in log space. Beyond |log r| = 20 the ratio counts as constant,
    and a NaN ratio as clipped. Divide by tokens. ValueError without ``rollout_logprobs``.
    """
    log_ratio, advantages = inputs.log_ratio(), inputs.advantages
    fixed = log_ratio.detach()
    low = (advantages < 0) & (fixed < math.log(1 - options.eps_low))
    high = (advantages > 0) & (fixed > math.log(1 + options.eps_high))
    limit = math.inf if options.dual_clip is None else math.log(options.dual_clip)
    dual = (advantages < 0) & (fixed > limit)
    invalid = inputs.action_mask & torch.isnan(fixed)
    free = inputs.action_mask & ~(low | high | dual | invalid)
    ratio = torch.where(free, log_ratio, 0.0).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    for clipped, bound in ((low, 1 - options.eps_low), (high, 1 + options.eps_high), (dual, options.dual_clip or 0.0)):
        ratio = torch.where(clipped, bound, ratio)
    losses = torch.where(invalid, 0.0, -ratio * advantages)
    return TokenLosses(losses, kept=free, shares={"clipped_low": low, "clipped_high": high, "clipped_dual": dual})


@objective(GpgObjective)
def gpg_objective(inputs: PolicyInputs, options: GpgObjective) -> TokenLosses:
    """-A log p of each token: no ratio, no clip. A baseline of arXiv 2606.03070. Divide by tokens, not by responses."""
    return TokenLosses(-inputs.logprobs * inputs.advantages)


@objective(NaiveObjective)
def naive_objective(inputs: PolicyInputs, options: NaiveObjective) -> TokenLosses:
    """-A log p / m, m the action tokens of the whole response: (1/G) sum_g A_g S_g when divided by responses.

    arXiv 2606.03070, the naive group-relative loss; S_g is the mean token NLL, nats.
    """
    return _response_losses(inputs, inputs.advantages)


@objective(SpoObjective)
def spo_objective(inputs: PolicyInputs, options: SpoObjective) -> TokenLosses:
    """The naive loss with A replaced by alpha A where A < 0 (arXiv 2606.03070, SPO). Divide by responses."""
    scaled = torch.where(inputs.advantages < 0, options.alpha * inputs.advantages, inputs.advantages)
    return _response_losses(inputs, scaled)


@objective(AsympoObjective)
def asympo_objective(inputs: PolicyInputs, options: AsympoObjective) -> TokenLosses:
    """A S_g / sg(max(S_g, floor)), token by token: -A log p / (m max(S_g, floor)), the divisor without gradient.

    arXiv 2606.03070, ASymPO. With sum A = 0 over a group and no S below the floor (nats) the loss VALUE is 0 and the
    gradient is not. S_g is that of the whole response. Divide by responses.
    """
    scale = inputs.totals().mean_nll.clamp_min(options.floor)
    return _response_losses(inputs, inputs.advantages / inputs.per_token(scale))


def _response_losses(inputs: PolicyInputs, weights: Tensor) -> TokenLosses:
    """``weights`` [T] times token NLL over the action tokens of the whole response."""
    lengths = inputs.per_token(inputs.totals().tokens.clamp_min(1))
    return TokenLosses(-inputs.logprobs.double() * weights / lengths)


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
        inputs = inputs.clean()
        parts = self._losses(inputs)
        divisor = clamped_denominator(denominator, inputs.logprobs)
        loss = (parts.losses.sum(dtype=torch.float64) / divisor).to(inputs.logprobs.dtype)
        stats = parts.stats or _ratio_stats(inputs)
        shares = {f"share/{name}": flags.sum(dtype=torch.float64) for name, flags in parts.shares.items()}
        return loss, {**stats, **shares, **_response_stats(inputs, parts.losses.detach().double() / divisor)}

    @torch.no_grad()
    def kept(self, inputs: PolicyInputs) -> Tensor:
        """bool [T]: the action tokens that may carry gradient."""
        kept = self._losses(inputs.clean()).kept
        return inputs.action_mask if kept is None else kept

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

    def _losses(self, inputs: PolicyInputs) -> TokenLosses:
        return _FUNCTIONS[type(self.options)](inputs, self.options)


def _ratio_stats(inputs: PolicyInputs) -> Stats:
    if inputs.rollout_logprobs is None:
        return {"tokens": inputs.action_mask.sum(dtype=torch.float64)}
    return ratio_stats(inputs.log_ratio().detach(), inputs.action_mask)


@torch.no_grad()
def _response_stats(inputs: PolicyInputs, losses: Tensor) -> Stats:
    """Of the responses whose advantage is positive, and of those where it is negative.

    A response of m action tokens counts 1/m at each: whole responses count 1, and parts of one add up.
    """
    totals = inputs.totals()
    share = 1 / inputs.per_token(totals.tokens.clamp_min(1))
    nll = inputs.per_token(totals.mean_nll)
    stats = {}
    for side, chosen in (("positive", inputs.advantages > 0), ("negative", inputs.advantages < 0)):
        action = inputs.action_mask & chosen
        stats[f"{side}_responses"] = torch.where(action, share, 0.0).sum()
        stats[f"{side}_nll_sum"] = torch.where(action, share * nll, 0.0).sum()
        stats[f"{side}_loss"] = torch.where(action, losses, 0.0).sum()
    return stats


def make_objective(options: ObjectiveOptions) -> Objective:
    """The objective that ``algorithm.objective`` names."""
    assert type(options) in _FUNCTIONS, f"no function is registered for {type(options).__name__}"
    return Objective(options)
