"""Writing one safetensors file piece by piece: its tensors are announced first, and memory holds a piece of one."""

import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megasao.storage.header import TensorInfo, make_header

_BLOCK = 1 << 22


def file_bytes(infos: Sequence[TensorInfo]) -> int:
    """Size of the file that has exactly these tensors."""
    return len(make_header(infos)[0]) + sum(info.nbytes for info in infos)


class TensorFileWriter:
    """A file of announced tensors, in any order, even interleaved; the pieces of one come in order, or say where."""

    def __init__(self, path: Path, infos: Sequence[TensorInfo]) -> None:
        header, self._starts = make_header(infos)
        self._next = dict(self._starts)
        self._ends = {info.name: self._next[info.name] + info.nbytes for info in infos}
        self._dtypes = {info.name: info.dtype for info in infos}
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        _write_fully(self._descriptor, memoryview(header), 0)

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def write(self, name: str, piece: Tensor) -> None:
        """Append a piece, of the announced dtype, to a tensor."""
        self._put(name, piece, self._next[name])

    def write_at(self, name: str, offset: int, piece: Tensor) -> None:
        """Write a piece that begins ``offset`` bytes inside its tensor. The pieces of a tensor must not overlap."""
        self._put(name, piece, self._starts[name] + offset)

    def _put(self, name: str, piece: Tensor, offset: int) -> None:
        assert piece.dtype == self._dtypes[name], f"{name}: announced as {self._dtypes[name]}, given {piece.dtype}"
        if not piece.numel():
            return
        data = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._next[name] += len(data)
        assert max(self._next[name], offset + len(data)) <= self._ends[name], f"{name}: more bytes than announced"
        _write_fully(self._descriptor, data, offset)

    def finish(self) -> None:
        """Every announced byte is written; on return they are on the disk."""
        assert self._next == self._ends, f"{self._path}: tensors that were announced are not complete"
        os.fsync(self._descriptor)


def checksum(file: Path, advance: Callable[[int], None] | None = None) -> int:
    """CRC-32 of a file; ``advance`` is told of bytes as they are read."""
    value, block = 0, memoryview(bytearray(min(_BLOCK, file.stat().st_size)))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(block):
            value = zlib.crc32(block[:count], value)
            if advance is not None:
                advance(count)
    return value


def _write_fully(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
