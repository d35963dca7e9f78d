"""Multi-head latent attention on selected keys: an indexer scores all earlier keys, attention sees the best of them.

The selection of a layer with an indexer serves the layers after it that have none (DeepSeek-V3.2, arXiv 2512.02556;
sharing: arXiv 2603.12201). The indexer's scores decide only which keys count, so nothing flows back into it: its
weights do not train.

Invariants (tests assert them):

- log-probabilities equal those of transformers for packed rows under every layout; attention to all keys, or the
  rotation of halves for that of pairs in the indexer, does not;
- a row's result equals that of its sequences alone, and does not depend on the chunks that queries are cut into;
- what is computed of a row grows with its sequences, each padded to at most 3/2 of its length, however unlike they are;
- where a row has no sequence longer than the number of selected keys, attention is plain causal attention;
- no [T, T] tensor outlives its chunk of queries: they are made again in the backward pass;
- under context parallelism each rank selects, for its own queries, among the keys of the whole row.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megasao.megatron.context import attend_to_row, gather_tokens, own_positions, own_tiles, whole_order
from megasao.megatron.modules import PackedRow, side_by_side

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
            hidden: [T or T / TP, 1, hidden], the attention's input; under context parallelism of this rank's tokens.
            query_latent: [T or T / TP, q_lora_rank], normalised.

        Returns:
            int32 [T / CP, k], k the number of keys to select; None if no sequence is longer.
        """
        if row.max_seqlen_q <= self.config.dsa_indexer_topk:
            return None
        if self.config.sequence_parallel:
            hidden, query_latent = (gather_from_sequence_parallel_region(each) for each in (hidden, query_latent))
        hidden = hidden.squeeze(1)
        positions = own_positions(row.cu_seqlens_q)
        queries = self._rotated(self.linear_wq_b(query_latent)[0].unflatten(-1, (self.heads, self.width)), positions)
        keys = self._rotated(self.k_norm(self.linear_wk(hidden)[0]).unsqueeze(1), positions).squeeze(1)
        weights = functional.linear(hidden.float(), self.linear_weights_proj.weight.float()) * self.heads**-0.5
        if self.config.context_parallel_size > 1:
            return self._select_in_row(queries, keys, weights, row.cu_seqlens_q, positions)
        return side_by_side(self._select, row.cu_seqlens_q, queries, keys, weights)

    def _rotated(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first dimensions of [T, heads, width] by ``positions`` [T]."""
        width, base = self.config.qk_pos_emb_head_dim, self.config.rotary_base
        rotated = rotate_pairs(vectors[..., :width], positions, base)
        return torch.cat([rotated, vectors[..., width:]], dim=-1)

    def _select_in_row(
        self, queries: Tensor, keys: Tensor, weights: Tensor, cu_seqlens: Tensor, positions: Tensor
    ) -> Tensor:
        """For this rank's ``queries`` [T / CP, heads, width] among the ``keys`` of all ranks -> int32 [T / CP, k]."""
        keys = gather_tokens(keys, whole_order(cu_seqlens, self.config.context_parallel_size))
        # A query with fewer earlier keys than k has its own repeated.
        selected = positions.to(torch.int32)[:, None].repeat(1, self.config.dsa_indexer_topk)
        for tile in own_tiles(cu_seqlens, lambda length: max(1, SCORES_AT_A_TIME // (self.heads * max(1, length)))):
            seen, first = keys[None, tile.sequence : tile.end], tile.start - tile.sequence
            best = self._select_part(queries[None, tile.own], seen, weights[None, tile.own], first)[0]
            selected[tile.own, : best.shape[-1]] = best
        return selected

    def _select(self, queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        """``queries`` [B, L, heads, width], ``keys`` [B, L, width], ``weights`` [B, L, heads] -> int32 [B, L, k]."""
        batch, length = keys.shape[:2]
        if length <= self.config.dsa_indexer_topk:  # every earlier one, the query's own repeated
            positions = torch.arange(self.config.dsa_indexer_topk, dtype=torch.int32, device=keys.device)
            return positions.minimum(positions[:length, None]).expand(batch, -1, -1)
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
        most = min(self.config.dsa_indexer_topk, keys.shape[1])
        best = total.masked_fill_(later, float("-inf")).topk(most, dim=-1).indices
        # Later keys come up only where all earlier ones were chosen, the query's own among them.
        return torch.where(best > position, position, best).to(torch.int32)


def rotate_pairs(vectors: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate each pair of neighbours of [T, heads, width] by ``positions`` [T]; first halves come first."""
    width = vectors.shape[-1]
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=vectors.device) / width
    angles = torch.outer(positions.float(), 1.0 / base**exponents)
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
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """``query``, ``key`` [T, heads, d], ``value`` [T, heads, v] -> [T, heads * v].

        Under context parallelism ``query`` and the result are of this rank's T / CP tokens, ``key`` and ``value`` of
        the whole row.
        """
        assert isinstance(packed_seq_params, PackedRow), "rows are always packed"
        row = packed_seq_params
        selected = row.selected[self.source]
        if self.config.context_parallel_size > 1:
            return attend_to_row(query, key, value, row.cu_seqlens_q, self.scale, selected).flatten(1)
        given = (query, key, value) if selected is None else (query, key, value, selected)
        return side_by_side(self._attend, row.cu_seqlens_q, *given).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, selected: Tensor | None = None) -> Tensor:
        """``query``, ``key`` [B, L, heads, d], ``value`` [B, L, heads, v], ``selected`` [B, L, k] -> [B, L, heads, v].

        What fills up a sequence has the selection of a token that comes earlier in its own: no key is after the query.
        """
        if selected is not None and query.shape[1] <= selected.shape[2]:
            selected = None  # every earlier key
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return attend(query, key, value, selected, self.scale).transpose(1, 2)


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
