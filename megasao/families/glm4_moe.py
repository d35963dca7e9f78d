"""GLM-4.5 to 4.7: grouped queries with biases, half of each head rotated, a sigmoid router with a correction bias.

The router's bias balances the experts without a loss; it is a buffer in float32, chooses experts and does not weigh
them. Training here leaves it as it is: moving it would change the policy outside of its objective.
"""

from typing import Any

from megasao.families.base import Family, HfConfig, feed_forward_kind
from megasao.families.rules import (
    DENSE,
    EMBEDDING,
    EXPERTS,
    GROUPED_ATTENTION,
    LAYER_NORMS,
    LM_HEAD,
    QK_NORMS,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERT,
    Rule,
    mtp_layer,
)

MOE = (*EXPERTS, *ROUTER_BIAS, *SHARED_EXPERT)
MOE_ALLOWED = {"norm_topk_prob": (True,)}
MOE_SIZES = ("n_routed_experts", "n_shared_experts")
DEFAULTS = {"n_shared_experts": 1, "norm_topk_prob": True, "rms_norm_eps": 1e-5}
MTP_COPIES = {
    "model.layers.{L}.embed_tokens.weight": EMBEDDING,
    "model.layers.{L}.shared_head.head.weight": LM_HEAD,
}


def sigmoid_router(hf_config: HfConfig) -> dict[str, Any]:
    """Megatron's settings of the router in float32, its bias, its scaling, and the shared expert."""
    groups = int(hf_config.get("n_group") or 1)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(hf_config.get("routed_scaling_factor") or 1.0),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": int(hf_config["topk_group"]) if groups > 1 else None,
        "moe_shared_expert_intermediate_size": hf_config["n_shared_experts"] * hf_config["moe_intermediate_size"],
    }


def megatron(hf_config: HfConfig) -> dict[str, Any]:
    """Biases of queries, keys and values; norms of queries and keys in the larger models; the router."""
    return {
        "qk_layernorm": bool(hf_config.get("use_qk_norm", False)),
        "add_qkv_bias": bool(hf_config.get("attention_bias", False)),
        **sigmoid_router(hf_config),
    }


def _attention(hf_config: HfConfig) -> tuple[Rule, ...]:
    bias = QKV_BIAS if hf_config.get("attention_bias", False) else ()
    norms = QK_NORMS if hf_config.get("use_qk_norm", False) else ()
    return (*LAYER_NORMS, *GROUPED_ATTENTION, *bias, *norms)


def layer(hf_config: HfConfig, layer: int) -> tuple[Rule, ...]:
    """The first layers are dense."""
    return (*_attention(hf_config), *(MOE if feed_forward_kind(hf_config, layer) == "moe" else DENSE))


def mtp(hf_config: HfConfig, number: int) -> tuple[Rule, ...]:
    """A layer with experts."""
    return mtp_layer(number, (*_attention(hf_config), *MOE))


FAMILY = Family(
    megatron=megatron,
    layer=layer,
    mtp=mtp,
    mtp_copies=MTP_COPIES,
    allowed=MOE_ALLOWED,
    sizes=MOE_SIZES,
    defaults={**DEFAULTS, "num_key_value_heads": 8, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
)
