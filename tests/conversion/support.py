"""Running ``megasao convert`` in this process, and checkpoints to run it on."""

from pathlib import Path
from typing import Any

import pytest

from megasao.cli import main
from tests.megatron.tiny_families import write_tiny_family


def convert(*arguments: str | Path) -> int:
    """The exit code of ``megasao convert ARGUMENTS``."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    code: Any = ended.value.code
    return int(code or 0)


def write_family(directory: Path, family: str, dtype: str = "float32", **changes: Any) -> Path:
    """A random checkpoint that transformers wrote, with multi-token prediction, a tokenizer and settings."""
    import torch
    from safetensors.torch import load_file, save_file

    from megasao.studies.tiny_model import write_tokenizer

    write_tiny_family(directory, family, **changes)
    write_tokenizer(directory)
    if dtype != "float32":
        path = directory / "model.safetensors"
        tensors = {
            name: tensor if "e_score" in name else tensor.to(getattr(torch, dtype))
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
        config = (directory / "config.json").read_text().replace('"float32"', f'"{dtype}"')
        (directory / "config.json").write_text(config)
    return directory


def tensors_of(directory: Path) -> dict[str, Any]:
    """Every tensor of a directory, as the safetensors library reads it."""
    from safetensors.torch import load_file

    result: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        result.update(load_file(file))
    return result


def names_and_bytes(directory: Path) -> dict[str, Any]:
    """Name, dtype, shape and bytes of every tensor."""
    import torch

    return {
        name: (tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors_of(directory).items()
    }
