"""PPO's clipped surrogate of single tokens, against the rollout policy (the objective of GRPO and VAPO).

    r = exp(log p - log p_rollout)
    loss = -sum over action tokens of min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), divided by the global denominator;
    with ``dual_clip`` = c, where A < 0 a token's loss is at most -c A

Invariants that the tests assert:
- the gradient is that of the formula, in float64; a clipped token has none;
- decided in log space: finite for log-ratios of +-1e4 and -inf. Beyond |log r| = 20 the ratio counts as constant, and a
  token with a NaN ratio has neither loss nor gradient;
- whatever stands at a masked position (NaN, inf) changes nothing;
- loss and gradient are sums: any split with the same denominator adds up to the whole.
"""

import math

import torch
from torch import Tensor

from megasao.ops.backend import use_fused
from megasao.ops.checks import as_divisor, check_band, check_flat, check_same_floats, clamped_denominator, contiguous
from megasao.ops.reference import PPO_STATS, Stats, ppo_clip_loss_reference, ppo_clipped


def ppo_clip_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    denominator: Tensor | float,
) -> tuple[Tensor, Stats]:
    """The clipped loss of packed tokens (to be minimised) and the sums behind its statistics.

    Args:
        logprobs: [T], float32 or float64, with gradient: log-probability of each token under the current policy.
        rollout_logprobs: [T], same dtype; the ones that the rollout engine recorded.
        advantages: [T], same dtype; no gradient flows into them.
        action_mask: bool [T].
        eps_low, eps_high: no gradient below 1 - eps_low where A < 0, none above 1 + eps_high where A > 0;
            0 < eps_low < 1, eps_high > 0.
        dual_clip: > 1, no gradient above this ratio where A < 0; None is off.
        denominator: number or 0-d tensor, the same on all ranks and micro-batches of a step; clamped at 1e-8.

    Returns:
        (loss, stats) as from ``megasao.ops.dis_loss``, with ``clipped_low``, ``clipped_high``, ``clipped_dual`` instead
        of ``masked_low`` and ``masked_high``.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.
    """
    _check(logprobs, rollout_logprobs, advantages, action_mask, eps_low, eps_high, dual_clip)
    if use_fused(logprobs.device):
        row = contiguous(logprobs, rollout_logprobs, advantages, action_mask)
        bounds = 1 - eps_low, 1 + eps_high, math.inf if dual_clip is None else dual_clip
        loss, _, sums = torch.ops.megasao.ppo_clip(*row, as_divisor(denominator, logprobs), *bounds)
        return loss, dict(zip(PPO_STATS, sums.unbind(), strict=True))
    return ppo_clip_loss_reference(
        logprobs,
        rollout_logprobs,
        advantages,
        action_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
        denominator=clamped_denominator(denominator, logprobs),
    )


@torch.no_grad()
def unclipped_tokens(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """bool [T]: the action tokens that may carry gradient. Arguments and errors as in ``ppo_clip_loss``."""
    _check(logprobs, rollout_logprobs, advantages, action_mask, eps_low, eps_high, dual_clip)
    log_ratio = logprobs - rollout_logprobs
    low, high, dual = ppo_clipped(
        log_ratio, advantages, action_mask, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
    return action_mask & ~(low | high | dual | torch.isnan(log_ratio))


def _check(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> None:
    tokens = check_same_floats(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages)
    check_flat("action_mask", action_mask, length=tokens, dtypes=(torch.bool,), device=logprobs.device)
    check_band(eps_low, eps_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip: expected a number > 1 or None, got {dual_clip}")
