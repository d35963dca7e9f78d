"""Advantages for the policy and targets for the critic from values (SAO, arXiv 2607.07508); without: ``baselines``.

Invariants that the tests assert: those of ``megasao.ops.gae``; the critic's target has its own lambda (1: Monte Carlo);
the length-adaptive lambda is float64 and counts action tokens only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasao.config.algorithm import Gae, SkipObservationGae
from megasao.ops import gae
from megasao.ops.response import sequence_of_tokens


@dataclass(frozen=True)
class Advantages:
    """``advantages`` [T] for the policy, ``returns`` [T] as the critic's target (0 at observation tokens), and the
    policy's ``lam``, float64 [B] on the host. The latter two are None where there is no critic."""

    advantages: Tensor
    returns: Tensor | None = None
    lam: Tensor | None = None


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


def first_actions_on(action_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """bool [T]: True from the first action token of each sequence to its end, observations included."""
    bounds = cu_seqlens.to(action_mask.device).long()
    running = torch.cat([bounds.new_zeros(1), action_mask.long().cumsum(0)])
    before = running[bounds[:-1]][sequence_of_tokens(cu_seqlens.to(action_mask.device), action_mask.numel())]
    return running[1:] > before


def estimate_from_values(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    options: SkipObservationGae | Gae,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """Policy advantages with ``options.policy_lambda`` and critic targets with ``options.value_lambda``.

    ``gae`` counts observation tokens as steps: it reads the values there, and lambda decays over them (SAO's ablation,
    arXiv 2607.07508). Both give 0 at observation tokens. Shapes, dtypes and errors as in ``megasao.ops.gae``.
    """
    if options.policy_lambda == "length_adaptive":
        lam = length_adaptive_lambda(action_counts(action_mask, cu_seqlens), options.alpha)
    else:
        lam = torch.full((cu_seqlens.numel() - 1,), options.policy_lambda, dtype=torch.float64)
    steps = action_mask if isinstance(options, SkipObservationGae) else first_actions_on(action_mask, cu_seqlens)
    row = (rewards, values, steps, cu_seqlens)
    advantages, _ = gae(*row, gamma=options.gamma, lam=lam, bootstrap=bootstrap)
    _, returns = gae(*row, gamma=options.gamma, lam=options.value_lambda, bootstrap=bootstrap)
    return Advantages(torch.where(action_mask, advantages, 0.0), torch.where(action_mask, returns, 0.0), lam)
