"""Memory that one row needs for its backward pass: what each layer keeps, and the head's chunk of logits.

The numbers are those of what the local specification saves, counted tensor by tensor; fused implementations keep less.
With ``trainer.recompute: full`` a layer keeps its input, and one layer at a time is there as a whole; ``selective`` is
counted as none, which is an upper bound. ``tokens`` are those of one rank's row; with sequence parallelism a rank keeps
its part of everything that is not cut over heads or features.
"""

from dataclasses import dataclass
from typing import Any

from megasao.config import Config
from megasao.families import family_of
from megasao.families.facts import expert_count, head_dim, indexer_layers, is_moe_layer, rope
from megasao.megatron.context import TILE
from megasao.megatron.sparse_attention import QUERY_CHUNK, SCORES_AT_A_TIME

LOGPROB_CHUNK = 1024
"""Tokens whose logits exist at one time."""


@dataclass(frozen=True)
class Activations:
    """Bytes that one row keeps on a rank, from its forward pass to its backward pass.

    Attributes:
        hf_config: the model's config.json.
        config: layout, dtype and assumptions.
        tokens: of the row, on one context-parallel rank.
    """

    hf_config: dict[str, Any]
    config: Config
    tokens: int

    def layer(self, layer: int) -> float:
        """What computing decoder layer ``layer`` (from 0) leaves behind for its backward pass."""
        hidden = 6 * self.hf_config["hidden_size"] * self._width / self._sequence
        attention = self._latent(layer) if self._is_latent else self._grouped()
        return self.tokens * (hidden + attention + self._feed_forward(layer)) + self._tile_masks()

    def last_stage(self) -> float:
        """What the final norm keeps."""
        return self.tokens * 3 * self.hf_config["hidden_size"] * self._width / self._sequence

    def logprobs(self) -> float:
        """The most that exists at a time for log-probabilities: a chunk's logits, and the head's gradient."""
        vocabulary, hidden = self.hf_config["vocab_size"] / self._tensor, self.hf_config["hidden_size"]
        chunk = min(LOGPROB_CHUNK, self.tokens) * vocabulary
        half = self._width if self._width < 4 else 0
        return chunk * (2 * 4 + half) + vocabulary * hidden * (4 + half) + 2 * self.tokens * hidden * self._width

    def indexer(self, layers: range) -> float:
        """The scores that exist at a time while one of ``layers`` selects keys."""
        shape = self.hf_config
        if not self._is_latent or not self._selects or not any(layer in indexer_layers(shape) for layer in layers):
            return 0.0
        context = self.config.parallel.context
        # Under context parallelism half of a rank's tokens, a chunk of the zig-zag, are the most that score at a time.
        queries = self.tokens if context == 1 else self.tokens // 2
        return 4.0 * min(SCORES_AT_A_TIME, queries * self._row * shape["index_n_heads"])

    def kept(self, layers: range, *, last: bool) -> float:
        """What ``layers`` keep, and on the last stage the final norm."""
        kept = self._input() * len(layers) if self._recomputes else sum(self.layer(layer) for layer in layers)
        return kept + (self.last_stage() if last else 0.0)

    def scratch(self, layers: range, *, last: bool, head: bool) -> float:
        """What the worst moment needs beyond what is kept at the end.

        That is the head at work, or the last indexer, when the layers after it have kept nothing yet; with
        recomputation also the largest layer on its way back.
        """
        at_the_end = self.kept(layers, last=last)
        worst = at_the_end + (self.logprobs() if head else 0.0)
        if self._recomputes:
            return max(worst - at_the_end, *(self._recomputed(layer) for layer in layers))
        indexers = [layer for layer in layers if self._is_latent and layer in indexer_layers(self.hf_config)]
        if indexers:
            before = self.kept(range(layers.start, indexers[-1] + 1), last=False)
            worst = max(worst, before + self.indexer(layers))
        return worst - at_the_end

    def _input(self) -> float:
        return self.tokens * self.hf_config["hidden_size"] * self._width / self._sequence

    def _recomputed(self, layer: int) -> float:
        """A layer that is computed again, with the gradient of its output."""
        return self.layer(layer) + self.indexer(range(layer, layer + 1)) + self._input()

    def _grouped(self) -> float:
        heads = self.hf_config["num_attention_heads"]
        queries = heads * head_dim(self.hf_config)
        keys = self.hf_config["num_key_value_heads"] * head_dim(self.hf_config)
        # Each context-parallel rank gathers the keys and values of the whole row.
        kept = 3 * queries + 2 * keys * self.config.parallel.context
        if family_of(self.hf_config).megatron(self.hf_config).get("qk_layernorm"):
            kept += 3 * queries + 3 * keys
        rotary = 4 * rope(self.hf_config).fraction * head_dim(self.hf_config)
        return (kept / self._tensor + rotary) * self._width + 4 * heads / self._tensor

    def _latent(self, layer: int) -> float:
        shape = self.hf_config
        heads, rotated, context = shape["num_attention_heads"], shape["qk_rope_head_dim"], self.config.parallel.context
        # Each context-parallel rank gathers the latents of the whole row, and makes its keys and values from them.
        latents = 3 * shape["q_lora_rank"] + (2 + context) * shape["kv_lora_rank"] + rotated
        cut = heads * ((1 + context) * (shape["qk_nope_head_dim"] + rotated) + (2 + context) * shape["v_head_dim"])
        selected = shape["index_topk"] if self._selects and layer in indexer_layers(shape) else 0
        mask = self._row if context == 1 and self._selects and self._row <= QUERY_CHUNK else 0
        kept = latents / self._sequence + cut / self._tensor + 4 * rotated
        return kept * self._width + 4 * (selected + mask) + 4 * heads / self._tensor

    def _tile_masks(self) -> float:
        """Under context parallelism: masks of one sequence's tiles that are not computed again, on the fullest rank."""
        ranks = self.config.parallel.context
        chunk = self._row // (2 * ranks)
        if ranks == 1 or chunk == 0:
            return 0.0
        queries = min(TILE, chunk)
        unmasked = 0 if self._is_latent and self._selects else queries
        ends = [range(number * chunk + queries, (number + 1) * chunk + 1, queries) for number in range(2 * ranks)]
        kept = [sum(queries * end for end in each if unmasked < end <= TILE * TILE // queries) for each in ends]
        return 4.0 * max(kept[rank] + kept[-1 - rank] for rank in range(ranks))

    def _feed_forward(self, layer: int) -> float:
        shape = self.hf_config
        if not is_moe_layer(shape, layer):
            return 5 * shape["intermediate_size"] / self._tensor * self._width
        width, routed = shape["moe_intermediate_size"], shape["num_experts_per_tok"] * self.config.plan.expert_imbalance
        # A rank's tokens leave for the experts and as many come; expert tensor parallelism gathers and cuts alike.
        experts = routed * (6 * width + shape["hidden_size"]) / self._sequence
        shared = 5 * (shape.get("n_shared_experts") or 0) * width / self._tensor
        return (experts + shared) * self._width + 10 * 4 * expert_count(shape) / self._sequence

    @property
    def _recomputes(self) -> bool:
        return self.config.trainer.recompute == "full"

    @property
    def _selects(self) -> bool:
        return self._row > int(self.hf_config["index_topk"])

    @property
    def _row(self) -> int:
        """Tokens on all context-parallel ranks."""
        return self.tokens * self.config.parallel.context

    @property
    def _is_latent(self) -> bool:
        return family_of(self.hf_config).attention == "sparse_latent"

    @property
    def _tensor(self) -> int:
        return self.config.parallel.tensor

    @property
    def _sequence(self) -> int:
        return self.config.parallel.tensor if self.config.parallel.sequence else 1

    @property
    def _width(self) -> int:
        return {"float32": 4, "bfloat16": 2}[self.config.model.dtype]
