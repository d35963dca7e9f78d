"""A small twin of a model: every kind of layer, every ratio that code depends on, and few numbers.

What stays: which kinds of layer follow one another (dense or with experts, with an indexer or sharing one), queries per
group, the proportions of a latent head, biases, norms, the router, tied embeddings, the kind of rotary embedding, and
multi-token prediction.
"""

from itertools import pairwise
from typing import Any

from megasao.families.facts import EXPERT_KEYS, HfConfig, indexer_layers, is_moe_layer

HIDDEN, FEED_FORWARD, EXPERT, HEAD, GROUPS, EXPERTS, CHOSEN, CONTEXT = 64, 96, 32, 16, 2, 8, 2, 512
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 8,
}


def shrink(hf_config: HfConfig, *, vocabulary: int = 32) -> HfConfig:
    """The twin's config.json; ``vocabulary`` is its number of tokens."""
    small: dict[str, Any] = {key: value for key, value in hf_config.items() if not key.endswith("_token_id")}
    small |= {
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "max_position_embeddings": CONTEXT,
        "num_hidden_layers": _layers(hf_config),
        "vocab_size": vocabulary,
    }
    if "kv_lora_rank" in hf_config:
        small |= _latent(hf_config)
    else:
        per_group = hf_config["num_attention_heads"] // hf_config["num_key_value_heads"]
        small |= {"num_key_value_heads": GROUPS, "num_attention_heads": GROUPS * per_group, "head_dim": HEAD}
    for key in EXPERT_KEYS:
        if hf_config.get(key):
            small |= {key: EXPERTS, "moe_intermediate_size": EXPERT, "num_experts_per_tok": CHOSEN}
    for key in ("mlp_layer_types", "indexer_types", "layer_types"):
        if hf_config.get(key):
            small[key] = hf_config[key][: small["num_hidden_layers"]]
    for key in ("rope_scaling", "rope_parameters"):
        if "original_max_position_embeddings" in (hf_config.get(key) or {}):
            small[key] = hf_config[key] | {"original_max_position_embeddings": CONTEXT // 8}
    return small


def _layers(hf_config: HfConfig) -> int:
    """The fewest first layers, an even number and at least 4, in which each kind follows each that it follows."""
    count = hf_config["num_hidden_layers"]
    indexers = indexer_layers(hf_config) if "kv_lora_rank" in hf_config else []
    kinds = [(is_moe_layer(hf_config, layer), layer in indexers) for layer in range(count)]
    steps = list(pairwise(kinds))
    fewest = max(steps.index(step) for step in set(steps)) + 2
    return min(count, max(4, fewest + fewest % 2))


def _latent(hf_config: HfConfig) -> HfConfig:
    """Heads of a quarter of the width, with the same proportions of what is rotated, what is not, and the value."""
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    unit = hf_config["qk_rope_head_dim"] // 8
    scaled = {key: hf_config[key] // unit for key in widths}
    return {**_LATENT, **scaled, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": scaled[widths[0]]}
