"""The units of a conversion: one tensor of a source becomes one or two of the output, a piece at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megasao.conversion.blocks import BLOCK, FP8, Block, dequantize_blocks, quantize_blocks, scale_shape
from megasao.families.names import SCALE
from megasao.storage.header import TensorInfo
from megasao.storage.reader import TensorFiles

PIECE = 32 << 20
"""Bytes of a tensor that are read at a time."""
Write = Callable[[str, Tensor], None]
Advance = Callable[[int], None]


class Task(Protocol):
    """What makes ``outputs``; it reads ``nbytes``."""

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The tensors that come out."""

    @property
    def nbytes(self) -> int:
        """What is read."""

    def run(self, write: Write, advance: Advance) -> None:
        """Make them; ``advance`` is told of bytes as they are read."""


@dataclass(frozen=True)
class Copy:
    """A tensor under another name, in another dtype, or neither."""

    source: TensorFiles
    name: str
    output: TensorInfo

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """One."""
        return (self.output,)

    @property
    def nbytes(self) -> int:
        """The tensor's."""
        return self.source.info(self.name).nbytes

    def run(self, write: Write, advance: Advance) -> None:
        """Bits are kept where the dtype is."""
        for piece in pieces(self.source, self.name):
            write(self.output.name, piece.to(self.output.dtype))
            advance(piece.nbytes)
            del piece  # before the next one is read


@dataclass(frozen=True)
class Quantize:
    """A matrix in blocks of FP8, and their scales."""

    source: TensorFiles
    name: str

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Numbers and scales."""
        shape = self.source.info(self.name).shape
        return (
            TensorInfo(self.name, FP8, shape),
            TensorInfo(self.name + SCALE, torch.float32, scale_shape(shape)),
        )

    @property
    def nbytes(self) -> int:
        """The matrix's."""
        return self.source.info(self.name).nbytes

    def run(self, write: Write, advance: Advance) -> None:
        """ValueError names a matrix that FP8 cannot hold."""
        for piece in pieces(self.source, self.name, BLOCK[0]):
            try:
                quantized, scale = quantize_blocks(piece)
            except ValueError as error:
                raise ValueError(f"{self.source.file(self.name)}: {self.name} {error}") from None
            write(self.name, quantized)
            write(self.name + SCALE, scale)
            advance(piece.nbytes)
            del piece, quantized, scale  # before the next one is read


@dataclass(frozen=True)
class Dequantize:
    """A matrix from blocks of FP8."""

    source: TensorFiles
    name: str
    block: Block
    output: TensorInfo

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """One."""
        return (self.output,)

    @property
    def nbytes(self) -> int:
        """Numbers and scales."""
        return self.source.info(self.name).nbytes + self.source.info(self.name + SCALE).nbytes

    def run(self, write: Write, advance: Advance) -> None:
        """The product in float32, then rounded to the output's dtype."""
        scales = self.source.read_whole(self.name + SCALE)
        advance(scales.nbytes)
        done = 0
        for piece in pieces(self.source, self.name, self.block[0]):
            count = -(-len(piece) // self.block[0])
            write(
                self.output.name, dequantize_blocks(piece, scales[done : done + count], self.block, self.output.dtype)
            )
            advance(piece.nbytes)
            done += count
            del piece  # before the next one is read


def pieces(source: TensorFiles, name: str, multiple: int = 1, most_bytes: int | None = None) -> Iterator[Tensor]:
    """A tensor in groups of rows, about ``most_bytes`` (``PIECE``) each and, but for the last, a multiple of rows."""
    info = source.info(name)
    if not info.shape or not info.nbytes:
        yield source.read_whole(name)
        return
    rows = max((most_bytes or PIECE) * info.shape[0] // info.nbytes // multiple, 1) * multiple
    for start in range(0, info.shape[0], rows):
        yield source.read_slice(name, 0, start, min(start + rows, info.shape[0]))
