"""Reading a checkpoint's config.json; what it means is in ``megasao.families``."""

import os
import stat
from pathlib import Path
from typing import Any

from megasao.families import families, family_of
from megasao.storage.documents import read_object

_GIVE = "give the directory of a Hugging Face checkpoint, with config.json (nothing is downloaded by its name)"


def config_file(path: Path) -> Path | None:
    """config.json of the checkpoint directory ``path``; None where nothing is there (yet).

    Raises:
        ValueError: something else is there, or it cannot be read.
    """
    file = path / "config.json"
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_GIVE}") from None
    try:
        if not path.is_dir():
            raise ValueError(f"{path} is not a directory; {_GIVE}")
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{file} is not a file; {_GIVE}")
    except FileNotFoundError:
        raise ValueError(f"{path} is not a Hugging Face checkpoint: it has no config.json; {_GIVE}") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}; {_GIVE}") from None
    return file


def existing_file(path: Path) -> Path:
    """config.json of the checkpoint directory ``path``.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    file = config_file(path)
    if file is None:
        raise ValueError(f"{path} does not exist; {_GIVE}")
    return file


def planned_file(path: Path, architecture: str | None) -> tuple[str, Path | None]:
    """What is planned with where ``path`` has no config.json, and the field of section ``model`` that says so.

    Raises:
        ValueError: see :func:`config_file`.
    """
    if architecture is not None and not os.path.isfile(path / "config.json"):
        return "model.architecture", Path(architecture)
    return "model.path", config_file(path)


def read_hf_config(path: Path) -> dict[str, Any]:
    """config.json of the checkpoint directory ``path``, with what transformers takes for settings that are not written.

    Raises:
        ValueError: there is none, or it describes something that the models here do not cover.
    """
    return read_architecture(existing_file(path))


def read_served_config(path: Path) -> dict[str, Any]:
    """As :func:`read_hf_config`, but for any model: one of no family here, which an engine may serve, is as written.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    hf_config = read_object(existing_file(path))
    known = hf_config.get("model_type") in families()
    return family_of(hf_config).completed(hf_config) if known else hf_config


def read_architecture(file: Path) -> dict[str, Any]:
    """The same from a file of any name.

    Raises:
        ValueError: it cannot be read, or describes something that the models here do not cover.
    """
    hf_config = read_object(file)
    try:
        family = family_of(hf_config)
        hf_config = family.completed(hf_config)
        family.check(hf_config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return hf_config
