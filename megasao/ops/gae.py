"""Skip-observation generalised advantage estimation (SAO, arXiv 2607.07508, section on skip-observation GAE).

Invariants that the tests assert:
- observation tokens (mask False) get advantage 0 and return 0, and inserting any number of them anywhere, with any
  values, changes nothing on action tokens (the compiled operator: nothing but rounding);
- a reward on an observation token is credited to the last action token before it in the same sequence. Before the
  first action of a sequence there is no action to credit: such a reward is ignored. So is a reward on an observation
  token that is not finite;
- values at observation tokens are never read (NaN there is inert);
- nothing crosses a sequence boundary, not even a NaN at an action token;
- with gamma = lambda = 1 the advantage of an action token is the sum of rewards from it on, minus its value.
"""

import torch
from torch import Tensor

from megasao.ops.backend import configured, use_fused
from megasao.ops.checks import FLOATS, check_cu_seqlens, check_finite_actions, check_flat, check_same_floats
from megasao.ops.reference import gae_reference


def gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of packed sequences, over action tokens only.

    Args:
        rewards: [T], float32 or float64; the reward that arrived when the token had been seen.
        values: [T], the dtype of ``rewards``; V before the token. Read at action tokens only.
        action_mask: bool [T]; True where the policy chose the token.
        cu_seqlens: int32 [B+1]; sequence b holds tokens cu_seqlens[b] to cu_seqlens[b+1] - 1.
        gamma: discount per action token, in [0, 1].
        lam: lambda in [0, 1]; a number, or a float tensor [B], one per sequence (float64 on any device is best:
            1 - 1/(1.5 l) is 1.0 in bfloat16 for l > 341).
        bootstrap: float [B], the value of the state after each sequence's end (for sequences that were cut), or None
            for 0.

    Returns:
        (advantages, returns), both [T] of the dtype of ``values``, without gradient. ``returns`` are those of the
        same lambda, advantage + value (TD(lambda)); call again with lam=1 for the critic's Monte-Carlo target.
        The arithmetic is float64.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; with ``ops.check``, also NaN at an action token.
    """
    tokens = check_same_floats(rewards=rewards, values=values)
    check_flat("action_mask", action_mask, length=tokens, dtypes=(torch.bool,), device=values.device)
    sequences = check_cu_seqlens(cu_seqlens, tokens)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma: expected a number in [0, 1], got {gamma}")
    if configured().check:
        check_finite_actions(action_mask, rewards=rewards, values=values)
    run = _gae_fused if use_fused(values.device) else gae_reference
    return run(
        rewards,
        values,
        action_mask,
        cu_seqlens,
        gamma=float(gamma),
        lam=_lambda_per_sequence(lam, sequences, values.device),
        bootstrap=_bootstrap_per_sequence(bootstrap, sequences, values.device),
    )


@torch.no_grad()
def _gae_fused(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: Tensor,
    bootstrap: Tensor,
) -> tuple[Tensor, Tensor]:
    """The arguments of ``gae_reference``, by the compiled operator."""
    flat = [tensor.contiguous() for tensor in (rewards, values, action_mask, cu_seqlens.to(values.device))]
    advantages, returns = torch.ops.megasao.gae(*flat, lam.contiguous(), bootstrap.contiguous(), gamma)
    return advantages, returns


def _lambda_per_sequence(lam: float | Tensor, sequences: int, device: torch.device) -> Tensor:
    """float64 [B] on ``device``."""
    if not isinstance(lam, Tensor):
        if not 0 <= lam <= 1:
            raise ValueError(f"lam: expected a number in [0, 1], got {lam}")
        return torch.full((sequences,), float(lam), dtype=torch.float64, device=device)
    check_flat("lam", lam, length=sequences, dtypes=FLOATS, device=lam.device)
    if not bool(((lam >= 0) & (lam <= 1)).all()):
        raise ValueError(f"lam: expected every element in [0, 1], got {lam.tolist()}")
    return lam.detach().to(device=device, dtype=torch.float64)


def _bootstrap_per_sequence(bootstrap: Tensor | None, sequences: int, device: torch.device) -> Tensor:
    """float64 [B] on ``device``."""
    if bootstrap is None:
        return torch.zeros(sequences, dtype=torch.float64, device=device)
    check_flat("bootstrap", bootstrap, length=sequences, dtypes=FLOATS, device=device)
    return bootstrap.detach().double()
