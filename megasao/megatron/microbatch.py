"""A row as one rank's model sees it: padded where the layout asks for it, and cut over context-parallel ranks.

Invariants (tests assert them):

- padding changes no output and no gradient: it follows what is real, and attention is causal;
- under context parallelism every sequence is a multiple of 2 x CP tokens, under sequence parallelism every rank's part
  a multiple of TP; without variable lengths (all-gather dispatcher) all rows of all ranks have one length;
- under a virtual pipeline the number of micro-batches is a multiple of the stages.
"""

from dataclasses import dataclass
from math import lcm

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, distributed

from megasao.megatron.context import gather_outputs, whole_order, zigzag
from megasao.megatron.modules import PackedRow
from megasao.megatron.rows import Row
from megasao.megatron.runtime import compute_device


@dataclass(frozen=True)
class MicroBatch:
    """T tokens of the row, P >= T of the padded row, of which this rank has P / CP. Tensors are on its device.

    Attributes:
        index: the row's number.
        tokens, position_ids: int64 [P / CP].
        targets, temperature: [P / CP], the token that each output speaks of, and its temperature.
        cu_seqlens: int32 [B' + 1], of the padded row; ``max_seqlen`` is its longest sequence.
        real: int64 [T], places of the row's tokens in the padded row.
        order: int64 [P], places of the padded row's tokens in the parts of all ranks.
        row_cu_seqlens: int32 [B + 1], of the row itself.
        routed_experts: int64 [P / CP, M, K], see ``PackedRow``; or None.
    """

    index: int
    tokens: Tensor
    position_ids: Tensor
    targets: Tensor
    temperature: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    real: Tensor
    order: Tensor
    row_cu_seqlens: Tensor
    routed_experts: Tensor | None

    @property
    def size(self) -> int:
        """P, tokens of the padded row."""
        return len(self.order)

    def packed(self) -> PackedRow:
        """What the attention of one model chunk is told of the padded row: a new object for each pass over it."""
        return PackedRow(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            routed_experts=self.routed_experts,
        )

    def whole(self, outputs: Tensor) -> Tensor:
        """[..., T] of the row, from this rank's [..., P / CP], both aligned with the outputs. Collective over CP."""
        gathered = gather_outputs(outputs, self.order)
        return gathered if gathered.shape[-1] == len(self.real) else gathered.index_select(-1, self.real)


def micro_batches(rows: list[Row], config: TransformerConfig) -> list[MicroBatch]:
    """The rows as this rank's model takes them, and dummies after them if the schedule needs more. Collective.

    ``rows``: equally many on every rank.
    """
    stages = config.pipeline_model_parallel_size
    missing = -len(rows) % stages if config.virtual_pipeline_model_parallel_size else 0
    rows = rows + [Row.dummy()] * missing
    sizes = _sizes(rows, config)
    return [_prepare(index, row, config, size) for index, (row, size) in enumerate(zip(rows, sizes, strict=True))]


def _sizes(rows: list[Row], config: TransformerConfig) -> list[int]:
    """Padded length of each row."""
    ranks = config.context_parallel_size
    tensor = config.tensor_model_parallel_size if config.sequence_parallel else 1
    unit = _sequence_unit(config)
    multiple = lcm(unit, ranks * tensor)
    lengths = [int((-(-row.cu_seqlens.diff() // unit) * unit).sum()) for row in rows]
    sizes = [-(-length // multiple) * multiple for length in lengths]
    if config.variable_seq_lengths:
        return sizes
    longest = torch.tensor(max(sizes), device=compute_device())
    distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
    return [int(longest)] * len(rows)


def _sequence_unit(config: TransformerConfig) -> int:
    return 2 * config.context_parallel_size if config.context_parallel_size > 1 else 1


def _prepare(index: int, row: Row, config: TransformerConfig, size: int) -> MicroBatch:
    device = compute_device()
    bounds = row.cu_seqlens.cpu().long()
    lengths = bounds.diff()
    unit = _sequence_unit(config)
    padded = -(-lengths // unit) * unit
    tail = size - int(padded.sum())
    if tail:
        padded = torch.cat([padded, torch.tensor([tail])])
    starts = padded.cumsum(0) - padded
    position_ids = torch.arange(size) - starts.repeat_interleave(padded)
    real = torch.arange(len(row.tokens)) + (starts[: len(lengths)] - bounds[:-1]).repeat_interleave(lengths)
    cu_seqlens = torch.cat([starts, torch.tensor([size])]).to(torch.int32)
    tokens = torch.zeros(size, dtype=torch.int64).index_copy_(0, real, row.tokens.cpu())
    temperature = torch.ones(size).index_copy_(0, real, row.temperature.cpu())
    ranks = config.context_parallel_size
    own = zigzag(cu_seqlens, parallel_state.get_context_parallel_rank(), ranks) if ranks > 1 else torch.arange(size)
    return MicroBatch(
        index=index,
        tokens=tokens[own].to(device),
        position_ids=position_ids[own].to(device),
        targets=tokens.roll(-1)[own].to(device),
        temperature=temperature.roll(-1)[own].to(device),
        cu_seqlens=cu_seqlens.to(device),
        max_seqlen=int(padded.max()),
        real=real.to(device),
        order=(whole_order(cu_seqlens, ranks) if ranks > 1 else torch.arange(size)).to(device),
        row_cu_seqlens=row.cu_seqlens.to(device),
        routed_experts=None if row.routed_experts is None else _padded(row.routed_experts, real, size)[own].to(device),
    )


def _padded(routed_experts: Tensor, real: Tensor, size: int) -> Tensor:
    """[P, M, K] from [T, M, K]; padding goes to the first K experts, whatever comes of it."""
    padding = torch.arange(routed_experts.shape[-1]).expand(size, *routed_experts.shape[1:])
    return padding.index_copy(0, real, routed_experts.cpu())
