"""DIS: direct double-sided importance sampling (SAO, arXiv 2607.07508, section on DIS).

    r = exp(log p - log p_rollout);  f(r) = r where 1 - eps_low < r < 1 + eps_high (strict), else 0
    loss = -sum over action tokens of f(r) * A * log p, divided by the global denominator; f(r) carries no gradient

Invariants that the tests assert:
- the gradient is that of -sum f(r) * A / denominator (the loss VALUE is another one: never compare values);
- a token outside the band contributes exactly 0 loss and exactly 0 gradient; the edges are outside;
- the band is decided in log space and only accepted ratios are exponentiated: finite for log-ratios of +-1e4 and -inf;
- whatever stands at a masked position (NaN, inf) changes nothing;
- loss and gradient are sums: any split into micro-batches with the same denominator adds up to the whole;
- no action token at all: loss 0, gradient 0, also when the denominator is 0.
"""

import math

import torch
from torch import Tensor

from megasao.ops.backend import use_fused
from megasao.ops.checks import as_divisor, check_band, check_flat, check_same_floats, clamped_denominator, contiguous
from megasao.ops.reference import DIS_STATS, LOG_RATIO_CLAMP, Stats, dis_band, dis_loss_reference


def dis_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    denominator: Tensor | float,
) -> tuple[Tensor, Stats]:
    """The DIS loss of packed tokens (to be minimised) and the sums behind its statistics.

    Args:
        logprobs: [T], float32 or float64, with gradient: log-probability of each token under the current policy.
        rollout_logprobs: [T], same dtype; the ones that the rollout engine recorded.
        advantages: [T], same dtype; no gradient flows into them.
        action_mask: bool [T].
        eps_low, eps_high: the band of the ratio is (1 - eps_low, 1 + eps_high); 0 < eps_low < 1, eps_high > 0.
        denominator: number or 0-d tensor, the same on all ranks and micro-batches of a step; clamped at 1e-8.

    Returns:
        (loss, stats). loss: 0-d, dtype of ``logprobs``. stats: detached float64 0-d tensors over the action tokens:
        ``tokens``, ``invalid`` (log-ratio NaN: outside the band, and no part of the sums below), ``masked_low``,
        ``masked_high``, ``ratio_sum``, ``ratio_square_sum``, ``log_ratio_abs_sum``, ``kl_k3_sum``, ``ratio_max``; and
        ``positive_loss``, ``negative_loss``: the parts of the loss where A >= 0 and where A < 0.
        Add them over micro-batches and ranks (``ratio_max``: take the maximum), then ``summarize``.
        For these statistics only, log-ratios are clamped to +-20.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.
    """
    tokens = check_same_floats(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages)
    check_flat("action_mask", action_mask, length=tokens, dtypes=(torch.bool,), device=logprobs.device)
    check_band(eps_low, eps_high)
    lower, upper = math.log(1 - eps_low), math.log(1 + eps_high)
    if -lower <= LOG_RATIO_CLAMP and upper <= LOG_RATIO_CLAMP and use_fused(logprobs.device):
        row = contiguous(logprobs, rollout_logprobs, advantages, action_mask)
        loss, _, sums = torch.ops.megasao.dis(*row, as_divisor(denominator, logprobs), lower, upper)
        return loss, {name: value for name, value in zip(DIS_STATS, sums.unbind(), strict=True) if name}
    return dis_loss_reference(
        logprobs,
        rollout_logprobs,
        advantages,
        action_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        denominator=clamped_denominator(denominator, logprobs),
    )


@torch.no_grad()
def count_accepted(
    logprobs: Tensor, rollout_logprobs: Tensor, action_mask: Tensor, *, eps_low: float, eps_high: float
) -> Tensor:
    """The number of action tokens inside the band, int64 0-d: a rank's part of the ``accepted_tokens`` denominator."""
    return accepted_tokens(logprobs, rollout_logprobs, action_mask, eps_low=eps_low, eps_high=eps_high).sum()


@torch.no_grad()
def accepted_tokens(
    logprobs: Tensor, rollout_logprobs: Tensor, action_mask: Tensor, *, eps_low: float, eps_high: float
) -> Tensor:
    """bool [T]: the action tokens inside the band. Arguments and errors as in ``dis_loss``."""
    tokens = check_same_floats(logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    check_flat("action_mask", action_mask, length=tokens, dtypes=(torch.bool,), device=logprobs.device)
    check_band(eps_low, eps_high)
    return dis_band(logprobs, rollout_logprobs, action_mask, eps_low=eps_low, eps_high=eps_high)[1]


def summarize(stats: Stats) -> dict[str, float | None]:
    """Statistics of all action tokens from the (added) sums of ``dis_loss``, ``ppo_clip_loss`` or ``ratio_stats``.

    None where there is no token.

    ``masked_low``, ``masked_high``, ``invalid``, ``clipped_*`` are shares of the action tokens; ``ratio_mean``,
    ``ratio_max``, ``log_ratio_abs_mean``; ``kl_k3`` = mean(r - 1 - log r) in nats estimates KL(rollout || policy);
    ``ess`` = (sum r)^2 / (sum r^2) / n in (0, 1].
    """
    sums = {name: float(value) for name, value in stats.items()}
    tokens, valid = sums["tokens"], sums["tokens"] - sums["invalid"]
    summary: dict[str, float | None] = {"tokens": tokens}
    for name in ("masked_low", "masked_high", "invalid", "clipped_low", "clipped_high", "clipped_dual"):
        if name in sums:
            summary[name] = sums[name] / tokens if tokens else None
    for name in ("ratio", "log_ratio_abs"):
        summary[f"{name}_mean"] = sums[f"{name}_sum"] / valid if valid else None
    summary["ratio_max"] = sums["ratio_max"] if valid else None
    summary["kl_k3"] = sums["kl_k3_sum"] / valid if valid else None
    summary["ess"] = sums["ratio_sum"] ** 2 / sums["ratio_square_sum"] / valid if valid else None
    return summary
