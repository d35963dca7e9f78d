"""Numbers of whole responses inside packed rows: token counts and negative log-likelihoods.

Invariants that the tests assert:
- they are sums: those of a response that is split over rows or ranks add up to those of the whole;
- whatever stands at a masked position (NaN, inf) changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasao.ops.checks import check_cu_seqlens


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


@torch.no_grad()
def response_totals(logprobs: Tensor, action_mask: Tensor, cu_seqlens: Tensor) -> Responses:
    """Totals of the sequences of one row.

    Args:
        logprobs: float [T], log-probability of each token.
        action_mask: bool [T].
        cu_seqlens: int32 [B+1], on the device of ``logprobs``.

    Raises:
        ValueError: ``cu_seqlens`` is not as above.
    """
    sequence = sequence_of_tokens(cu_seqlens, logprobs.numel())
    nll = torch.where(action_mask, -logprobs.detach().double(), 0.0)
    zero = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.float64, device=logprobs.device)
    return Responses(zero.index_add(0, sequence, nll), zero.index_add(0, sequence, action_mask.double()))


def add_responses(left: Responses, right: Responses) -> Responses:
    """Totals of responses of which ``left`` and ``right`` each hold a part."""
    return Responses(left.nll + right.nll, left.tokens + right.tokens)
