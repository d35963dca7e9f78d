"""The files of a Hugging Face checkpoint directory, beside and around its tensors."""

import json
import shutil
from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
)
"""What goes along from one checkpoint of a model to another, unchanged."""


def read_index(path: Path) -> dict[str, str] | None:
    """Which file has which tensor; None for a checkpoint of a single file.

    Raises:
        ValueError: the index cannot be read.
    """
    index = path / INDEX
    if not index.is_file():
        return None
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) for file in places.values()):
            raise ValueError("a tensor is in no file")
        return dict(places)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read: {type(error).__name__} {error}; copy it again") from None


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory: those of its index, or the single one.

    Raises:
        ValueError: one is missing.
    """
    index = read_index(path)
    if index is None and not (path / SINGLE).is_file():
        raise ValueError(
            f"{path} is not a complete Hugging Face checkpoint: {SINGLE} is missing, and so is {INDEX}; copy what is "
            "missing (only safetensors are read)"
        )
    names = sorted(set(index.values())) if index is not None else [SINGLE]
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{path} is not a complete Hugging Face checkpoint: {', '.join(absent)} is missing; copy it")
    return [path / name for name in names]


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, generation settings and chat template."""
    for pattern in SIDE_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, target / file.name)
