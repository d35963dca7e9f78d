"""What a config.json says, in any of the spellings that transformers has used. Layers and experts count from 0."""

from dataclasses import dataclass
from typing import Any

HfConfig = dict[str, Any]

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")


def expert_key(hf_config: HfConfig) -> str:
    """The field that says how many routed experts there are; the first of its spellings where none does."""
    return next((key for key in EXPERT_KEYS if hf_config.get(key)), EXPERT_KEYS[0])


def expert_count(hf_config: HfConfig) -> int:
    """Routed experts per MoE layer; 0 for a dense model."""
    return int(hf_config.get(expert_key(hf_config)) or 0)


def is_moe_layer(hf_config: HfConfig, layer: int) -> bool:
    """Whether ``layer`` has experts."""
    if expert_count(hf_config) == 0:
        return False
    if kinds := hf_config.get("mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if layer < int(hf_config.get("first_k_dense_replace") or 0) or layer in (hf_config.get("mlp_only_layers") or []):
        return False
    return (layer + 1) % int(hf_config.get("decoder_sparse_step") or 1) == 0


def mtp_layers(hf_config: HfConfig) -> int:
    """Multi-token-prediction layers that a checkpoint may have after those of the decoder."""
    return next((int(hf_config[key]) for key in MTP_KEYS if hf_config.get(key)), 0)


def head_dim(hf_config: HfConfig) -> int:
    """Width of one attention head."""
    return int(hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"])


def indexer_layers(hf_config: HfConfig) -> list[int]:
    """Layers of sparse attention with an indexer of their own; each other layer uses the one nearest before it."""
    layers = range(hf_config["num_hidden_layers"])
    if kinds := hf_config.get("indexer_types"):
        return [layer for layer in layers if kinds[layer] == "full"]
    if pattern := hf_config.get("index_topk_pattern"):
        return [layer for layer in layers if pattern[layer] in ("F", "full")]
    every = max(int(hf_config.get("index_topk_freq") or 1), 1)
    offset = hf_config.get("index_skip_topk_offset")
    skipped = 2 if offset is None else int(offset)
    return [layer for layer in layers if max(layer - skipped + 1, 0) % every == 0]


def stage_problem(hf_config: HfConfig, layers: range) -> str | None:
    """Why these layers of sparse attention cannot be a pipeline stage of their own; None if they can."""
    indexers = indexer_layers(hf_config)
    if not layers or layers.start in indexers:
        return None
    before = max(layer for layer in indexers if layer < layers.start)
    after = min((layer for layer in indexers if layer > layers.start), default=hf_config["num_hidden_layers"])
    return (
        f"a pipeline stage starts on layer {layers.start} (from 0), which attends to what layer {before} selected in "
        f"another stage; start it on a layer with an indexer of its own, such as {before} or {after}, by "
        "parallel.pipeline_layers"
    )


@dataclass(frozen=True)
class Rope:
    """Rotary embedding.

    Attributes:
        kind: ``default``, or a kind of scaling.
        theta: base.
        fraction: of a head's width that is rotated.
        settings: all that is written, for the numbers that a kind of scaling has.
    """

    kind: str
    theta: float
    fraction: float
    settings: dict[str, Any]


def rope(hf_config: HfConfig) -> Rope:
    """The rotary embedding; its settings are nested in ``rope_parameters``, in ``rope_scaling``, or not nested.

    ValueError names one that is no number.
    """
    settings = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise ValueError(f"the rotary embedding's settings are {settings!r}; expected an object")

    def setting(key: str, default: float) -> float:
        value = settings.get(key) or hf_config.get(key) or default
        if not isinstance(value, int | float):
            raise ValueError(f"{key} = {value!r}; expected a number")
        return float(value)

    return Rope(
        kind=settings.get("rope_type") or settings.get("type") or "default",
        theta=setting("rope_theta", 10000.0),
        fraction=setting("partial_rotary_factor", 1.0),
        settings=settings,
    )
