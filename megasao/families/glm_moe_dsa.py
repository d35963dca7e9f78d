"""GLM-5: multi-head latent attention on the keys that an indexer selects, shared over layers; experts as in GLM-4.

A few layers have an indexer; those after it use what it selected (arXiv 2603.12201). The indexer is not trained here:
its selection has no gradient. config.json's ``head_dim`` is the width of the whole query, not of the rotated part.
"""

from typing import Any

from megasao.families.base import Family, HfConfig, feed_forward_kind
from megasao.families.facts import indexer_layers, rope
from megasao.families.glm4_moe import DEFAULTS, MOE, MOE_ALLOWED, MOE_SIZES, MTP_COPIES, sigmoid_router
from megasao.families.rules import DENSE, LAYER_NORMS, H, M, Rule, mtp_layer
from megasao.families.sizes import HEADS, HIDDEN, Size, field

_NOPE, _ROPE, _VALUE = field("qk_nope_head_dim"), field("qk_rope_head_dim"), field("v_head_dim")
_QUERY, _LATENT = field("q_lora_rank"), field("kv_lora_rank")
_INDEXERS, _INDEX = field("index_n_heads"), field("index_head_dim")


def _rule(megatron: str, hf: str, *shape: Size, shard: int | None = None, fp8: bool = True) -> Rule:
    return Rule(f"{M}self_attention.{megatron}", (f"{H}self_attn.{hf}",), (shape,), shard=shard, fp8=fp8)


LATENT_ATTENTION = (
    _rule("linear_q_down_proj.weight", "q_a_proj.weight", _QUERY, HIDDEN),
    _rule("q_layernorm.weight", "q_a_layernorm.weight", _QUERY, fp8=False),
    _rule("linear_q_up_proj.weight", "q_b_proj.weight", HEADS * (_NOPE + _ROPE), _QUERY, shard=0),
    _rule("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", _LATENT + _ROPE, HIDDEN),
    _rule("kv_layernorm.weight", "kv_a_layernorm.weight", _LATENT, fp8=False),
    _rule("linear_kv_up_proj.weight", "kv_b_proj.weight", HEADS * (_NOPE + _VALUE), _LATENT, shard=0),
    _rule("linear_proj.weight", "o_proj.weight", HIDDEN, HEADS * _VALUE, shard=1),
)
_I = "core_attention.indexer."
INDEXER = (
    _rule(f"{_I}linear_wq_b.weight", "indexer.wq_b.weight", _INDEXERS * _INDEX, _QUERY),
    _rule(f"{_I}linear_wk.weight", "indexer.wk.weight", _INDEX, HIDDEN),
    _rule(f"{_I}k_norm.weight", "indexer.k_norm.weight", _INDEX, fp8=False),
    _rule(f"{_I}k_norm.bias", "indexer.k_norm.bias", _INDEX, fp8=False),
    _rule(f"{_I}linear_weights_proj.weight", "indexer.weights_proj.weight", _INDEXERS, HIDDEN, fp8=False),
)


def megatron(hf_config: HfConfig) -> dict[str, Any]:
    """Latent attention, the indexer's sizes, and the router."""
    return {
        "qk_layernorm": True,
        "q_lora_rank": hf_config["q_lora_rank"],
        "kv_lora_rank": hf_config["kv_lora_rank"],
        "qk_head_dim": hf_config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf_config["qk_rope_head_dim"],
        "v_head_dim": hf_config["v_head_dim"],
        "kv_channels": hf_config["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": rope(hf_config).theta,
        "dsa_indexer_n_heads": hf_config["index_n_heads"],
        "dsa_indexer_head_dim": hf_config["index_head_dim"],
        "dsa_indexer_topk": hf_config["index_topk"],
        **sigmoid_router(hf_config),
    }


def layer(hf_config: HfConfig, layer: int) -> tuple[Rule, ...]:
    """With an indexer or without, dense or with experts."""
    indexer = INDEXER if layer in indexer_layers(hf_config) else ()
    feed_forward = MOE if feed_forward_kind(hf_config, layer) == "moe" else DENSE
    return (*LAYER_NORMS, *LATENT_ATTENTION, *indexer, *feed_forward)


def mtp(hf_config: HfConfig, number: int) -> tuple[Rule, ...]:
    """A layer with an indexer and experts."""
    return mtp_layer(number, (*LAYER_NORMS, *LATENT_ATTENTION, *INDEXER, *MOE))


FAMILY = Family(
    megatron=megatron,
    layer=layer,
    attention="sparse_latent",
    mtp=mtp,
    mtp_copies=MTP_COPIES,
    allowed={**MOE_ALLOWED, "attention_bias": (False, None), "mlp_bias": (False, None)},
    sizes=(
        *MOE_SIZES,
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
    ),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
)
