"""The files of a Hugging Face checkpoint directory, beside and around its tensors."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasao.storage.documents import read_object

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


def file_names(count: int) -> list[str]:
    """What the safetensors files of a checkpoint are called."""
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return names if count > 1 else [SINGLE]


def index_of(places: Mapping[str, str], total_bytes: int) -> dict[str, Any]:
    """The content of the index: which file has which tensor, and the bytes of all."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}


def read_index(path: Path) -> dict[str, str] | None:
    """Which file has which tensor; None for a checkpoint of a single file.

    Raises:
        ValueError: the index cannot be read.
    """
    index = path / INDEX
    if not index.is_file():
        return None
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} has no weight_map, which says what tensor is in which file; copy it again")
    for name, file in places.items():
        if not isinstance(file, str) or not file:
            raise ValueError(f"{index} says {file!r} for {name}; expected the name of a file; copy it again")
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"{index} has {name} in {file}, outside of its directory; copy both again")
    return places


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


def side_files(path: Path) -> list[Path]:
    """Tokenizer, generation settings and chat template; a link may lead to nothing."""
    return [file for pattern in SIDE_FILES for file in path.glob(pattern) if not file.is_dir()]


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, generation settings and chat template."""
    for file in side_files(source):
        if file.is_file():
            shutil.copy2(file, target / file.name)
