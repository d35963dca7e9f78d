"""Latent attention of the embedded engine: GLM-5's attention on what slots keep, and its indexer's selection.

A token leaves its latent and its rotated key in the cache, one vector for all heads, and, in a layer with an indexer,
the indexer's key. A query is brought into the space of the latents, not the latents into those of the heads: keys and
values of heads never exist. Sparse attention is that of arXiv 2512.02556, shared over layers as in 2603.12201;
``megasao/megatron/sparse_attention.py`` is the trainer's.

Invariants, asserted by the tests:
- log-probabilities equal those of transformers and of the trainer below 1e-5, for rows shorter and longer than
  ``index_topk``; attention to all keys, or a selection of its own in a layer that shares one, does not give them;
- one token at a time gives what all tokens at once give;
- of a token are kept ``kv_lora_rank + qk_rope_head_dim`` numbers a layer, and ``index_head_dim`` more with an indexer;
- the norms of the latents have the epsilon of config.json, as in the trainer.
"""

from typing import Any

import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from megasao.rollout.engines.slot_attention import Seen, StepBatch

SCORES_AT_A_TIME = 2**26
"""Scores of an indexer that exist at a time: 256 MiB."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [N, d / 2] of the tokens' positions."""


class LatentSlotAttention(GlmMoeDsaAttention):
    """The model's own layer, which attends within slots when it is given a step."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles,
        *args: Any,
        prev_topk_indices: Any = None,
        step_batch: StepBatch | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Seen]:
        """``hidden_states`` [1, N, hidden] -> the same; the keys that this layer saw go on to the layers that share."""
        if step_batch is None:
            result: tuple[torch.Tensor, None, Seen] = super().forward(
                hidden_states, position_embeddings, *args, prev_topk_indices=prev_topk_indices, **kwargs
            )
            return result
        hidden, pairs = hidden_states[0], self.qk_rope_head_dim // 2
        cos, sin = (each[0, :, :pairs] for each in position_embeddings)
        query_latent = self.q_a_layernorm(self.q_a_proj(hidden))
        seen = prev_topk_indices
        if self.indexer is not None:
            seen = select(self.indexer, hidden, query_latent, (cos, sin), step_batch)
        output = self._attend(hidden, query_latent, (cos, sin), step_batch, seen)
        return self.o_proj(output.flatten(1)).unsqueeze(0), None, seen

    def _attend(
        self, hidden: torch.Tensor, query_latent: torch.Tensor, angles: Angles, batch: StepBatch, seen: Seen
    ) -> torch.Tensor:
        """[N, heads, v_head_dim]."""
        latent, turned = self.kv_a_proj_with_mqa(hidden).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        key = torch.cat([self.kv_a_layernorm(latent), rotate_pairs(turned, *angles)], dim=-1)
        kept = batch.cache.write(self.layer_idx, "latent", key.unsqueeze(1), batch.places)
        query = self.q_b_proj(query_latent).unflatten(-1, (self.num_heads, -1))
        plain, rotary = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        up = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        to_keys, to_values = up.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        plain = torch.bmm(plain.transpose(0, 1), to_keys).transpose(0, 1)
        query = torch.cat([plain, rotate_pairs(rotary, *angles)], dim=-1)
        # Values are the latents: the whole key stands for them, so that one tensor is read, and its end is dropped.
        mixed = batch.attend_to(query, kept, kept, self.scaling, seen)[..., : self.kv_lora_rank]
        return torch.bmm(mixed.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1)


def use_latent_slots(model: torch.nn.Module, latent_epsilon: float) -> None:
    """Let the model's latent attention run on slots; ``latent_epsilon`` is that of the latents' norms."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GlmMoeDsaAttention)]
    for layer in layers:
        layer.__class__ = LatentSlotAttention
        layer.q_a_layernorm.variance_epsilon = layer.kv_a_layernorm.variance_epsilon = latent_epsilon


def select(indexer: Any, hidden: torch.Tensor, query_latent: torch.Tensor, angles: Angles, batch: StepBatch) -> Seen:
    """Keep the indexer's keys of the new tokens; which of all earlier keys each of them sees.

    ``hidden`` [N, hidden] is the attention's input, ``query_latent`` [N, q_lora_rank] normalised.
    """
    width = indexer.qk_rope_head_dim
    key = _rotate_start(indexer.k_norm(indexer.wk(hidden)), angles, width)
    keys = batch.cache.write(indexer.layer_idx, "indexer", key, batch.places)
    decoding, prefill, most = batch.earlier.decoding, batch.earlier.prefill, indexer.index_topk
    if all(each is None or each.shape[-1] <= most for each in (decoding, prefill)):
        return batch.earlier
    query = _rotate_start(indexer.wq_b(query_latent).unflatten(-1, (indexer.n_heads, -1)), angles, width)
    weights = indexer.weights_proj(hidden) * (indexer.n_heads * indexer.head_dim) ** -0.5
    if decoding is not None:
        new, new_weights = (each[: batch.decoding].unsqueeze(1) for each in (query, weights))
        decoding = best_keys(new, new_weights, batch.of_decoding(keys), decoding, most)
    if prefill is not None:
        new, new_weights = batch.padded(query), batch.padded(weights)
        prefill = best_keys(new, new_weights, batch.of_prefill(keys), prefill, most)
    return Seen(decoding, prefill)


def best_keys(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, most: int
) -> torch.Tensor:
    """``seen`` cut to the ``most`` keys with the largest sum over heads of weight * relu(query . key).

    Args:
        queries: [rows, Q, heads, width].
        weights: [rows, Q, heads].
        keys: [rows, K, width].
        seen: bool [rows, 1, Q, K].
    """
    if keys.shape[1] <= most:
        return seen
    rows, count, heads, _ = queries.shape
    chunk = max(1, SCORES_AT_A_TIME // (rows * heads * keys.shape[1]))
    parts = []
    for start in range(0, count, chunk):
        part = slice(start, start + chunk)
        scores = (queries[:, part].flatten(1, 2) @ keys.transpose(1, 2)).relu_().unflatten(1, (-1, heads))
        total = (weights[:, part].unsqueeze(2) @ scores).squeeze(2)
        best = total.masked_fill_(~seen[:, 0, part], float("-inf")).topk(most, dim=-1).indices
        parts.append(torch.zeros_like(total, dtype=torch.bool).scatter_(-1, best, True))
    # Keys that are not seen come up only where all that are were chosen.
    return torch.cat(parts, dim=1).unsqueeze(1) & seen


def _rotate_start(vectors: torch.Tensor, angles: Angles, width: int) -> torch.Tensor:
    rotated = rotate_pairs(vectors[..., :width], *angles)
    return torch.cat([rotated, vectors[..., width:]], dim=-1)


def rotate_pairs(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of neighbours of [N, d] or [N, heads, d] by its token's angles; first halves come first."""
    if vectors.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = vectors[..., 0::2], vectors[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
