"""Checkpoint directories that are whole as far as their headers go, and hold no tensors: quick to write, no torch."""

import json
from pathlib import Path
from typing import Any

from tools.make_laptop_model import write_tokenizer

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 96,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def write_checkpoint(directory: Path, *, without_token: str | None = None, **changes: Any) -> None:
    """config.json with ``changes``, the calculator's tokenizer (less one token), and weights that are none."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPE | changes))
    write_tokenizer(directory)
    if without_token is not None:
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        del tokenizer["model"]["vocab"][without_token]
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
