"""Checkpoints in blocks of FP8 that SGLang can serve, and the float32 numbers that they stand for."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megasao.conversion.blocks import FP8, dequantize_blocks
from megasao.families.names import SCALE

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "head_dim": 64,
}
"""What SGLang fuses or cuts is whole blocks."""


def dequantised(fp8: Path, source: Path, out: Path, changed: dict[str, torch.Tensor] | None = None) -> Path:
    """The numbers of a checkpoint in FP8 that was made of ``source``; ``changed``: tensors in place of its own."""
    out.mkdir()
    tensors = load_file(fp8 / "model.safetensors") | (changed or {})
    whole = {
        name: dequantize_blocks(tensor, tensors[name + SCALE]) if tensor.dtype == FP8 else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }
    save_file(whole, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        (out / name).write_bytes((source / name).read_bytes())
    return out
