"""A packed micro-batch: several sequences in one row, without padding."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """Sequences laid end to end. T tokens, B sequences.

    Attributes:
        tokens: int64 [T].
        position_ids: int64 [T], from 0 in each sequence.
        cu_seqlens: int32 [B + 1], from 0 to T.
        max_seqlen: length of the longest sequence.
        temperature: float32 [T], > 0: that of the law which each token was sampled from.
        routed_experts: int64 [T, M, K], the experts that an engine sent each token to in each of M layers; or None.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    temperature: Tensor
    routed_experts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.numel() == 0:
            raise ValueError("a row holds at least one token; use Row.dummy() on a rank that has no sequences")
        if self.tokens.shape != self.position_ids.shape or self.tokens.shape != self.temperature.shape:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)}, position_ids {tuple(self.position_ids.shape)} and temperature "
                f"{tuple(self.temperature.shape)} must have one and the same shape [T]"
            )

    @classmethod
    def from_sequences(cls, sequences: list[list[int]], temperatures: list[float]) -> "Row":
        """A row of whole sequences (none empty), one temperature for each."""
        lengths = [len(sequence) for sequence in sequences]
        return cls(
            tokens=torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64),
            position_ids=torch.cat([torch.arange(length) for length in lengths]),
            cu_seqlens=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            max_seqlen=max(lengths),
            temperature=torch.repeat_interleave(torch.tensor(temperatures), torch.tensor(lengths)),
        )

    @classmethod
    def dummy(cls) -> "Row":
        """One token of one sequence: lets a rank without data enter every collective."""
        return cls.from_sequences([[0]], [1.0])
