"""Reading a checkpoint's config.json; what it means is in ``megasao.families``."""

import json
from pathlib import Path
from typing import Any

from megasao.families import family_of


def read_hf_config(path: Path) -> dict[str, Any]:
    """config.json of the checkpoint directory ``path``.

    Raises:
        ValueError: there is none, or it describes something that the models here do not cover.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a Hugging Face checkpoint: it has no config.json; give the directory that has")
    return read_architecture(file)


def read_architecture(file: Path) -> dict[str, Any]:
    """The same from a file of any name.

    Raises:
        ValueError: it cannot be read, or describes something that the models here do not cover.
    """
    try:
        hf_config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}; copy it again") from None
    if not isinstance(hf_config, dict):
        raise ValueError(f"{file} is not a JSON object, as every model's config.json is; copy it again")
    try:
        family_of(hf_config).check(hf_config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return hf_config
