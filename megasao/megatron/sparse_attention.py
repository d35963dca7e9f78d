"""Multi-head latent attention on selected keys: an indexer scores all earlier keys, attention sees the best of them.

The selection of a layer with an indexer serves the layers after it that have none (DeepSeek-V3.2, arXiv 2512.02556;
sharing: arXiv 2603.12201). The indexer's scores decide only which keys count, so nothing flows back into it: its
weights do not train.

Invariants (tests assert them):

- log-probabilities equal those of transformers for packed rows under every layout; attention to all keys, or the
  rotation of halves for that of pairs in the indexer, does not;
- a row's result equals that of its sequences alone, and does not depend on the chunks that queries are cut into;
- where a row has no sequence longer than the number of selected keys, attention is plain causal attention;
- no [T, T] tensor outlives its chunk of queries: they are made again in the backward pass.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megasao.megatron.modules import PackedRow, to_sequences, to_tokens

QUERY_CHUNK = 1024
"""Queries of a sequence that attend at a time."""

SCORES_AT_A_TIME = 2**26
"""Scores of the indexer that exist at a time: 256 MiB."""


class DuplicatedLinear(torch.nn.Module):
    """A product without bias whose weight every tensor-parallel rank has whole; each sees its part of the sequence."""

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        config.init_method(self.weight)
        # Megatron sums the gradients of parameters flagged so.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> ([..., outputs], no bias): as Megatron's linear layers answer."""
        return functional.linear(inputs, self.weight), None


