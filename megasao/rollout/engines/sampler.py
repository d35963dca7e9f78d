"""Sampling one token per row, with the exact log-probability of the law that was sampled.

Invariants, asserted by the tests:
- the log-probability is fp32 ``log_softmax(logits / T)`` at the chosen token (T = 1 for a greedy row);
- a token of probability zero is never chosen;
- the random number of a token depends on (seed, position) alone: not on the batch, the turn, or what ran before.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def derive_seed(*parts: object) -> int:
    """A 64-bit seed from ``parts``, equal on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` of the sequence that ``seed`` belongs to."""
    key = struct.pack("<QQ", seed % 2**64, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


@dataclass(frozen=True)
class SampleRow:
    """How one row is sampled. ``temperature`` 0 is greedy; ``uniform`` in [0, 1) picks the token otherwise."""

    temperature: float
    uniform: float


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
    """Choose one token per row.

    ``logits``: float [R, V]. Returns token ids and their log-probabilities, both of length R. A row whose logits are
    not finite gets a non-finite log-probability: the caller must refuse that token.
    """
    greedy = torch.tensor([row.temperature == 0 for row in rows])
    temperature = torch.tensor([row.temperature or 1.0 for row in rows], dtype=torch.float32)
    logprobs = torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)
    tokens = logprobs.argmax(-1)
    if not bool(greedy.all()):
        numbers = torch.tensor([row.uniform for row in rows], dtype=torch.float64)
        tokens = torch.where(greedy, tokens, _inverse_cdf(logprobs, numbers))
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens.tolist(), chosen.tolist()


def _inverse_cdf(logprobs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """First token whose cumulated probability exceeds ``number * total``; float64, so that tails of a large
    vocabulary keep their mass."""
    cumulated = logprobs.double().exp().cumsum(-1)
    total = cumulated[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(numbers * total, below_total)
    tokens = torch.searchsorted(cumulated, target.unsqueeze(-1), right=True).squeeze(-1)
    return tokens.clamp_(max=logprobs.shape[-1] - 1)
