"""Multi-head latent attention of one layer: queries, keys and values from their latents, and the indexer's selection.

Invariants (tests assert them):

- gradients of the down-projections are complete under tensor parallelism;
- under context parallelism ranks exchange latents, never keys or values of heads, and gradients are those of one rank
  that has the whole row.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megasao.megatron import context
from megasao.megatron.modules import PackedRow
from megasao.megatron.sparse_attention import DuplicatedLinear


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
        """Megatron's; in a layer with an indexer the row remembers its selection.

        Under context parallelism keys and values are those of the whole row, whose latents all ranks gather.
        """
        assert isinstance(packed_seq_params, PackedRow), "rows are always packed"
        result: tuple[Tensor, ...]
        if self.config.context_parallel_size > 1:
            result = self._with_keys_of_the_row(hidden_states, packed_seq_params)
        else:
            result = super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, packed_seq_params, inference_context, **kwargs
            )
        core = self.core_attention
        if core.indexer is not None:
            packed_seq_params.selected[core.source] = core.indexer(hidden_states, result[3], packed_seq_params)
        return result

    def _with_keys_of_the_row(self, hidden: Tensor, row: PackedRow) -> tuple[Tensor, ...]:
        """``hidden`` [T / CP or T / CP / TP, 1, hidden] -> what Megatron's method gives, keys and values [T, ...]."""
        assert not self.recompute_up_proj, "refused when the config is loaded"
        query_latent = self.q_layernorm(self.linear_q_down_proj(hidden)[0].squeeze(1))
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, rotary_key = self.linear_kv_down_proj(hidden)[0].squeeze(1).split(widths, dim=-1)
        latent = self.kv_layernorm(latent)
        if self.config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key)
        return self._query(query_latent, row), *self._keys_and_values(latent, rotary_key, row), query_latent, latent

    def _query(self, latent: Tensor, row: PackedRow) -> Tensor:
        """[T / CP, heads, d] of this rank's tokens."""
        query = self.linear_q_up_proj(latent)[0].unflatten(-1, (-1, self.q_head_dim))
        plain, rotary = query.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([plain, self._rotated(rotary, row)], dim=-1)

    def _keys_and_values(self, latent: Tensor, rotary_key: Tensor, row: PackedRow) -> tuple[Tensor, Tensor]:
        """[T, heads, d] and [T, heads, v] of the whole row.

        ``latent`` [T / CP or T / CP / TP, kv_lora_rank], ``rotary_key`` [T / CP, d of the rotated part].
        """
        order = context.whole_order(row.cu_seqlens_q, self.config.context_parallel_size)
        rotary = context.gather_tokens(self._rotated(rotary_key.unsqueeze(1), row), order)
        # The up-projection gathers over tensor-parallel ranks: a rank's tokens are then no longer side by side.
        both = self.linear_kv_up_proj(context.gather_parts(latent))[0].index_select(0, self._places(order))
        both = both.unflatten(-1, (-1, self.config.qk_head_dim + self.config.v_head_dim))
        key, value = both.split([self.config.qk_head_dim, self.config.v_head_dim], dim=-1)
        return torch.cat([key, rotary.expand(-1, key.shape[1], -1)], dim=-1), value

    def _places(self, order: Tensor) -> Tensor:
        """``order`` for what tensor-parallel ranks gather: their slices of all parts, where each has a slice."""
        if not self.config.sequence_parallel:
            return order
        own = len(order) // self.config.context_parallel_size
        part = own // self.config.tensor_model_parallel_size
        rank, token = order // own, order % own
        return token // part * (part * self.config.context_parallel_size) + rank * part + token % part

    def _rotated(self, vectors: Tensor, row: PackedRow) -> Tensor:
        """[T / CP, heads, d], each token by its place in its sequence."""
        frequencies = self.rotary_pos_emb(row.max_seqlen_q, packed_seq=True)
        result: Tensor = apply_rotary_pos_emb(
            vectors, frequencies, config=self.config, cu_seqlens=row.cu_seqlens_q, cp_group=self.pg_collection.cp
        )
        return result
