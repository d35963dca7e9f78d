"""Numbers of whole responses inside packed rows, and losses that weigh each response by them.

Invariants that the tests assert:
- they are sums: those of a response that is split over rows or ranks add up to those of the whole;
- whatever stands at a masked position (NaN, inf) changes nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megasao.ops.backend import use_fused
from megasao.ops.checks import (
    as_divisor,
    check_cu_seqlens,
    check_flat,
    check_same_floats,
    clamped_denominator,
    contiguous,
)
from megasao.ops.reference import SIDES, Stats, response_loss_reference, response_sums_reference


@dataclass(frozen=True)
class Responses:
    """Totals of B responses: ``nll``, the sum of -log p over action tokens, nats, and ``tokens``, both float64 [B]."""

    nll: Tensor
    tokens: Tensor

    @property
    def mean_nll(self) -> Tensor:
        """S, float64 [B], nats per token; 0 for a response without action tokens."""
        return self.nll / self.tokens.clamp_min(1)


def sequence_of_tokens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int64 [T]: the number of the sequence that each token belongs to."""
    check_cu_seqlens(cu_seqlens, tokens)
    lengths = cu_seqlens.long().diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


@dataclass(frozen=True)
class RowSums:
    """What a row holds of its B responses: ``totals``; action tokens with ``positive`` and with ``negative`` advantage,
    float64 [B]."""

    totals: Responses
    positive: Tensor
    negative: Tensor


@torch.no_grad()
def response_sums(logprobs: Tensor, advantages: Tensor, action_mask: Tensor, cu_seqlens: Tensor) -> RowSums:
    """Sums over the action tokens of each response, in one pass.

    Args:
        logprobs: [T], float32 or float64, log-probability of each token.
        advantages: [T], same dtype.
        action_mask: bool [T].
        cu_seqlens: int32 [B+1], on any device.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    bounds = _check(logprobs, advantages, action_mask, cu_seqlens)
    run = torch.ops.megasao.response_sums if use_fused(logprobs.device) else response_sums_reference
    flat, others, mask = contiguous(logprobs.detach(), advantages, action_mask)
    nll, tokens, positive, negative = run(flat, others, mask, bounds).unbind()
    return RowSums(Responses(nll, tokens), positive, negative)


def response_totals(logprobs: Tensor, action_mask: Tensor, cu_seqlens: Tensor) -> Responses:
    """``response_sums(...).totals``, where there are no advantages."""
    return response_sums(logprobs, torch.zeros_like(logprobs), action_mask, cu_seqlens).totals


def response_loss(
    logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    weights: Tensor,
    alpha: float = 1.0,
    denominator: Tensor | float,
) -> tuple[Tensor, Stats]:
    """-sum of w A log p over action tokens, divided by the global denominator (naive, SPO, ASymPO: arXiv 2606.03070).

    Args:
        logprobs: [T], float32 or float64, with gradient.
        advantages: [T], same dtype; no gradient flows into them. ``alpha`` (>= 0) times A stands for A where A < 0.
        action_mask: bool [T].
        cu_seqlens: int32 [B+1], on any device.
        weights: float64 [B], on the device of ``logprobs``: w of each response, without gradient.
        denominator: number or 0-d tensor, the same on all ranks and micro-batches of a step; clamped at 1e-8.

    Returns:
        (loss, stats). loss: 0-d, dtype of ``logprobs``; stats: its parts ``positive_loss`` and ``negative_loss``, where
        A >= 0 and where A < 0; detached float64 0-d tensors. The sums are float64.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.
    """
    bounds = _check(logprobs, advantages, action_mask, cu_seqlens)
    check_flat("weights", weights, length=len(bounds) - 1, dtypes=(torch.float64,), device=logprobs.device)
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha: expected a finite number >= 0, got {alpha}")
    flat, others, mask = contiguous(logprobs, advantages, action_mask)
    row = flat, others, mask, bounds
    if use_fused(logprobs.device):
        weights = weights.detach().contiguous()
        loss, _, sides = torch.ops.megasao.response_loss(*row, weights, as_divisor(denominator, logprobs), alpha)
        return loss, dict(zip(SIDES, sides.unbind(), strict=True))
    divisor = clamped_denominator(denominator, logprobs)
    return response_loss_reference(*row, weights=weights.detach(), alpha=alpha, denominator=divisor)


def _check(logprobs: Tensor, advantages: Tensor, action_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``cu_seqlens`` on the device of the others, if all arguments are right."""
    tokens = check_same_floats(logprobs=logprobs, advantages=advantages)
    check_flat("action_mask", action_mask, length=tokens, dtypes=(torch.bool,), device=logprobs.device)
    check_cu_seqlens(cu_seqlens, tokens)
    return cu_seqlens.to(logprobs.device).contiguous()


def add_responses(left: Responses, right: Responses) -> Responses:
    """Totals of responses of which ``left`` and ``right`` each hold a part."""
    return Responses(left.nll + right.nll, left.tokens + right.tokens)
