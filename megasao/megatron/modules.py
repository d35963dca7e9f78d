"""Modules that Megatron-Core takes through its layer specification, and the value head.

Invariants (tests assert them):

- attention inside a packed row never crosses a sequence boundary; the row's result equals that of its sequences alone;
- no buffer of size [T, T] is made: sequences of similar lengths are padded to the longest of them, T = tokens;
- weights replicated over tensor-parallel ranks have complete gradients on each (norms are flagged, the head's
  input is gathered).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megasao.megatron.context import context_attention


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, usable under sequence parallelism (the stock one is not)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees a part of the sequence: Megatron sums the gradients of parameters flagged so.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise ``hidden`` [..., hidden_size]; same shape and dtype."""
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class _Pad(torch.autograd.Function):
    """[T, ...] -> [B * L, ...]. Padding slots repeat some token: nothing real ever attends to them."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slot_to_token: Tensor, token_to_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_to_slot)
        return tokens.index_select(0, slot_to_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (token_to_slot,) = ctx.saved_tensors
        return gradients[0].index_select(0, token_to_slot), None, None


class _Unpad(torch.autograd.Function):
    """[B * L, ...] -> [T, ...], the inverse of :class:`_Pad` on real slots; padding slots get gradient zero."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, token_to_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_to_slot)
        ctx.slots = slots.shape
        return slots.index_select(0, token_to_slot)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (token_to_slot,) = ctx.saved_tensors
        result = gradients[0].new_zeros(ctx.slots)
        return result.index_copy_(0, token_to_slot, gradients[0]), None


def padding_indices(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> tuple[Tensor, Tensor]:
    """``(slot_to_token [B * max_seqlen], token_to_slot [T])``, int64, for sequences that start at ``cu_seqlens``."""
    boundaries = cu_seqlens.long()
    starts, lengths = boundaries[:-1, None], (boundaries[1:] - boundaries[:-1])[:, None]
    offsets = torch.arange(max_seqlen, device=boundaries.device)[None, :]
    slot_to_token = (starts + offsets).clamp_(max=tokens - 1).flatten()
    token_to_slot = (offsets < lengths).flatten().nonzero().squeeze(1)
    return slot_to_token, token_to_slot


def by_length(cu_seqlens: Tensor) -> tuple[Tensor, list[list[int]]]:
    """The row's sequences from the longest to the shortest, and the lengths of each group of similar ones.

    Returns:
        int64 [T], the tokens in that order; and the groups, in each of which all have at least 2/3 of the longest.
    """
    bounds = cu_seqlens.tolist()
    sequences = sorted(pairwise(bounds), key=lambda bound: bound[0] - bound[1])
    groups: list[list[int]] = []
    for length in (end - start for start, end in sequences if end > start):
        if groups and 3 * length >= 2 * groups[-1][0]:
            groups[-1].append(length)
        else:
            groups.append([length])
    tokens = torch.cat([torch.arange(start, end, device=cu_seqlens.device) for start, end in sequences])
    return tokens, groups


@dataclass
class PackedRow(PackedSeqParams):
    """The sequences of one row, as every layer of the model gets them; one object for each pass over a row.

    Attributes:
        selected: what sparse attention's layers with an indexer selected in this pass, by layer from 0, for the layers
            that share it: int32 [T / CP, k], positions of keys in the query's own sequence, or None where every earlier
            key counts. It belongs to the row, not to the model: rows are under way together in a pipeline, and
            recomputation comes later.
        routed_experts: int64 [P / CP, M, K], the experts that this rank's tokens go to in each layer that has some;
            None: the routers choose.
    """

    selected: dict[int, Tensor | None] = field(default_factory=dict)
    routed_experts: Tensor | None = None


def side_by_side(compute: Callable[..., Tensor], cu_seqlens: Tensor, *tensors: Tensor) -> Tensor:
    """Sequences of similar lengths at a time, padded to the longest of them: ``compute`` of each group's part of the
    ``tensors``, [T, ...] each and [B, L, ...] there -> [B, L, ...]. Returns [T, ...] of all.
    """
    order, groups = by_length(cu_seqlens)
    sizes = [sum(lengths) for lengths in groups]
    split = zip(*(tensor.index_select(0, order).split(sizes) for tensor in tensors), strict=True)
    results = [_padded(compute, lengths, parts) for lengths, parts in zip(groups, split, strict=True)]
    return torch.cat(results).index_select(0, order.argsort())


def _padded(compute: Callable[..., Tensor], lengths: list[int], parts: tuple[Tensor, ...]) -> Tensor:
    """``compute`` of sequences of these ``lengths``, longest first, whose tokens are the ``parts``."""
    cu_seqlens = torch.tensor([0, *lengths], device=parts[0].device).cumsum(0)
    slot_to_token, token_to_slot = padding_indices(cu_seqlens, lengths[0], len(parts[0]))
    padded = (_Pad.apply(part, slot_to_token, token_to_slot).unflatten(0, (-1, lengths[0])) for part in parts)
    result: Tensor = _Unpad.apply(compute(*padded).flatten(0, 1), token_to_slot)
    return result


class PackedAttention(MegatronModule):
    """Causal core attention on packed (THD) rows with grouped queries, by ``scaled_dot_product_attention``."""

    def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, **ignored: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = ignored.get("softmax_scale") or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """``query`` [T, heads, d], ``key`` and ``value`` [T, groups, d] -> [T, heads * d]."""
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", "rows are always packed"
        assert attention_mask is None and attention_bias is None
        if self.config.context_parallel_size > 1:
            return context_attention(query, key, value, packed_seq_params.cu_seqlens_q, self.scale).flatten(1)
        return side_by_side(self._attend, packed_seq_params.cu_seqlens_q, query, key, value).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``query`` [B, L, heads, d], ``key`` and ``value`` [B, L, groups, d] -> [B, L, heads, d]."""
        result = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return result.transpose(1, 2)


class HiddenOutput(tensor_parallel.ColumnParallelLinear):
    """The language-model head, which hands on its input: log-probabilities are made from there, chunk by chunk.

    A drop-in for the class of Megatron's output layer (same parameters, names and checkpoints).
    """

    def forward(self, input_: Tensor, weight: Tensor | None = None, *ignored: Any, **also: Any) -> tuple[Tensor, None]:
        """``input_`` [T or T / TP, 1, hidden] -> [T, 1, hidden], on every tensor-parallel rank."""
        if self.sequence_parallel:
            # The gradient comes complete on each rank: split it, do not sum it.
            input_ = tensor_parallel.gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False)
        return input_, None


class ValueHead(MegatronModule):
    """hidden -> one value, in the output layer's place on the last stage; weight zero, so V starts at ``bias``."""

    def __init__(self, config: TransformerConfig, bias: float) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.full((1,), bias, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **ignored: Any) -> tuple[Tensor, None]:
        """``hidden`` [T or T / TP, 1, hidden] -> float32 values [T, 1, 1]. Called as Megatron calls an output layer."""
        if self.config.sequence_parallel:
            # The head is replicated, so the gradient of its input is complete on each rank: split it, do not sum it.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return functional.linear(hidden.float(), self.weight.float(), self.bias.float()), None
