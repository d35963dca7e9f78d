"""What a checkpoint's config.json says about its layers, in either spelling that transformers has used."""

import json
from pathlib import Path
from typing import Any


def read_hf_config(path: Path) -> dict[str, Any]:
    """config.json of the checkpoint directory ``path``.

    Raises:
        ValueError: there is none, or it describes something that the models here do not cover.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a Hugging Face checkpoint: it has no config.json")
    hf_config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    _require(hf_config, "model_type", ("qwen3_moe", "qwen3"), file)
    _require(hf_config, "hidden_act", ("silu",), file)
    _require(hf_config, "attention_bias", (False, None), file)
    _require(hf_config, "use_sliding_window", (False, None), file)
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"{file}: rope scaling {rope} is not supported; only rope_type default is")
    return hf_config


def _require(hf_config: dict[str, Any], key: str, allowed: tuple[Any, ...], file: Path) -> None:
    value = hf_config.get(key)
    if value not in allowed:
        raise ValueError(f"{file}: {key} = {value!r} is not supported; expected {' or '.join(map(repr, allowed))}")


def expert_count(hf_config: dict[str, Any]) -> int:
    """Routed experts per MoE layer; 0 for a dense model."""
    return int(hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0)


def is_moe_layer(hf_config: dict[str, Any], layer: int) -> bool:
    """Whether ``layer`` (from 0) has experts."""
    if expert_count(hf_config) == 0 or layer in (hf_config.get("mlp_only_layers") or []):
        return False
    return (layer + 1) % int(hf_config.get("decoder_sparse_step") or 1) == 0


def rope_theta(hf_config: dict[str, Any]) -> float:
    """Base of the rotary embedding, nested in ``rope_parameters`` or not."""
    nested = hf_config.get("rope_parameters") or {}
    return float(nested.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)
