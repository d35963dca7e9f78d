"""The model's weights under Hugging Face names, piece by piece, spread over the ranks that hold them.

Unlike an export, nothing is gathered on rank 0: a tensor that tensor parallelism cuts is put together on one rank of
its group, and every rank does this for its share. Ranks that hold the same bytes (data parallelism, and tensors that
are not cut) share the work. Invariants, asserted by the tests:

- every tensor is written by exactly one rank, tied ones once, and has the bytes that an export gives it;
- beyond its weights a rank holds at most ``bucket_bytes``, or what a few rows of its widest tensor take, if more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed

from megasao.megatron.bridge.local import LocalParameter, local_parameters
from megasao.megatron.bridge.parts import split
from megasao.megatron.runtime import compute_device
from megasao.storage.header import TensorInfo
from megasao.weights.shares import spread

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel


class Rows(NamedTuple):
    """Some rows of a whole tensor, ``offset`` bytes inside it. To be let go of before the next ones are asked for."""

    name: str
    offset: int
    data: Tensor


@dataclass(frozen=True)
class Outgoing:
    """A parameter whose HF tensors this rank helps to put together.

    Attributes:
        infos: the HF tensors, whole.
        rows: of this rank's shard of each of them.
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

    def piece(self, part: int, start: int, stop: int) -> Tensor:
        """Rows of this rank's shard of one HF tensor."""
        tensor = at_least_1d(self.local.parameter.detach())
        if self.local.rule.kind == "qkv":  # interleaved, so that a view of one part has no rows
            which = split(self.local.rule, torch.arange(len(tensor), device=tensor.device), self.hf_config)[part]
            return tensor.index_select(0, which[start:stop])
        first = sum(self.rows[:part])
        return tensor[first + start : first + stop]


@dataclass(frozen=True)
class Chunk:
    """Rows ``start`` to ``stop`` of this rank's shard of one HF tensor."""

    of: Outgoing
    part: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's numbers."""
        return self.stop - self.start, *self.of.local.parameter.shape[1:]

    @property
    def nbytes(self) -> int:
        """Of this rank's numbers."""
        return math.prod(self.shape) * self.of.local.parameter.element_size()

    def tensor(self) -> Tensor:
        """This rank's numbers: a view, or a copy where rows of several tensors are interleaved."""
        return self.of.piece(self.part, self.start, self.stop)

    def view(self, flat: Tensor) -> Tensor:
        """The chunk of some rank at the beginning of ``flat``, uint8."""
        return flat[: self.nbytes].view(self.of.local.parameter.dtype).view(self.shape)


def outgoing(model: "MegatronModel") -> list[Outgoing]:
    """What this rank takes part in, dense parameters first, in the same order on the ranks of a shard group."""
    found = [local for local in local_parameters(model) if not local.rule.copy]
    result = []
    for expert in (False, True):
        mine = [local for local in found if local.rule.expert == expert]
        if not mine:
            continue
        replica, replicas = _replica(expert)
        group = mine[0].group.size()
        whole = [local.parameter.nbytes * local.shards for local in mine]
        for local, writer in zip(mine, spread(whole, replicas * group), strict=True):
            if writer // group == replica:
                infos, rows = _hf_parts(model, local)
                result.append(Outgoing(local, model.hf_config, infos, rows, writer % group))
    return result


def _replica(expert: bool) -> tuple[int, int]:
    """Which of how many copies of these parameters this rank holds."""
    if expert:
        return parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_data_parallel_world_size()
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def _hf_parts(model: "MegatronModel", local: LocalParameter) -> tuple[list[TensorInfo], list[int]]:
    """The HF tensors of a parameter, whole, and the rows of this rank's shard of each."""
    rule, tensor = local.rule, local.parameter
    rows = [len(part) for part in split(rule, torch.arange(len(at_least_1d(tensor))), model.hf_config)]
    infos = []
    for name, mine in zip(rule.hf, rows, strict=True):
        shape = [mine, *tensor.shape[1:]] if tensor.ndim else []
        if rule.shard is not None:
            shape[rule.shard] *= local.shards
        if rule.vocabulary:
            shape[0] = model.hf_config["vocab_size"]
        infos.append(TensorInfo(name, tensor.dtype, tuple(shape)))
    return infos, rows


def stream_rows(model: "MegatronModel", parts: list[Outgoing], bucket_bytes: int) -> Iterator[Rows]:
    """The rows of every tensor that this rank writes. Collective: every rank iterates to the end, whatever happens."""
    model.finish_gathering()
    for shared in (part for part in parts if part.local.shards == 1):
        if shared.mine:
            for chunk in _chunks(shared, bucket_bytes):
                yield Rows(shared.infos[chunk.part].name, _offset(chunk), chunk.tensor())
    for expert in (False, True):
        cut = [part for part in parts if part.local.shards > 1 and part.local.rule.expert == expert]
        for writer in range(cut[0].local.group.size() if cut else 0):
            yield from _gathered([part for part in cut if part.writer == writer], bucket_bytes)


def _gathered(parts: list[Outgoing], bucket_bytes: int) -> Iterator[Rows]:
    """What one rank of a group writes, from all of its ranks: one flat bucket after another."""
    shards = parts[0].local.shards if parts else 1
    room = bucket_bytes // (2 * shards + 2)  # what is sent, what arrives, gloo's copy of that or what is made of it
    bucket: list[Chunk] = []
    filled = 0
    for part in parts:
        for chunk in _chunks(part, room):
            if bucket and filled + _aligned(chunk) > room:
                yield from _gather(bucket)
                bucket, filled = [], 0
            bucket.append(chunk)
            filled += _aligned(chunk)
    if bucket:
        yield from _gather(bucket)


def _chunks(part: Outgoing, most_bytes: int) -> Iterator[Chunk]:
    """The part's tensors in groups of rows of at most ``most_bytes`` of this rank's shard, or of a single row."""
    for index, rows in enumerate(part.rows):
        tensor = at_least_1d(part.local.parameter)
        row = math.prod(tensor.shape[1:]) * tensor.element_size()
        each = max(most_bytes // max(row, 1), 1)
        for start in range(0, rows, each):
            yield Chunk(part, index, start, min(start + each, rows))


def _gather(bucket: list[Chunk]) -> Iterator[Rows]:
    """One flat bucket of every rank of the group, on the rank that writes; what it holds of whole tensors."""
    group, writer = bucket[0].of.local.group, bucket[0].of.writer
    sizes = [_aligned(chunk) for chunk in bucket]
    mine = torch.empty(sum(sizes), dtype=torch.uint8, device=compute_device())
    for chunk, flat in zip(bucket, mine.split(sizes), strict=True):
        chunk.view(flat).copy_(chunk.tensor())
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
