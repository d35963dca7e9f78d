"""What a training checkpoint of one model is on disk: parts, a sum beside each, and a manifest written last.

A part is a safetensors file; its tensors are ``weight:NAME``, ``exp_avg:NAME`` and ``exp_avg_sq:NAME``, whole and under
their Hugging Face names, and ``carried:NAME`` for tensors that belong to the checkpoint and not to the model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasao.storage.atomic import sync
from megasao.storage.writer import checksum

FORMAT = "megasao-model-2"
MANIFEST = "manifest.json"
WEIGHT, CARRIED = "weight:", "carried:"
_INSTEAD = "restore it, or take an older checkpoint"


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:05d}.safetensors"


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write and sync."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(file)


def write_sum(part: Path, now_at: Path | None = None) -> None:
    """Record a finished part's length and checksum beside it; ``now_at`` is where it is until it is renamed."""
    file = now_at or part
    write_json(sum_file(part), {"bytes": file.stat().st_size, "crc32": checksum(file)})


def sum_file(part: Path) -> Path:
    """Where a part's length and checksum are."""
    return part.with_suffix(".sum.json")


def is_whole(part: Path, advance: Callable[[int], None] | None = None) -> bool:
    """Whether a part is what was written; ``advance`` is told of bytes as they are read."""
    try:
        written = json.loads(sum_file(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(written == {"bytes": part.stat().st_size, "crc32": checksum(part, advance)})


def damage(part: Path) -> str:
    """What to say of a part that is not whole."""
    return (
        f"{part} is damaged: its length or checksum is not what {sum_file(part).name} says; restore the file, or go "
        "back to an older checkpoint"
    )


def manifest_of(role: str, updates: int, parts: list[str], *, format: str = FORMAT) -> dict[str, Any]:
    """The manifest: whose model, how many updates its Adam state has seen (0: there is none), which parts."""
    return {"format": format, "role": role, "updates": updates, "parts": parts}


def read_manifest(directory: Path, *formats: str) -> dict[str, Any]:
    """The manifest of a checkpoint whose parts are all there; ``formats`` are those that the caller can read.

    Raises:
        ValueError: it is incomplete, or of another format.
    """
    file = directory / MANIFEST
    if not file.is_file():
        raise ValueError(f"{directory} is not a complete model checkpoint: it has no {MANIFEST}")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}; {_INSTEAD}") from None
    if not isinstance(manifest, dict):
        raise ValueError(f"{file} is not a JSON object; {_INSTEAD}")
    if manifest.get("format") not in formats:
        expected = " or ".join(map(repr, formats))
        raise ValueError(f"{file}: format {manifest.get('format')!r} is not supported; expected {expected}")
    role, parts = manifest.get("role"), manifest.get("parts")
    # Nothing outside of the directory is part of it.
    named = (
        isinstance(parts, list) and parts and all(isinstance(name, str) and Path(name).name == name for name in parts)
    )
    if role not in ("actor", "critic") or not named:
        raise ValueError(f"{file} has role = {role!r} and parts = {parts!r}; expected role and files; {_INSTEAD}")
    absent = [name for name in manifest["parts"] if not (directory / name).is_file()]
    if absent:
        raise ValueError(f"{directory} is not a complete model checkpoint: {absent[0]} is missing; {_INSTEAD}")
    return manifest
