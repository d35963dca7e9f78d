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
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from megasao.megatron.bridge.outgoing import Outgoing, outgoing
from megasao.megatron.bridge.scales import agreed_scales
from megasao.weights.shared import ALIGNMENT, Piece, ShareLayout, bucket_sum, encode_layout, encode_manifest

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel


@dataclass(frozen=True)
class _Source:
    """Where a piece comes from."""

    of: Outgoing
    part: int
    piece: Piece

    @property
    def end(self) -> int:
        """How far the share is filled once it is copied."""
        return self.piece.offset + self.piece.nbytes


class RankShare:
    """This rank's share of ``model``: what is in it, and where that comes from."""

    def __init__(self, model: "MegatronModel", bucket_bytes: int, *, fp8: bool = False) -> None:
        """``bucket_bytes``, rounded down to whole words, is what one checksum is of. ``fp8``: see ``outgoing``."""
        self.model = model
        self.bucket_bytes = bucket_bytes // ALIGNMENT * ALIGNMENT
        self.sources, self.total_bytes = _sources(outgoing(model, fp8=fp8))
        self.batches = _batches(self.sources, self.bucket_bytes)

    @cached_property
    def _layout(self) -> msgspec.Raw:
        pieces = [source.piece for source in self.sources]
        return encode_layout(ShareLayout(pieces, self.total_bytes, self.bucket_bytes))

    def manifest(self, sums: list[int]) -> bytes:
        """What a receiver needs to read it, with the checksums of its buckets."""
        return encode_manifest(self._layout, sums)


class ShareCopy:
    """Memory that a rank's share is copied into, version after version."""

    def __init__(self, share: RankShare, flat: Tensor) -> None:
        """``flat``: uint8 [share.total_bytes] on the host, page-locked or not."""
        assert len(flat) == share.total_bytes, (len(flat), share.total_bytes)
        self._share, self._flat = share, flat
        self._batches = [_Batch(sources, flat) for sources in share.batches]

    @property
    def data(self) -> memoryview:
        """Its bytes."""
        return self._flat.numpy().data

    def fill(self) -> list[int]:
        """Copy the weights as they are now, and give the checksum of each bucket.

        Collective over data parallelism, and in FP8 over the ranks of a tensor. ValueError, at the end, names a tensor
        with numbers that FP8 cannot hold.
        """
        share = self._share
        share.model.finish_gathering()
        bytes_, sums = self._flat.numpy(), list[int]()
        refused: list[str] = []
        scales: list[Tensor] = []
        for batch in self._batches:
            first = batch.sources[0]
            if first.part == 0:
                scales = agreed_scales(first.of, share.bucket_bytes, refused)
            for filled in batch.copy(scales, share.bucket_bytes):
                while (len(sums) + 1) * share.bucket_bytes <= filled:  # while it is in the cache
                    sums.append(self._sum(bytes_, len(sums)))
        while len(sums) * share.bucket_bytes < share.total_bytes:
            sums.append(self._sum(bytes_, len(sums)))
        if refused:
            raise ValueError(f"weights to publish: {refused[0]}")
        return sums

    def _sum(self, bytes_: np.ndarray, bucket: int) -> int:
        each = self._share.bucket_bytes
        return bucket_sum(bytes_[bucket * each : (bucket + 1) * each])


class _Batch:
    """Pieces that are copied together: small ones as they are, in one call; or a single one, by its rows."""

    def __init__(self, sources: list[_Source], flat: Tensor) -> None:
        self.sources, self._flat = sources, flat
        self._places: list[int] = []
        self._pairs: tuple[list[Tensor], list[Tensor]] = [], []

    def copy(self, scales: list[Tensor], bucket_bytes: int) -> Iterator[int]:
        """Copy; how far the share is filled after each step. ``scales``: of the tensors of a single piece."""
        if not _is_small(self.sources[0], bucket_bytes):
            yield from self._copy_rows(scales, bucket_bytes)
            return
        places = [source.of.local.parameter.data_ptr() for source in self.sources]
        if places != self._places:
            self._places, self._pairs = places, self._views()
        torch._foreach_copy_(*self._pairs)
        yield self.sources[-1].end

    def _views(self) -> tuple[list[Tensor], list[Tensor]]:
        """Where each piece goes, and where it comes from, without rows that fill up a vocabulary."""
        targets, origins = [], []
        for source in self.sources:
            target, origin = source.piece.view(self._flat), source.of.view(source.part)
            if source.of.local.rule.kind != "qkv":
                target, origin = _rows(target), origin[: len(_rows(target))]
            targets.append(target.view(origin.shape))
            origins.append(origin)
        return targets, origins

    def _copy_rows(self, scales: list[Tensor], bucket_bytes: int) -> Iterator[int]:
        (source,) = self.sources
        piece, target = source.piece, _rows(source.piece.view(self._flat))
        row = math.prod(target.shape[1:]) * target.element_size()
        each = max(bucket_bytes // max(row, 1), 1)
        for start in range(0, len(target), each):
            stop = min(start + each, len(target))
            target[start:stop].copy_(source.of.rows_of(source.part, start, stop, scales))
            yield piece.offset + stop * row


def _is_small(source: _Source, bucket_bytes: int) -> bool:
    """Whether it is copied at once and as it is."""
    return not source.of.fp8 and source.piece.nbytes <= bucket_bytes


def _batches(sources: Sequence[_Source], bucket_bytes: int) -> list[list[_Source]]:
    """Small neighbours together, up to a bucket, so that the checksums find them in the cache."""
    batches: list[list[_Source]] = []
    for source in sources:
        last = batches[-1] if batches else []
        joins = last and _is_small(last[0], bucket_bytes) and _is_small(source, bucket_bytes)
        if joins and source.end - last[0].piece.offset <= bucket_bytes:
            last.append(source)
        else:
            batches.append([source])
    return batches


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
