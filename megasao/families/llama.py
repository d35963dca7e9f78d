"""Llama 3: grouped queries, no norms of queries and keys, rotary embedding with llama3 scaling, often tied."""

from typing import Any

from megasao.families.base import Family, HfConfig
from megasao.families.rules import DENSE, GROUPED_ATTENTION, LAYER_NORMS, Rule


def megatron(hf_config: HfConfig) -> dict[str, Any]:
    """No settings beyond the common ones."""
    return {}


def layer(hf_config: HfConfig, layer: int) -> tuple[Rule, ...]:
    """Every layer is the same."""
    return (*LAYER_NORMS, *GROUPED_ATTENTION, *DENSE)


FAMILY = Family(
    megatron=megatron,
    layer=layer,
    allowed={"attention_bias": (False, None), "mlp_bias": (False, None)},
    rope_types=("default", "llama3"),
    defaults={"num_key_value_heads": None, "rms_norm_eps": 1e-6},
    nulls={"num_key_value_heads": "num_attention_heads"},
)
