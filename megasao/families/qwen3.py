"""Qwen3, dense: grouped queries, norms of queries and keys."""

from typing import Any

from megasao.families.base import Family, HfConfig
from megasao.families.rules import DENSE, GROUPED_ATTENTION, LAYER_NORMS, QK_NORMS, Rule

ALLOWED = {"attention_bias": (False, None), "use_sliding_window": (False, None)}


def megatron(hf_config: HfConfig) -> dict[str, Any]:
    """Norms of queries and keys."""
    return {"qk_layernorm": True}


def layer(hf_config: HfConfig, layer: int) -> tuple[Rule, ...]:
    """Every layer is the same."""
    return (*LAYER_NORMS, *GROUPED_ATTENTION, *QK_NORMS, *DENSE)


FAMILY = Family(
    megatron=megatron,
    layer=layer,
    allowed=ALLOWED,
    defaults={"num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6},
    nulls={"num_key_value_heads": "num_attention_heads"},
)
