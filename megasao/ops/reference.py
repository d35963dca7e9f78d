"""Plain-torch references of the ops. They stay for good: fused kernels are compared with them.

Arguments are trusted here; the functions of ``megasao.ops`` check them first.
"""

import math
from typing import Any

import torch
from torch import Tensor, distributed

LOG_RATIO_CLAMP = 20.0
"""Log-ratios are clamped to +-20 in the statistics (never in the loss), so that they stay finite."""

Stats = dict[str, Tensor]
"""Detached float64 0-d tensors. Keys that end in ``_max`` combine by maximum, all others by sum."""


_RATIO = ("ratio_sum", "ratio_square_sum", "log_ratio_abs_sum", "kl_k3_sum", "ratio_max")
SIDES = ("positive_loss", "negative_loss")
DIS_STATS = ("tokens", "invalid", "masked_low", "masked_high", "", *_RATIO, *SIDES)
"""Statistics of ``dis_loss`` in the order of the compiled operator; the nameless one has no meaning for DIS."""
PPO_STATS = ("tokens", "invalid", "clipped_low", "clipped_high", "clipped_dual", *_RATIO, *SIDES)


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
    log_ratio, accepted, low, high = dis_band(
        logprobs, rollout_logprobs, action_mask, eps_low=eps_low, eps_high=eps_high
    )
    ratio = torch.exp(torch.where(accepted, log_ratio, 0.0))
    weight = ratio * torch.where(accepted, advantages.detach(), 0.0)
    losses = -(weight * torch.where(accepted, logprobs, 0.0))
    loss, sides = add_up(losses, advantages, denominator)
    masked = {"masked_low": low.sum(dtype=torch.float64), "masked_high": high.sum(dtype=torch.float64)}
    return loss, {**ratio_stats(log_ratio, action_mask), **masked, **sides}


def ppo_clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """bool [T] each: the action tokens clipped below, above, and by the dual clip. A NaN ratio is in none."""
    below, above = action_mask & (advantages < 0), action_mask & (advantages > 0)
    low = below & (log_ratio < math.log(1 - eps_low))
    high = above & (log_ratio > math.log(1 + eps_high))
    dual = below & (log_ratio > (math.inf if dual_clip is None else math.log(dual_clip)))
    return low, high, dual


def ppo_clip_loss_reference(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
    denominator: Tensor | float,
) -> tuple[Tensor, Stats]:
    """-sum(min(r A, clip(r) A)) / denominator, with the dual clip where A < 0, and the sums behind its statistics."""
    log_ratio = torch.where(action_mask, logprobs - rollout_logprobs.detach(), 0.0)
    fixed, weight = log_ratio.detach(), torch.where(action_mask, advantages.detach(), 0.0)
    low, high, dual = ppo_clipped(fixed, weight, action_mask, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip)
    invalid = torch.isnan(fixed)
    free = ~(low | high | dual | invalid)
    ratio = torch.where(free, log_ratio, 0.0).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    for clipped, bound in ((low, 1 - eps_low), (high, 1 + eps_high), (dual, dual_clip or 0.0)):
        ratio = torch.where(clipped, bound, ratio)
    loss, sides = add_up(torch.where(invalid, 0.0, -ratio * weight), weight, denominator)
    flags = {"clipped_low": low, "clipped_high": high, "clipped_dual": dual}
    shares = {name: flag.sum(dtype=torch.float64) for name, flag in flags.items()}
    return loss, {**ratio_stats(fixed, action_mask), **shares, **sides}


def add_up(losses: Tensor, advantages: Tensor, denominator: Tensor | float) -> tuple[Tensor, Stats]:
    """The loss, 0-d, from those of single tokens [T], and its parts where the advantage is negative and where not."""
    below = advantages < 0
    negative, positive = (
        torch.where(chosen, losses, 0.0).sum(dtype=torch.float64) / denominator for chosen in (below, ~below)
    )
    sides = {"positive_loss": positive.detach(), "negative_loss": negative.detach()}
    return (positive + negative).to(losses.dtype), sides


@torch.no_grad()
def response_sums_reference(logprobs: Tensor, advantages: Tensor, action_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """float64 [4, B]: of each response's action tokens the sum of -log p, their number, those with A > 0 and < 0."""
    lengths = cu_seqlens.long().diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    rows = (
        torch.where(action_mask, -logprobs.detach().double(), 0.0),
        action_mask.double(),
        (action_mask & (advantages > 0)).double(),
        (action_mask & (advantages < 0)).double(),
    )
    sums = torch.zeros(len(rows), len(lengths), dtype=torch.float64, device=logprobs.device)
    return sums.index_add_(1, sequence, torch.stack(rows))


def response_loss_reference(
    logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    weights: Tensor,
    alpha: float,
    denominator: Tensor | float,
) -> tuple[Tensor, Stats]:
    """-sum(weight of the response * A * log p) / denominator, with alpha * A where A < 0; its parts by A's sign."""
    weight = torch.where(action_mask, advantages.detach(), 0.0).double()
    scaled = torch.where(weight < 0, alpha * weight, weight)
    scaled = scaled * torch.repeat_interleave(weights, cu_seqlens.long().diff())
    losses = -torch.where(action_mask, logprobs, 0.0).double() * scaled
    loss, sides = add_up(losses, weight, denominator)
    return loss.to(logprobs.dtype), sides


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


def logprobs_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    scale: Tensor,
    entropy: bool,
    group: distributed.ProcessGroup | None,
    vocabulary: int,
) -> tuple[Tensor, Tensor | None]:
    """(log-probability of each target, entropy or None) from the logits of all tokens, [T, V / ranks]."""
    ranks = 1 if group is None else distributed.get_world_size(group)
    start = len(weight) * distributed.get_rank(group) if ranks > 1 else 0
    logits = (_ToRanks.apply(hidden, group) @ weight.T).to(scale.dtype) * scale[:, None]
    ids = torch.arange(start, start + len(weight), device=logits.device)
    logits = torch.where(ids < vocabulary, logits, -1e30)  # rows after that are filling
    largest = logits.detach().amax(dim=-1)
    if ranks > 1:
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
    law = (logits - largest[:, None]).exp()
    total = _OverRanks.apply(law.sum(dim=-1), group)
    normaliser = largest + total.log()
    local = targets - start
    mine = (local >= 0) & (local < len(weight))
    picked = logits.gather(1, torch.where(mine, local, 0)[:, None]).squeeze(1)
    logprobs = _OverRanks.apply(torch.where(mine, picked, 0.0), group) - normaliser
    if not entropy:
        return logprobs, None
    return logprobs, normaliser - _OverRanks.apply((law * logits).sum(dim=-1), group) / total


class _ToRanks(torch.autograd.Function):
    """The same on every rank; the gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(gradients[0], ctx.group), None


class _OverRanks(torch.autograd.Function):
    """The sum over ranks; each rank's part gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
        return _sum_over_ranks(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _sum_over_ranks(tensor: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    if group is not None and distributed.get_world_size(group) > 1:
        distributed.all_reduce(total, group=group)
    return total
