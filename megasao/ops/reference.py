"""Plain-torch references of the ops. They stay for good: fused kernels are compared with them.

Arguments are trusted here; ``megasao.ops.gae`` and ``megasao.ops.dis_loss`` check them first.
"""

import math

import torch
from torch import Tensor

LOG_RATIO_CLAMP = 20.0
"""Log-ratios are clamped to +-20 in the statistics (never in the loss), so that they stay finite."""

Stats = dict[str, Tensor]
"""Detached float64 0-d tensors. Keys that end in ``_max`` combine by maximum, all others by sum."""


STATS = (
    "tokens",
    "invalid",
    "masked_low",
    "masked_high",
    "ratio_sum",
    "ratio_square_sum",
    "log_ratio_abs_sum",
    "kl_k3_sum",
    "ratio_max",
)
"""The statistics of ``dis_loss`` in the order of the compiled operator."""


@torch.no_grad()
def gae_reference(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: Tensor,
    bootstrap: Tensor,
) -> tuple[Tensor, Tensor]:
    """Skip-observation GAE of packed sequences; ``lam`` and ``bootstrap`` are float64 [B].

    Carried from right to left over the action tokens of every sequence at once:
    return = reward + carry; advantage = return - value;
    carry <- gamma * lambda * return + gamma * (1 - lambda) * value.
    This form keeps float64's accuracy over a million tokens, unlike sums of deltas.
    """
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    if not bool(action_mask.any()):
        return advantages, returns
    sequence, counts = _sequence_of_tokens(action_mask, cu_seqlens)
    first = counts.cumsum(0) - counts
    credit = _credit_per_action(rewards, action_mask, first[sequence])

    column = sequence[action_mask]
    longest = int(counts.max())
    # Right-aligned: every sequence ends in the last row, so the loop needs no mask and a NaN keeps to its column.
    row = torch.arange(len(column), device=column.device) + (longest - counts - first)[column]
    value = values[action_mask].double()
    rewards_grid, carry_grid = value.new_zeros(2, longest, len(counts)).unbind(0)
    rewards_grid[row, column] = credit
    carry_grid[row, column] = gamma * (1 - lam[column]) * value
    decay = gamma * lam

    returns_grid = torch.empty_like(rewards_grid)
    carry = gamma * bootstrap
    for reward_t, value_t, return_t in zip(
        reversed(rewards_grid.unbind(0)), reversed(carry_grid.unbind(0)), reversed(returns_grid.unbind(0)), strict=True
    ):
        torch.add(reward_t, carry, out=return_t)
        carry = torch.addcmul(value_t, decay, return_t)

    total = returns_grid[row, column]
    returns[action_mask] = total.to(values.dtype)
    advantages[action_mask] = (total - value).to(values.dtype)
    return advantages, returns


def _sequence_of_tokens(action_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence index of each token, int64 [T], and the action tokens of each sequence, int64 [B]."""
    lengths = cu_seqlens.to(action_mask.device).long().diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    counts = torch.zeros_like(lengths).index_add_(0, sequence, action_mask.long())
    return sequence, counts


def _credit_per_action(rewards: Tensor, action_mask: Tensor, first_action: Tensor) -> Tensor:
    """Rewards of the action tokens, each with those of the observations that follow it; float64 [action tokens].

    ``first_action`` [T] is the number, among all action tokens of the row, of the first one of the token's sequence.
    """
    action = action_mask.cumsum(0) - 1
    belongs = action >= first_action
    counted = belongs & (action_mask | torch.isfinite(rewards))
    credited = torch.where(counted, rewards.double(), 0.0)
    total = torch.zeros(int(action_mask.sum()), dtype=torch.float64, device=rewards.device)
    return total.index_add_(0, action.clamp_min(0), credited)


def dis_band(
    logprobs: Tensor, rollout_logprobs: Tensor, action_mask: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log_ratio, accepted, low, high): detached log-ratio [T] (0 where masked) and bool [T] of each side of the band.

    The edges are rounded to the dtype of the log-probabilities, and an edge itself is outside.
    """
    log_ratio = torch.where(action_mask, logprobs.detach() - rollout_logprobs.detach(), 0.0)
    lower = torch.tensor(math.log(1 - eps_low), dtype=log_ratio.dtype, device=log_ratio.device)
    upper = torch.tensor(math.log(1 + eps_high), dtype=log_ratio.dtype, device=log_ratio.device)
    low = action_mask & (log_ratio <= lower)
    high = action_mask & (log_ratio >= upper)
    accepted = action_mask & (log_ratio > lower) & (log_ratio < upper)
    return log_ratio, accepted, low, high


def dis_token_losses(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> tuple[Tensor, Tensor, Stats]:
    """(-f(r) * A * log p of each token [T] with f(r) detached, bool [T] inside the band, sums of the statistics)."""
    log_ratio, accepted, low, high = dis_band(
        logprobs, rollout_logprobs, action_mask, eps_low=eps_low, eps_high=eps_high
    )
    ratio = torch.exp(torch.where(accepted, log_ratio, 0.0))
    weight = ratio * torch.where(accepted, advantages.detach(), 0.0)
    losses = -(weight * torch.where(accepted, logprobs, 0.0))
    masked = {"masked_low": low.sum(dtype=torch.float64), "masked_high": high.sum(dtype=torch.float64)}
    return losses, accepted, {**ratio_stats(log_ratio, action_mask), **masked}


def dis_loss_reference(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    denominator: Tensor | float,
) -> tuple[Tensor, Stats]:
    """-sum(f(r) * A * log p) / denominator with f(r) detached, and the sums behind its statistics."""
    losses, _, stats = dis_token_losses(
        logprobs, rollout_logprobs, advantages, action_mask, eps_low=eps_low, eps_high=eps_high
    )
    return losses.sum() / denominator, stats


def ratio_stats(log_ratio: Tensor, action_mask: Tensor) -> Stats:
    """Sums behind the statistics of the ratio policy / rollout policy, from detached log-ratios [T]."""
    invalid = action_mask & torch.isnan(log_ratio)
    valid = action_mask & ~invalid
    clamped = torch.where(valid, log_ratio.double(), 0.0).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = torch.where(valid, clamped.exp(), 0.0)
    k3 = torch.where(valid, torch.expm1(clamped) - clamped, 0.0)
    return {
        "tokens": action_mask.sum(dtype=torch.float64),
        "invalid": invalid.sum(dtype=torch.float64),
        "ratio_sum": ratio.sum(),
        "ratio_square_sum": ratio.square().sum(),
        "log_ratio_abs_sum": clamped.abs().sum(),
        "kl_k3_sum": k3.sum(),
        "ratio_max": torch.cat([ratio, ratio.new_zeros(1)]).max(),
    }
