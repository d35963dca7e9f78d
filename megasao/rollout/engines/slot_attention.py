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
    """Keys and values: per layer [slots, max_tokens, kv_heads, head_dim], allocated when the layer is first used."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        self.slots, self.max_tokens = slots, max_tokens
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Storage of layer ``index`` for keys and values shaped like ``key``, ``value`` [N, kv_heads, head_dim].

        ValueError if there is no memory for it."""
        if index not in self._layers:
            shape = (self.slots, self.max_tokens)
            try:
                self._layers[index] = (key.new_zeros(*shape, *key.shape[1:]), value.new_zeros(*shape, *value.shape[1:]))
            except (RuntimeError, MemoryError) as error:
                raise ValueError(
                    f"rollout.embedded.slots: keys and values of {self.slots} requests with up to {self.max_tokens} "
                    "tokens each do not fit into memory; use fewer slots, or fewer tokens"
                ) from error
        return self._layers[index]

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot. Needed after non-finite values only: weight 0 times NaN would leak out of a masked position."""
        for key, value in self._layers.values():
            key[slot].zero_()
            value[slot].zero_()


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
        if self.decoding:
            starts = [row.start for row in rows[: self.decoding]]
            self._decode_length = max(starts) + 1
            self._decode_mask = torch.arange(self._decode_length) <= torch.tensor(starts).view(-1, 1, 1, 1)
        if self.decoding < len(rows):
            self._plan_prefill(rows[self.decoding :])

    def _plan_prefill(self, rows: Sequence[StepRow]) -> None:
        lengths = torch.tensor([len(row.tokens) for row in rows])
        starts = torch.tensor([row.start for row in rows])
        offsets = torch.arange(int(lengths.max()))
        self._valid = offsets < lengths.unsqueeze(1)
        first = lengths.cumsum(0) - lengths + self.decoding
        self._padded = torch.where(self._valid, first.unsqueeze(1) + offsets, 0)
        positions = torch.where(self._valid, starts.unsqueeze(1) + offsets, 0)
        self._prefill_length = int((starts + lengths).max())
        self._prefill_mask = torch.arange(self._prefill_length) <= positions[:, None, :, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store new keys and values, then attend. ``query`` [N, heads, d], ``key`` and ``value`` [N, kv_heads, d]."""
        keys, values = self.cache.layer(layer, key, value)
        keys.view(-1, *key.shape[1:]).index_copy_(0, self.places, key)
        values.view(-1, *value.shape[1:]).index_copy_(0, self.places, value)
        parts = []
        if self.decoding:
            parts.append(self._decode(query[: self.decoding], keys, values, scale))
        if self.decoding < len(self._slots):
            parts.append(self._prefill(query, keys, values, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        rows, heads, width = query.shape
        key = keys[:, : self._decode_length].index_select(0, self._slots[:rows]).transpose(1, 2)
        value = values[:, : self._decode_length].index_select(0, self._slots[:rows]).transpose(1, 2)
        grouped = query.reshape(rows, keys.shape[2], -1, width)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=self._decode_mask, scale=scale)
        return output.reshape(rows, heads, -1)

    def _prefill(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        heads, width = query.shape[1:]
        rows, longest = self._padded.shape
        kv_heads = keys.shape[2]
        slots = self._slots[self.decoding :]
        key = keys[:, : self._prefill_length].index_select(0, slots).transpose(1, 2)
        value = values[:, : self._prefill_length].index_select(0, slots).transpose(1, 2)
        padded = query[self._padded].view(rows, longest, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        group = padded.shape[2]
        mask = self._prefill_mask.repeat(1, 1, group, 1)
        output = F.scaled_dot_product_attention(
            padded.reshape(rows, kv_heads, group * longest, width), key, value, attn_mask=mask, scale=scale
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
