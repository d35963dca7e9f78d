"""Attention over a KV cache in slots, plugged into the transformers model as an attention implementation.

All tokens of a step, of whatever request, pass through the model as one flat sequence [1, N] (so no padding reaches a
linear layer or an expert). Only attention sees the requests: it writes the new keys and values into their slots, then
attends within each slot. Rows with one new token (decoding) come first, and go together without padding; the others
(prefill) are padded to the longest of them.

Invariants, asserted by the tests:
- logits equal the model's own forward on each sequence alone, to fp32 rounding;
- a token attends to positions 0..its own of its own slot and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

ATTENTION_NAME = "megasao_slots"


@dataclass(frozen=True)
class StepRow:
    """New tokens of one request: ``tokens`` go to positions ``start``.. of ``slot``, which holds 0..start-1."""

    slot: int
    start: int
    tokens: Sequence[int]


class SlotCache:
    """What layers keep of every token: per layer and kind [slots, max_tokens, ...], allocated when first written."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        self.slots, self.max_tokens = slots, max_tokens
        self._kept: dict[tuple[int, str], torch.Tensor] = {}

    def write(self, layer: int, kind: str, new: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Put ``new`` [N, ...] at ``places`` [N], counted over all slots; everything that is kept of this kind.

        ValueError if there is no memory for it."""
        kept = self._kept.get((layer, kind))
        if kept is None:
            kept = self._kept[layer, kind] = self._room(new)
        kept.view(-1, *new.shape[1:]).index_copy_(0, places, new)
        return kept

    def _room(self, new: torch.Tensor) -> torch.Tensor:
        try:
            return new.new_zeros(self.slots, self.max_tokens, *new.shape[1:])
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"rollout.embedded.slots: what attention keeps of {self.slots} requests with up to {self.max_tokens} "
                "tokens each does not fit into memory; use fewer slots, or fewer tokens"
            ) from error

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot. Needed after non-finite values only: weight 0 times NaN would leak out of a masked position."""
        for kept in self._kept.values():
            kept[slot].zero_()


@dataclass(frozen=True)
class Seen:
    """Which keys each query sees, bool [rows, 1, queries, keys]; None where the step has no such rows."""

    decoding: torch.Tensor | None
    prefill: torch.Tensor | None


class StepBatch:
    """Index tensors of one step. Single-token rows must come before the others."""

    def __init__(self, rows: Sequence[StepRow], cache: SlotCache) -> None:
        self.cache = cache
        lengths = [len(row.tokens) for row in rows]
        self.decoding = sum(length == 1 for length in lengths)
        assert all(length == 1 for length in lengths[: self.decoding])
        positions = [row.start + offset for row in rows for offset in range(len(row.tokens))]
        self.input_ids = torch.tensor([[token for row in rows for token in row.tokens]])
        self.position_ids = torch.tensor([positions])
        row_slots = torch.tensor([row.slot for row in rows])
        self.places = row_slots.repeat_interleave(torch.tensor(lengths)) * cache.max_tokens + self.position_ids[0]
        self.last = torch.tensor(lengths).cumsum(0) - 1
        self._slots = row_slots
        decoding = self._plan_decoding(rows[: self.decoding]) if self.decoding else None
        prefill = self._plan_prefill(rows[self.decoding :]) if self.decoding < len(rows) else None
        self.earlier = Seen(decoding, prefill)

    def _plan_decoding(self, rows: Sequence[StepRow]) -> torch.Tensor:
        starts = [row.start for row in rows]
        return torch.arange(max(starts) + 1) <= torch.tensor(starts).view(-1, 1, 1, 1)

    def _plan_prefill(self, rows: Sequence[StepRow]) -> torch.Tensor:
        lengths = torch.tensor([len(row.tokens) for row in rows])
        starts = torch.tensor([row.start for row in rows])
        offsets = torch.arange(int(lengths.max()))
        self._valid = offsets < lengths.unsqueeze(1)
        first = lengths.cumsum(0) - lengths + self.decoding
        self._padded = torch.where(self._valid, first.unsqueeze(1) + offsets, 0)
        positions = torch.where(self._valid, starts.unsqueeze(1) + offsets, 0)
        return torch.arange(int((starts + lengths).max())) <= positions[:, None, :, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store new keys and values, then attend. ``query`` [N, heads, d], ``key`` and ``value`` [N, kv_heads, d]."""
        keys = self.cache.write(layer, "key", key, self.places)
        values = self.cache.write(layer, "value", value, self.places)
        return self.attend_to(query, keys, values, scale, self.earlier)

    def attend_to(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, seen: Seen
    ) -> torch.Tensor:
        """``query`` [N, heads, d] on kept ``keys`` and ``values`` [slots, max_tokens, kv_heads, d] -> [N, heads, d]."""
        parts = []
        if seen.decoding is not None:
            parts.append(self._decode(query[: self.decoding], keys, values, scale, seen.decoding))
        if seen.prefill is not None:
            parts.append(self._prefill(query, keys, values, scale, seen.prefill))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def of_decoding(self, kept: torch.Tensor) -> torch.Tensor:
        """What is kept of the decoding rows' slots: [rows, keys, ...]."""
        assert self.earlier.decoding is not None
        return kept[:, : self.earlier.decoding.shape[-1]].index_select(0, self._slots[: self.decoding])

    def of_prefill(self, kept: torch.Tensor) -> torch.Tensor:
        """The same of the other rows' slots."""
        assert self.earlier.prefill is not None
        return kept[:, : self.earlier.prefill.shape[-1]].index_select(0, self._slots[self.decoding :])

    def padded(self, new: torch.Tensor) -> torch.Tensor:
        """The prefill rows of ``new`` [N, ...], padded to the longest: [rows, longest, ...]."""
        return new[self._padded]

    def _decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, seen: torch.Tensor
    ) -> torch.Tensor:
        rows, heads, width = query.shape
        key, value = (self.of_decoding(kept).transpose(1, 2) for kept in (keys, values))
        grouped = query.reshape(rows, keys.shape[2], -1, width)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=seen, scale=scale)
        return output.reshape(rows, heads, -1)

    def _prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, seen: torch.Tensor
    ) -> torch.Tensor:
        heads, width = query.shape[1:]
        rows, longest = self._padded.shape
        kv_heads = keys.shape[2]
        key, value = (self.of_prefill(kept).transpose(1, 2) for kept in (keys, values))
        padded = self.padded(query).view(rows, longest, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        group = padded.shape[2]
        output = F.scaled_dot_product_attention(
            padded.reshape(rows, kv_heads, group * longest, width),
            key,
            value,
            attn_mask=seen.repeat(1, 1, group, 1),
            scale=scale,
        )
        output = output.view(rows, kv_heads, group, longest, -1).permute(0, 3, 1, 2, 4)
        return output.reshape(rows, longest, heads, -1)[self._valid]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    step_batch: StepBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The transformers attention interface: [1, heads, N, d] in, [1, N, heads, d] out."""
    assert step_batch is not None, "this attention runs inside the embedded engine only"
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = step_batch.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return output.unsqueeze(0), None


def register() -> None:
    """Make ``ATTENTION_NAME`` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
