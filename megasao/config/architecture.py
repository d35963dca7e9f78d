"""What a checkpoint's config.json says about its layers, in either spelling that transformers has used."""

import json
from pathlib import Path
from typing import Any

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
_EXPERT_KEYS = ("num_experts", "num_local_experts")


def read_hf_config(path: Path) -> dict[str, Any]:
    """config.json of the checkpoint directory ``path``.

    Raises:
        ValueError: there is none, or it describes something that the models here do not cover.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a Hugging Face checkpoint: it has no config.json")
    try:
        hf_config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(hf_config, dict):
        raise ValueError(f"{file} is not a JSON object")
    _require(hf_config, "model_type", ("qwen3_moe", "qwen3"), file)
    _require(hf_config, "hidden_act", ("silu",), file)
    _require(hf_config, "attention_bias", (False, None), file)
    _require(hf_config, "use_sliding_window", (False, None), file)
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"{file}: rope scaling {rope} is not supported; only rope_type default is")
    _require_sizes(hf_config, file)
    return hf_config


def _require(hf_config: dict[str, Any], key: str, allowed: tuple[Any, ...], file: Path) -> None:
    value = hf_config.get(key)
    if value not in allowed:
        raise ValueError(f"{file}: {key} = {value!r} is not supported; expected {' or '.join(map(repr, allowed))}")


def _require_sizes(hf_config: dict[str, Any], file: Path) -> None:
    for key in _EXPERT_KEYS:
        if not isinstance(count := hf_config.get(key) or 0, int):
            raise ValueError(f"{file}: {key} = {count!r}; expected a whole number")
    for key in (*_SIZES, *(_MOE_SIZES if expert_count(hf_config) else ())):
        size = hf_config.get(key)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{file}: {key} = {size!r}; expected a whole number above 0")


def expert_count(hf_config: dict[str, Any]) -> int:
    """Routed experts per MoE layer; 0 for a dense model."""
    return next((int(hf_config[key]) for key in _EXPERT_KEYS if hf_config.get(key)), 0)


def is_moe_layer(hf_config: dict[str, Any], layer: int) -> bool:
    """Whether ``layer`` (from 0) has experts."""
    if expert_count(hf_config) == 0 or layer in (hf_config.get("mlp_only_layers") or []):
        return False
    return (layer + 1) % int(hf_config.get("decoder_sparse_step") or 1) == 0


def rope_theta(hf_config: dict[str, Any]) -> float:
    """Base of the rotary embedding, nested in ``rope_parameters`` or not."""
    nested = hf_config.get("rope_parameters") or {}
    return float(nested.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)
