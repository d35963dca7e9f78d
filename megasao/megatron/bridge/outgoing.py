"""The model's weights under Hugging Face names, piece by piece, spread over the ranks that hold them.

Unlike an export, nothing is gathered on rank 0: a tensor that tensor parallelism cuts is put together on one rank of
its group, and every rank does this for its share. Ranks that hold the same bytes (data parallelism, and tensors that
are not cut) share the work. In FP8 the ranks of a group agree on the largest number of each block of the whole tensor,
wherever it is cut; then each quantises its shard by itself, and that is what is gathered. Invariants, asserted by the
tests:

- every tensor is written by exactly one rank, tied ones once, and has the bytes that an export gives it, in FP8 those
  that a conversion of the export gives it;
- beyond its weights a rank holds at most ``bucket_bytes``, or what a few rows of its widest tensor take, if more, and
  in FP8 the scales of one bucket's tensors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from megasao.conversion.blocks import FP8, Place, quantize_part, scale_shape
from megasao.families import Rule
from megasao.families.names import SCALE
from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import part_rows, split, split_views
from megasao.megatron.bridge.scales import agreed_scales
from megasao.megatron.runtime import compute_device
from megasao.storage.header import TensorInfo
from megasao.weights.shares import spread

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel

_QUANTISING = 16
"""Bytes that are held for each number while it is quantised, at most: three copies of it, and what comes out."""


class Rows(NamedTuple):
    """Some rows of a whole tensor, ``offset`` bytes inside it. To be let go of before the next ones are asked for."""

    name: str
    offset: int
    data: Tensor


@dataclass(frozen=True)
class Outgoing:
    """A parameter whose HF tensors this rank helps to put together.

    Attributes:
        infos: the HF tensors, whole; in FP8 then the scales of each.
        rows: of this rank's shard of each HF tensor.
        writer: the rank in the parameter's shard group that writes them.
    """

    local: LocalParameter
    hf_config: dict[str, Any]
    infos: list[TensorInfo]
    rows: list[int]
    writer: int

    @property
    def mine(self) -> bool:
        """Whether this rank writes them."""
        return self.writer == self.local.group.rank()

    @property
    def fp8(self) -> bool:
        """Whether they are written in blocks of FP8."""
        return self.infos[0].dtype == FP8

    def piece(self, part: int, start: int, stop: int) -> Tensor:
        """Rows of this rank's shard of one HF tensor."""
        tensor = at_least_1d(self.local.parameter.detach())
        if self.local.rule.kind == "qkv":  # interleaved, so that a view of one part has no rows
            which = split(self.local.rule, torch.arange(len(tensor), device=tensor.device), self.hf_config)[part]
            return tensor.index_select(0, which[start:stop])
        first = sum(self.rows[:part])
        return tensor[first + start : first + stop]

    def view(self, part: int) -> Tensor:
        """This rank's shard of one HF tensor, without a copy; of interleaved ones as [groups, rows of a group, ...]."""
        return split_views(self.local.rule, at_least_1d(self.local.parameter.detach()), self.hf_config)[part]

    @property
    def scale_infos(self) -> list[TensorInfo]:
        """The tensors of scales; none without FP8."""
        return self.infos[len(self.rows) :]

    def rows_within(self, most_bytes: int, width: int) -> int:
        """Rows of this rank's shard that fit where each number counts for ``width`` bytes; at least one."""
        row = math.prod(at_least_1d(self.local.parameter).shape[1:]) * width
        return max(most_bytes // max(row, 1), 1)

    def rows_of(self, part: int, start: int, stop: int, scales: list[Tensor]) -> Tensor:
        """Rows as they are written: a view of this rank's, or, in FP8, quantised with the scales of the whole tensors;
        of parts beyond the HF tensors, those scales."""
        if part >= len(self.rows):
            return scales[part - len(self.rows)][start:stop]
        numbers = self.piece(part, start, stop)
        return quantize_part(numbers, scales[part], place=self.place(part, start)) if self.fp8 else numbers

    def place(self, part: int, start: int) -> Place:
        """Where row ``start`` of this rank's shard of one HF tensor, a matrix, begins in the whole."""
        local = self.local
        row = local.shard * self.rows[part] if local.rule.shard == 0 else 0
        column = local.shard * local.parameter.shape[1] if local.rule.shard == 1 else 0
        return row + start, column


@dataclass(frozen=True)
class Chunk:
    """Rows ``start`` to ``stop`` of this rank's shard of one HF tensor; ``scales``: of all of the parameter's."""

    of: Outgoing
    part: int
    start: int
    stop: int
    scales: list[Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """What it is written in."""
        return self.of.infos[self.part].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's numbers."""
        return self.stop - self.start, *self.of.local.parameter.shape[1:]

    @property
    def nbytes(self) -> int:
        """Of this rank's numbers, as they are written."""
        return math.prod(self.shape) * self.dtype.itemsize

    def tensor(self) -> Tensor:
        """This rank's numbers: a view, or a copy where rows of several tensors are interleaved, or quantised."""
        return self.of.rows_of(self.part, self.start, self.stop, self.scales)

    def fill(self, target: Tensor, most_bytes: int) -> None:
        """Put this rank's numbers into ``target``; what is held for that takes ``most_bytes``, or is of one row."""
        rows = self.of.rows_within(most_bytes, _QUANTISING) if self.of.fp8 else len(target)
        for start in range(self.start, self.stop, max(rows, 1)):
            stop = min(start + rows, self.stop)
            target[start - self.start : stop - self.start] = self.of.rows_of(self.part, start, stop, self.scales)

    def view(self, flat: Tensor) -> Tensor:
        """The chunk of some rank at the beginning of ``flat``, uint8."""
        return flat[: self.nbytes].view(self.dtype).view(self.shape)


def outgoing(model: "MegatronModel", *, fp8: bool = False) -> list[Outgoing]:
    """What this rank takes part in, dense parameters first, in the same order on the ranks of a shard group.

    With ``fp8`` the products that the family's rules name are written in blocks of FP8.
    """
    found = [local for local in local_parameters(model) if not local.rule.copy]
    result = []
    for expert in (False, True):
        mine = [local for local in found if local.rule.expert == expert]
        if not mine:
            continue
        replica, replicas = _replica(expert)
        group = mine[0].group.size()
        whole = [
            sent_bytes(local.rule, local.parameter.numel() * local.shards, local.parameter.element_size(), fp8=fp8)
            for local in mine
        ]
        for local, writer in zip(mine, spread(whole, replicas * group), strict=True):
            if writer // group == replica:
                infos, rows = _hf_parts(model, local, fp8=fp8)
                result.append(Outgoing(local, model.hf_config, infos, rows, writer % group))
    return result


def sent_bytes(rule: Rule, numbers: int, width: int, *, fp8: bool) -> int:
    """Bytes by which the work is shared: those of a parameter's numbers, without the scales of FP8."""
    return numbers * (1 if fp8 and rule.fp8 else width)


def _replica(expert: bool) -> tuple[int, int]:
    """Which of how many copies of these parameters this rank holds."""
    if expert:
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def _hf_parts(model: "MegatronModel", local: LocalParameter, *, fp8: bool) -> tuple[list[TensorInfo], list[int]]:
    """The HF tensors of a parameter, whole, with their scales, and the rows of this rank's shard of each."""
    rule, tensor = local.rule, local.parameter
    rows = part_rows(rule, len(at_least_1d(tensor)), model.hf_config)
    infos = []
    for name, mine in zip(rule.hf, rows, strict=True):
        shape = [mine, *tensor.shape[1:]] if tensor.ndim else []
        if rule.shard is not None:
            shape[rule.shard] *= local.shards
        if rule.vocabulary:
            shape[0] = model.hf_config["vocab_size"]
        infos.append(TensorInfo(name, FP8 if fp8 and rule.fp8 else tensor.dtype, tuple(shape)))
    of_scales = [
        TensorInfo(info.name + SCALE, torch.float32, scale_shape(info.shape)) for info in infos if info.dtype == FP8
    ]
    return infos + of_scales, rows


def stream_rows(model: "MegatronModel", parts: list[Outgoing], bucket_bytes: int) -> Iterator[Rows]:
    """The rows of every tensor that this rank writes. Collective: every rank iterates to the end, whatever happens.

    Raises:
        ValueError: at the end, naming a tensor with numbers that FP8 cannot hold.
    """
    model.finish_gathering()
    refused: list[str] = []
    for shared in (part for part in parts if part.local.shards == 1):
        if shared.mine:
            found = agreed_scales(shared, bucket_bytes, refused)
            yield from _scale_rows(shared, found)
            for chunk in _chunks(shared, bucket_bytes, found, _QUANTISING):
                yield Rows(shared.infos[chunk.part].name, _offset(chunk), chunk.tensor())
    for expert in (False, True):
        cut = [part for part in parts if part.local.shards > 1 and part.local.rule.expert == expert]
        for writer in range(cut[0].local.group.size() if cut else 0):
            yield from _gathered([part for part in cut if part.writer == writer], bucket_bytes, refused)
    if refused:
        raise ValueError(f"weights to publish: {refused[0]}")


def _gathered(parts: list[Outgoing], bucket_bytes: int, refused: list[str]) -> Iterator[Rows]:
    """What one rank of a group writes, from all of its ranks: one flat bucket after another."""
    shards = parts[0].local.shards if parts else 1
    room = bucket_bytes // (2 * shards + 2)  # what is sent, what arrives, gloo's copy of that or what is made of it
    bucket: list[Chunk] = []
    filled = 0
    for part in parts:
        found = agreed_scales(part, bucket_bytes, refused)
        if part.mine:
            yield from _scale_rows(part, found)
        for chunk in _chunks(part, room, found):
            if bucket and filled + _aligned(chunk) > room:
                yield from _gather(bucket)
                bucket, filled = [], 0
            bucket.append(chunk)
            filled += _aligned(chunk)
    if bucket:
        yield from _gather(bucket)


def _chunks(part: Outgoing, most_bytes: int, scales: list[Tensor], width: int = 1) -> Iterator[Chunk]:
    """The part's tensors in groups of rows of at most ``most_bytes`` of this rank's shard, or of a single row.

    A number in FP8 counts for ``width`` bytes.
    """
    each = part.rows_within(most_bytes, width if part.fp8 else part.infos[0].dtype.itemsize)
    for index, rows in enumerate(part.rows):
        for start in range(0, rows, each):
            yield Chunk(part, index, start, min(start + each, rows), scales)


def _scale_rows(part: Outgoing, scales: list[Tensor]) -> Iterator[Rows]:
    for info, each in zip(part.scale_infos, scales, strict=True):
        yield Rows(info.name, 0, each)


def _gather(bucket: list[Chunk]) -> Iterator[Rows]:
    """One flat bucket of every rank of the group, on the rank that writes; what it holds of whole tensors."""
    group, writer = bucket[0].of.local.group, bucket[0].of.writer
    sizes = [_aligned(chunk) for chunk in bucket]
    mine = torch.empty(sum(sizes), dtype=torch.uint8, device=compute_device())
    for chunk, flat in zip(bucket, mine.split(sizes), strict=True):
        chunk.fill(chunk.view(flat), len(mine) * group.size())
    writes = group.rank() == writer
    found = [torch.empty_like(mine) for _ in range(group.size())] if writes else None
    distributed.gather(mine, found, dst=distributed.get_global_rank(group, writer), group=group)
    del mine
    if found is None:
        return
    by_rank = [flat.split(sizes) for flat in found]
    for index, chunk in enumerate(bucket):
        yield from _whole_rows(chunk, [chunk.view(pieces[index]) for pieces in by_rank])


def _aligned(chunk: Chunk) -> int:
    """Bytes in a bucket, so that whatever follows begins where its dtype may."""
    return -(-chunk.nbytes // 16) * 16


def _whole_rows(chunk: Chunk, pieces: list[Tensor]) -> Iterator[Rows]:
    """Rows of the whole tensor from the same rows of every shard."""
    info, rule = chunk.of.infos[chunk.part], chunk.of.local.rule
    if rule.shard != 0:
        yield Rows(info.name, _offset(chunk), torch.cat(pieces, dim=rule.shard or 0))
        return
    each = chunk.of.rows[chunk.part]
    for shard, piece in enumerate(pieces):
        first = shard * each + chunk.start
        kept = min(len(piece), info.shape[0] - first)  # rows that only fill up a vocabulary are left out
        if kept > 0:
            yield Rows(info.name, first * _row_bytes(info), piece[:kept])


def _offset(chunk: Chunk) -> int:
    return chunk.start * _row_bytes(chunk.of.infos[chunk.part])


def _row_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape[1:]) * info.dtype.itemsize


def at_least_1d(tensor: Tensor) -> Tensor:
    """The tensor; a single number as one row."""
    return tensor if tensor.ndim else tensor.reshape(1)
