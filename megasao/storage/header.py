"""The header of a safetensors file: names, dtypes, shapes and places; read with a check that the file is whole."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_POINTER = b"version https://git-lfs"
_LONGEST = 100_000_000
"""Bytes that the format allows a header."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor without its numbers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes begin in its file."""

    file: Path
    start: int
    info: TensorInfo


def read_header(file: Path) -> list[Place]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        ValueError: the file is no safetensors file, is truncated, or its tensors do not fill it exactly.
    """
    size = file.stat().st_size
    with file.open("rb", buffering=0) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_LONGEST, size - 8):
            stream.seek(0)
            if stream.read(len(_POINTER)) == _POINTER:
                raise ValueError(f"{file} is only a pointer of Git LFS; fetch the file itself with `git lfs pull`")
            raise ValueError(
                f"{file} is damaged, or no safetensors file: {size} bytes cannot hold its header; copy it again"
            )
        try:
            header = json.loads(stream.read(length).decode(), object_pairs_hook=_once)
            header.pop("__metadata__", None)
            found = [(_offsets(entry), _info(name, entry)) for name, entry in header.items()]
            found.sort(key=lambda item: item[0])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{file} is damaged, or no safetensors file: its header is unreadable ({error}); copy it again"
            ) from None
    places, end = [], 0
    for (begin, stop), info in found:
        if begin != end or stop - begin != info.nbytes:
            raise ValueError(
                f"{file} is damaged: {info.name} is said to be bytes {begin} to {stop} of its data; copy it again"
            )
        places.append(Place(file, 8 + length + begin, info))
        end = stop
    if size != 8 + length + end:
        what = "is truncated" if size < 8 + length + end else "is damaged"
        raise ValueError(f"{file} {what}: it has {size} bytes, and its header says {8 + length + end}; copy it again")
    return places


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. ValueError names what it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)} twice")
    return found


def _offsets(entry: Mapping[str, Any]) -> tuple[int, int]:
    begin, stop = map(_whole, entry["data_offsets"])
    return begin, stop


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no whole number")
    return number


def _info(name: str, entry: Mapping[str, Any]) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the dtype {entry['dtype']!r}; expected one of {', '.join(DTYPES)}")
    return TensorInfo(name, DTYPES[entry["dtype"]], tuple(map(_whole, entry["shape"])))


def make_header(infos: Sequence[TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and where in the file each tensor begins.

    Tensors of wide dtypes come first, so that each begins at a multiple of its element's size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for info in sorted(infos, key=lambda info: -info.dtype.itemsize):
        header[info.name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [end, end + info.nbytes],
        }
        starts[info.name] = end
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + start for name, start in starts.items()}
