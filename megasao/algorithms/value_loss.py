"""The critic's loss E[(V - R)^2] (SAO, arXiv 2607.07508) and its explained variance.

Invariants that the tests assert: only action tokens count, whatever stands at masked positions; loss and statistics
are sums, so any split into micro-batches with the same denominator adds up to the whole; nothing to train on gives
loss 0 and gradient 0.
"""

import torch
from torch import Tensor

from megasao.ops.checks import check_flat, check_same_floats, clamped_denominator
from megasao.ops.reference import Stats

MIN_RETURN_VARIANCE = 1e-4
"""Below this variance of the returns, explained variance says nothing and is None."""


def value_loss(
    values: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    *,
    denominator: Tensor | float,
    clip: tuple[Tensor, float] | None = None,
) -> tuple[Tensor, Stats]:
    """sum over action tokens of (V - R)^2 / denominator (no factor 1/2), and the sums behind the statistics.

    With ``clip`` = (V_old, c) the squared error is max((V - R)^2, (V_old + clamp(V - V_old, -c, c) - R)^2): a value
    that has moved further than c gains nothing from moving on (PPO's value clipping). The statistics are unclipped.

    Args:
        values: [T], float32 or float64, with gradient.
        returns: [T], same dtype; no gradient flows into them.
        action_mask: bool [T].
        denominator: number or 0-d tensor, the same on all ranks and micro-batches of a step; clamped at 1e-8.
        clip: values [T] of the same dtype, from before the step's updates, and the largest profitable move, > 0.

    Returns:
        (loss, stats). stats: detached float64 0-d sums ``tokens``, ``value_sum``, ``return_sum``,
        ``return_square_sum``, ``error_sum`` and ``error_square_sum`` of R - V.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.
    """
    tokens = check_same_floats(values=values, returns=returns)
    check_flat("action_mask", action_mask, length=tokens, dtypes=(torch.bool,), device=values.device)
    value = torch.where(action_mask, values, 0.0)
    target = torch.where(action_mask, returns.detach(), 0.0)
    errors = (value - target).square()
    if clip is not None:
        errors = torch.maximum(errors, _clipped_errors(value, target, action_mask, *clip))
    loss = errors.sum() / clamped_denominator(denominator, values)
    return loss, _sums(value.detach().double(), target.double(), action_mask)


def _clipped_errors(value: Tensor, target: Tensor, action_mask: Tensor, old_values: Tensor, limit: float) -> Tensor:
    check_flat("clip", old_values, length=value.numel(), dtypes=(value.dtype,), device=value.device)
    if not 0 < limit < float("inf"):
        raise ValueError(f"clip: expected a finite number > 0, got {limit}")
    old = torch.where(action_mask, old_values.detach(), 0.0)
    return (old + (value - old).clamp(-limit, limit) - target).square()


def _sums(value: Tensor, target: Tensor, action_mask: Tensor) -> Stats:
    error = target - value
    return {
        "tokens": action_mask.sum(dtype=torch.float64),
        "value_sum": value.sum(),
        "return_sum": target.sum(),
        "return_square_sum": target.square().sum(),
        "error_sum": error.sum(),
        "error_square_sum": error.square().sum(),
    }


def summarize(stats: Stats) -> dict[str, float | None]:
    """``value_mean``, ``return_mean``, ``mean_square_error`` and ``explained_variance`` of the (added) sums.

    explained_variance = 1 - Var(R - V) / Var(R) over all action tokens: 1 is perfect, 0 is no better than a constant.
    None where there is no token; explained_variance also where Var(R) < 1e-4.
    """
    sums = {name: float(value) for name, value in stats.items()}
    tokens = sums["tokens"]
    if not tokens:
        return {"value_mean": None, "return_mean": None, "mean_square_error": None, "explained_variance": None}
    return_variance = sums["return_square_sum"] / tokens - (sums["return_sum"] / tokens) ** 2
    error_variance = sums["error_square_sum"] / tokens - (sums["error_sum"] / tokens) ** 2
    return {
        "value_mean": sums["value_sum"] / tokens,
        "return_mean": sums["return_sum"] / tokens,
        "mean_square_error": sums["error_square_sum"] / tokens,
        "explained_variance": None if return_variance < MIN_RETURN_VARIANCE else 1 - error_variance / return_variance,
    }
