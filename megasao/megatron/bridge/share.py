"""A rank's share of the model's weights, as shards under Hugging Face names in one buffer of host memory.

As in :mod:`~megasao.megatron.bridge.outgoing`, ranks that hold the same bytes split them up; but what tensor
parallelism cuts is not put together on one of them: each rank gives its own shards, and nothing is sent between ranks
but, in FP8, the largest numbers of blocks.
Invariants, asserted by the tests: the shares of all ranks make every tensor whole, once, with the bytes that an export
gives it, in FP8 those that a conversion of the export gives it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megasao.megatron.bridge.outgoing import Outgoing, outgoing
from megasao.megatron.bridge.scales import agreed_scales
from megasao.weights.shared import ALIGNMENT, Piece, bucket_sum

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel


@dataclass(frozen=True)
class _Source:
    """Where a piece comes from."""

    of: Outgoing
    part: int
    piece: Piece


class RankShare:
    """This rank's share of ``model``, and the host memory that it is copied into, version after version."""

    def __init__(self, model: "MegatronModel", bucket_bytes: int, *, fp8: bool = False) -> None:
        """``bucket_bytes``, rounded down to whole words, is what one checksum is of. ``fp8``: see ``outgoing``."""
        self._model = model
        self._sources, self.total_bytes = _sources(outgoing(model, fp8=fp8))
        self.bucket_bytes = bucket_bytes // ALIGNMENT * ALIGNMENT
        # Memory that a GPU copies into directly.
        self._flat = torch.zeros(self.total_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    @property
    def pieces(self) -> list[Piece]:
        """What is in it."""
        return [source.piece for source in self._sources]

    @property
    def data(self) -> memoryview:
        """Its bytes."""
        return self._flat.numpy().data

    def fill(self) -> list[int]:
        """Copy the weights as they are now, and give the checksum of each bucket.

        Collective over data parallelism, and in FP8 over the ranks of a tensor. ValueError, at the end, names a tensor
        with numbers that FP8 cannot hold.
        """
        self._model.finish_gathering()
        bytes_, sums = self._flat.numpy(), list[int]()
        refused: list[str] = []
        scales: list[Tensor] = []
        for source in self._sources:
            if source.part == 0:
                scales = agreed_scales(source.of, self.bucket_bytes, refused)
            for filled in self._copy(source, scales):
                while (len(sums) + 1) * self.bucket_bytes <= filled:  # while it is in the cache
                    sums.append(self._sum(bytes_, len(sums)))
        while len(sums) * self.bucket_bytes < self.total_bytes:
            sums.append(self._sum(bytes_, len(sums)))
        if refused:
            raise ValueError(f"weights to publish: {refused[0]}")
        return sums

    def _sum(self, bytes_: np.ndarray, bucket: int) -> int:
        return bucket_sum(bytes_[bucket * self.bucket_bytes : (bucket + 1) * self.bucket_bytes])

    def _copy(self, source: _Source, scales: list[Tensor]) -> Iterator[int]:
        """Copy one piece, some rows at a time; how far the share is filled after each. ``scales``: of its tensors."""
        piece, target = source.piece, _rows(source.piece.view(self._flat))
        row = math.prod(target.shape[1:]) * target.element_size()
        each = max(self.bucket_bytes // max(row, 1), 1)
        for start in range(0, len(target), each):
            stop = min(start + each, len(target))
            target[start:stop].copy_(source.of.rows_of(source.part, start, stop, scales))
            yield piece.offset + stop * row


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)


def _sources(parts: Sequence[Outgoing]) -> tuple[list[_Source], int]:
    """The pieces that this rank gives, one behind the other, and their bytes."""
    sources: list[_Source] = []
    offset = 0
    for of in parts:
        if of.local.shards == 1 and not of.mine:
            continue
        for part in range(len(of.infos)):
            piece = _piece(of, part, offset)
            if piece is not None:
                sources.append(_Source(of, part, piece))
                offset += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return sources, offset


def _piece(of: Outgoing, part: int, offset: int) -> Piece | None:
    """This rank's shard of one HF tensor; None if it has only rows that fill up a vocabulary."""
    info, dim = of.infos[part], of.local.rule.shard
    if part >= len(of.rows) and not of.mine:  # scales are the same on all ranks of the group
        return None
    name, dtype, whole = info.name, str(info.dtype).removeprefix("torch."), tuple(info.shape)
    if dim is None or of.local.shards == 1 or part >= len(of.rows):
        return Piece(name, dtype, whole, 0, 0, whole, offset)
    shape = [of.rows[part], *of.local.parameter.shape[1:]]
    start = of.local.shard * shape[dim]
    shape[dim] = min(shape[dim], whole[dim] - start)
    return Piece(name, dtype, whole, dim, start, tuple(shape), offset) if shape[dim] > 0 else None
