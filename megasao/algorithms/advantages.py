"""Advantages for the policy and targets for the critic (SAO, arXiv 2607.07508).

Invariants that the tests assert: those of ``megasao.ops.gae``; the critic's target has its own lambda (1: Monte Carlo);
the length-adaptive lambda is float64 and counts action tokens only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasao.config.algorithm import SkipObservationGae
from megasao.ops import gae


@dataclass(frozen=True)
class Advantages:
    """``advantages`` [T] for the policy, ``returns`` [T] as the critic's target (0 at observation tokens), and the
    policy's ``lam``, float64 [B] on the host."""

    advantages: Tensor
    returns: Tensor
    lam: Tensor


def length_adaptive_lambda(action_counts: Tensor, alpha: float) -> Tensor:
    """lambda = 1 - 1/(alpha * l), float64 [B] on the host, for ``action_counts`` l, integer [B].

    float64 because bfloat16 rounds it to 1 for l > 341, and float32 powers lambda^l are off by 0.3 % at l = 128k.
    Whoever needs powers takes exp(n * log1p(-1 / (alpha * l))). A sequence without action tokens counts as l = 1.

    Raises:
        ValueError: alpha < 1 (lambda would be negative for l = 1), or counts that are negative or no integers.
    """
    if not 1 <= alpha < float("inf"):
        raise ValueError(f"alpha: expected a finite number >= 1, got {alpha}")
    if action_counts.is_floating_point() or action_counts.dim() != 1 or bool((action_counts < 0).any()):
        raise ValueError(
            f"action_counts: expected integers >= 0 of shape [B], got {action_counts.dtype} {action_counts.tolist()}"
        )
    lengths = action_counts.detach().cpu().double().clamp_min(1)
    return 1 - 1 / (alpha * lengths)


def action_counts(action_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Action tokens of each sequence, int64 [B] on the host."""
    bounds = cu_seqlens.cpu().long()
    running = torch.cat([torch.zeros(1, dtype=torch.int64), action_mask.cpu().long().cumsum(0)])
    return running[bounds].diff()


def skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    config: SkipObservationGae,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """Policy advantages with ``config.policy_lambda`` and critic targets with ``config.value_lambda``.

    Shapes, dtypes and errors as in ``megasao.ops.gae``.
    """
    sequences = cu_seqlens.numel() - 1
    if config.policy_lambda == "length_adaptive":
        lam = length_adaptive_lambda(action_counts(action_mask, cu_seqlens), config.alpha)
    else:
        lam = torch.full((sequences,), config.policy_lambda, dtype=torch.float64)
    advantages, _ = gae(rewards, values, action_mask, cu_seqlens, gamma=config.gamma, lam=lam, bootstrap=bootstrap)
    _, returns = gae(
        rewards, values, action_mask, cu_seqlens, gamma=config.gamma, lam=config.value_lambda, bootstrap=bootstrap
    )
    return Advantages(advantages, returns, lam)
