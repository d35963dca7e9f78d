"""Penalty on the distance from a frozen reference policy, estimated token by token.

Invariants that the tests assert:
- value and gradient are those of the formula; where policy and reference agree, k2 and k3 have neither;
- masked positions count 0, whatever stands there; absurd differences stay finite.
"""

from typing import Literal

import torch
from torch import Tensor

from megasao.ops.checks import check_flat, check_same_floats
from megasao.ops.reference import LOG_RATIO_CLAMP


def kl_penalties(
    logprobs: Tensor, reference_logprobs: Tensor, action_mask: Tensor, kind: Literal["k1", "k2", "k3"]
) -> Tensor:
    """[T] estimates of KL(policy || reference) in nats at action tokens, 0 elsewhere, with gradient into ``logprobs``.

    With d = log p - log p_reference, clamped to +-20: k1 = d (as a loss its gradient is 0 in expectation: a measure
    rather than a force), k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    Args:
        logprobs: [T], float32 or float64, with gradient.
        reference_logprobs: [T], the same dtype.
        action_mask: bool [T].

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    tokens = check_same_floats(logprobs=logprobs, reference_logprobs=reference_logprobs)
    check_flat("action_mask", action_mask, length=tokens, dtypes=(torch.bool,), device=logprobs.device)
    difference = torch.where(action_mask, logprobs - reference_logprobs.detach(), 0.0)
    difference = difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
