"""What config.json must say before anything is derived from it: each function raises ValueError for what cannot be."""

import math

from megasao.families.facts import EXPERT_KEYS, MTP_KEYS, HfConfig, expert_count, expert_key, rope

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_MOE_SIZES = ("moe_intermediate_size", "num_experts_per_tok")
_COUNTS = (
    "decoder_sparse_step",
    "first_k_dense_replace",
    "head_dim",
    "index_skip_topk_offset",
    "index_topk_freq",
    "n_group",
    "topk_group",
    *MTP_KEYS,
)
_FLAGS = ("attention_bias", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "use_qk_norm")
_NUMBERS = ("rms_norm_eps", "routed_scaling_factor")
_BEST = 2
"""Experts of a group that stand for it when a router compares groups."""
_MOST_LAYERS, _MOST_EXPERTS = 1_000, 100_000
"""Of a whole model. Published ones have up to 130 or so, and 31,000; to name many more would take long, and memory."""
_MOST_OF_A_COUNT = 10_000
_MOST_OF_A_SIZE = 1_000_000
"""The largest are vocabularies, of up to 300,000 tokens. Three sizes multiplied still are numbers that a tensor has."""
_MOST = {"num_hidden_layers": _MOST_LAYERS, "max_position_embeddings": 10**9}
_MISTAKE = "far more than any model has; correct config.json, or copy it again"
_OF_EACH_LAYER = ("mlp_layer_types", "indexer_types", "index_topk_pattern")


def check_counts(hf_config: HfConfig, sizes: tuple[str, ...]) -> None:
    """Counts are whole numbers, and sizes (the family's own ``sizes`` too) above 0; none is beyond any model's."""
    for key in (*EXPERT_KEYS, *_COUNTS):
        if type(count := hf_config.get(key) or 0) is not int or not 0 <= count <= _MOST_OF_A_COUNT:
            raise ValueError(f"{key} = {count!r}; expected a whole number up to {_MOST_OF_A_COUNT}")
    for key in (*_SIZES, *sizes, *(_MOE_SIZES if expert_count(hf_config) else ())):
        size, most = hf_config.get(key), _MOST.get(key, _MOST_OF_A_SIZE)
        if type(size) is not int or not 1 <= size <= most:
            without = "; a model without is not supported" if key in sizes and not size else ""
            found = f"{key} = {size!r}" if key in hf_config else f"{key} is missing"
            raise ValueError(f"{found}; expected a whole number above 0 and up to {most}{without}")
    _check_together(hf_config)


def _check_together(hf_config: HfConfig) -> None:
    """Each of them may be possible, and what they come to together not."""
    layers = {key: hf_config[key] for key in ("num_hidden_layers", *MTP_KEYS) if hf_config.get(key)}
    said = " and ".join(f"{key} = {count}" for key, count in layers.items())
    if (together := sum(layers.values())) > _MOST_LAYERS:
        raise ValueError(f"{said} are {together} layers; expected up to {_MOST_LAYERS}, {_MISTAKE}")
    if (experts := together * expert_count(hf_config)) > _MOST_EXPERTS:
        raise ValueError(
            f"{said}, with {expert_key(hf_config)} = {expert_count(hf_config)}, are {experts} experts; expected up to "
            f"{_MOST_EXPERTS}, {_MISTAKE}"
        )


def check_rope(hf_config: HfConfig, kinds: tuple[str, ...]) -> None:
    """ValueError if the rotary embedding is of another kind, or its numbers cannot be."""
    found = rope(hf_config)
    if found.kind not in kinds:
        raise ValueError(f"rope scaling {found.settings} is not supported; expected rope_type {' or '.join(kinds)}")
    if not (0 < found.theta < math.inf and 0 < found.fraction <= 1):
        raise ValueError(
            f"rope_theta = {found.theta} and partial_rotary_factor = {found.fraction}; expected a base above 0 and a "
            "share up to 1"
        )


def check_kinds(hf_config: HfConfig) -> None:
    """ValueError if a flag is no flag, or a number no number."""
    for key in _FLAGS:
        if not isinstance(hf_config.get(key), bool | None):
            raise ValueError(f"{key} = {hf_config[key]!r}; expected true or false")
    for key in _NUMBERS:
        number = hf_config.get(key)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float) or not number > 0):
            raise ValueError(f"{key} = {number!r}; expected a number above 0")


def check_experts(hf_config: HfConfig) -> None:
    """ValueError if a router cannot choose as many experts, or groups of them, as it is told, or Megatron's cannot."""
    experts, groups = expert_count(hf_config), hf_config.get("n_group") or 1
    if not experts:
        return
    if (chosen := hf_config["num_experts_per_tok"]) > experts:
        raise ValueError(f"num_experts_per_tok = {chosen}, of {experts} experts; expected at most that many")
    if chosen == 1 and hf_config.get("norm_topk_prob"):
        raise ValueError(
            "num_experts_per_tok = 1 with norm_topk_prob = true weighs every expert by 1, and Megatron-Core's router "
            "by its score; expected at least 2"
        )
    of_groups = hf_config.get("topk_group") or 0
    if experts % groups or (groups > 1 and not 0 < of_groups <= groups):
        raise ValueError(
            f"n_group = {groups} and topk_group = {of_groups}; expected groups of equal size of {experts} experts, and "
            "at most all of them"
        )
    if groups > 1 and (chosen // of_groups != _BEST or chosen > of_groups * (experts // groups)):
        raise ValueError(
            f"num_experts_per_tok = {chosen} and topk_group = {of_groups} of n_group = {groups}: groups are compared "
            f"by the sum of their best {_BEST} experts, and by Megatron-Core's router of their best "
            f"num_experts_per_tok // topk_group; expected {_BEST} for each chosen group, and no more than groups have"
        )


def check_heads(hf_config: HfConfig, *, derived: bool) -> None:
    """ValueError if heads do not fit; ``derived``: their width is a share of the hidden size."""
    hidden, heads, groups = (hf_config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads % groups:
        raise ValueError(
            f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {groups}; expected groups of "
            "equal size"
        )
    if derived and hidden % heads:
        raise ValueError(
            f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and there is no head_dim; "
            "expected one of the two"
        )


def check_layers(hf_config: HfConfig) -> None:
    """ValueError if something is not said of layers as it has to be."""
    layers = hf_config["num_hidden_layers"]
    for key in _OF_EACH_LAYER:
        kinds = hf_config.get(key)
        if kinds and (not isinstance(kinds, list | str) or len(kinds) < layers):
            raise ValueError(f"{key} = {kinds!r}; expected one entry for each of num_hidden_layers = {layers}")
    dense = hf_config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ValueError(f"mlp_only_layers = {dense!r}; expected a list of whole numbers")
