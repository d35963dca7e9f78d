"""Qwen3 with experts: a softmax router; some layers may be dense."""

from typing import Any

from megasao.families.base import Family, HfConfig, feed_forward_kind
from megasao.families.qwen3 import ALLOWED
from megasao.families.rules import DENSE, EXPERTS, GROUPED_ATTENTION, LAYER_NORMS, QK_NORMS, Rule


def megatron(hf_config: HfConfig) -> dict[str, Any]:
    """Norms of queries and keys, and a softmax router."""
    return {
        "qk_layernorm": True,
        "moe_router_score_function": "softmax",
        # Softmax over the chosen logits equals softmax over all, renormalised over the chosen.
        "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
    }


def layer(hf_config: HfConfig, layer: int) -> tuple[Rule, ...]:
    """Dense or with experts."""
    feed_forward = EXPERTS if feed_forward_kind(hf_config, layer) == "moe" else DENSE
    return (*LAYER_NORMS, *GROUPED_ATTENTION, *QK_NORMS, *feed_forward)


FAMILY = Family(
    megatron=megatron,
    layer=layer,
    allowed=ALLOWED,
    defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-6},
)