class Indexer(MegatronModule):
    """Selects, for each query, the keys with the largest sum over heads of weight * relu(query . key)."""

    def __init__(self, config: MLATransformerConfig) -> None:
        super().__init__(config=config)
        self.heads, self.width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.linear_wq_b = DuplicatedLinear(config.q_lora_rank, self.heads * self.width, config)
        self.linear_wk = DuplicatedLinear(config.hidden_size, self.width, config)
        self.k_norm = torch.nn.LayerNorm(self.width, eps=1e-6, dtype=config.params_dtype)
        self.linear_weights_proj = DuplicatedLinear(config.hidden_size, self.heads, config)

    @torch.no_grad()
    def forward(self, hidden: Tensor, query_latent: Tensor, row: PackedRow) -> Tensor | None:
        """Key positions in the query's own sequence, none after the query's, some perhaps repeated.

        Args:
            hidden: [T or T / TP, 1, hidden], the attention's input.
            query_latent: [T or T / TP, q_lora_rank], normalised.

        Returns:
            int32 [B, max_seqlen, k]; None if no sequence is longer than k, the number of keys to select.
        """
        if row.max_seqlen_q <= self.config.dsa_indexer_topk:
            return None
        if self.config.sequence_parallel:
            hidden, query_latent = (gather_from_sequence_parallel_region(each) for each in (hidden, query_latent))
        hidden = hidden.squeeze(1)
        queries = self.linear_wq_b(query_latent)[0].unflatten(-1, (self.heads, self.width))
        keys = self.k_norm(self.linear_wk(hidden)[0])
        weights = functional.linear(hidden.float(), self.linear_weights_proj.weight.float()) * self.heads**-0.5
        return self._select(
            self._rotated(to_sequences(queries, row)),
            self._rotated(to_sequences(keys, row).unsqueeze(2)).squeeze(2),
            to_sequences(weights, row),
        )

    def _rotated(self, vectors: Tensor) -> Tensor:
        """Rotate the first dimensions of [B, L, heads, width] by the position along L."""
        width, base = self.config.qk_pos_emb_head_dim, self.config.rotary_base
        rotated = rotate_pairs(vectors[..., :width], base)
        return torch.cat([rotated, vectors[..., width:]], dim=-1)

    def _select(self, queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        """``queries`` [B, L, heads, width], ``keys`` [B, L, width], ``weights`` [B, L, heads] -> int32 [B, L, k]."""
        batch, length = keys.shape[:2]
        chunk = max(1, SCORES_AT_A_TIME // (batch * self.heads * length))
        parts = [
            self._select_part(queries[:, start : start + chunk], keys, weights[:, start : start + chunk], start)
            for start in range(0, length, chunk)
        ]
        return torch.cat(parts, dim=1)

    def _select_part(self, queries: Tensor, keys: Tensor, weights: Tensor, start: int) -> Tensor:
        """The same for queries at ``start`` and after it."""
        scores = torch.einsum("bqhd,bkd->bqhk", queries.float(), keys.float()).mul_(self.width**-0.5).relu_()
        total = (weights.unsqueeze(2) @ scores).squeeze(2)
        position = torch.arange(start, start + queries.shape[1], device=keys.device)[:, None]
        later = torch.arange(keys.shape[1], device=keys.device) > position
        best = total.masked_fill_(later, float("-inf")).topk(self.config.dsa_indexer_topk, dim=-1).indices
        # Later keys come up only where all earlier ones were chosen, the query's own among them.
        return torch.where(best > position, position, best).to(torch.int32)


def rotate_pairs(vectors: Tensor, base: float) -> Tensor:
    """Rotate each pair of neighbours of [B, L, heads, width] by the position along L; first halves come first."""
    length, width = vectors.shape[1], vectors.shape[-1]
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=vectors.device) / width
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=vectors.device), 1.0 / base**exponents)
    cos, sin = (each.to(vectors.dtype)[:, None] for each in (angles.cos(), angles.sin()))
    first, second = vectors[..., 0::2], vectors[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class SparseAttention(MegatronModule):
    """Core attention on the keys that the layer ``source`` (from 0) selected; with ``indexer``, that is this layer."""

    def __init__(
        self, config: MLATransformerConfig, source: int, indexer: bool, softmax_scale: float, **ignored: Any
    ) -> None:
        super().__init__(config=config)
        self.source, self.scale = source, softmax_scale
        self.indexer = Indexer(config) if indexer else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """``query``, ``key`` [T, heads, d], ``value`` [T, heads, v] -> [T, heads * v]."""
        assert isinstance(packed_seq_params, PackedRow), "rows are always packed"
        row = packed_seq_params
        query, key, value = (to_sequences(each, row).transpose(1, 2) for each in (query, key, value))
        result = attend(query, key, value, row.selected[self.source], self.scale)
        return to_tokens(result.transpose(1, 2), row).flatten(1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, selected: Tensor | None, scale: float, chunk: int = QUERY_CHUNK
) -> Tensor:
    """Causal attention on selected keys, ``chunk`` queries at a time.

    Args:
        query, key: [B, heads, L, d].
        value: [B, heads, L, v].
        selected: int [B, L, k], positions of keys, none after the query's; None is every earlier key.

    Returns:
        [B, heads, L, v].
    """
    length = query.shape[2]
    if selected is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    if length <= chunk:
        return _attend_to(query, key, value, selected, scale)
    parts = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        given = query[:, :, start:end], key[:, :, :end], value[:, :, :end], selected[:, start:end], scale
        # A mask of one chunk is made again in the backward pass: all of them would be [L, L].
        parts.append(checkpoint(_attend_to, *given, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, dim=2)


def _attend_to(query: Tensor, key: Tensor, value: Tensor, selected: Tensor, scale: float) -> Tensor:
    mask = torch.zeros((*selected.shape[:2], key.shape[2]), dtype=torch.bool, device=key.device)
    mask.scatter_(-1, selected.long(), True)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], scale=scale)


class LatentAttention(MLASelfAttention):
    """Megatron's multi-head latent attention, with whole down-projections and the indexer's selection.

    Without TransformerEngine Megatron cuts the down-projections over tensor-parallel ranks, and the gradient of the
    rotated part of the keys is then never summed.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_q_down_proj: torch.nn.Module
        self.linear_kv_down_proj: torch.nn.Module
        if isinstance(self.linear_q_down_proj, ColumnParallelLinear):
            inputs, rotated = config.hidden_size, config.qk_pos_emb_head_dim
            self.linear_q_down_proj = DuplicatedLinear(inputs, config.q_lora_rank, config)
            self.linear_kv_down_proj = DuplicatedLinear(inputs, config.kv_lora_rank + rotated, config)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Megatron's; in a layer with an indexer the row remembers its selection."""
        assert isinstance(packed_seq_params, PackedRow), "rows are always packed"
        result: tuple[Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, inference_context, **kwargs
        )
        core = self.core_attention
        if core.indexer is not None:
            packed_seq_params.selected[core.source] = core.indexer(hidden_states, result[3], packed_seq_params)
        return result
