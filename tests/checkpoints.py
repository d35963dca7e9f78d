"""Checkpoint directories whose tensors are zeros that take no place on the disk: quick to write, no torch."""

import json
import os
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from megasao.config.architecture import read_hf_config
from megasao.families.names import hf_names, shapes
from megasao.families.sizes import dimensions
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
    """config.json with ``changes``, the calculator's tokenizer (less one token), and weights of 0."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPE | changes))
    with suppress(ValueError):  # a config.json that cannot be describes no tensors
        write_zeros(directory / "model.safetensors", read_hf_config(directory))
    write_tokenizer(directory)
    if without_token is not None:
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        del tokenizer["model"]["vocab"][without_token]
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_zeros(file: Path, hf_config: dict[str, Any]) -> None:
    """Every tensor of the model in bfloat16, with holes for numbers."""
    header, end = dict[str, Any](), 0
    for name in sorted(hf_names(hf_config, "actor")):
        shape = dimensions(shapes(hf_config)[name], hf_config)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + 2 * prod(shape)]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
