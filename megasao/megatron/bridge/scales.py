"""The scales of tensors in blocks of FP8 that tensor parallelism cuts.

Invariant, asserted by the tests: every rank has the scales that the whole tensor would give, also where a block has
numbers of two ranks.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from megasao.conversion.blocks import add_largest, scales
from megasao.megatron.runtime import compute_device

if TYPE_CHECKING:
    from megasao.megatron.bridge.outgoing import Outgoing


def agreed_scales(part: "Outgoing", most_bytes: int, refused: list[str]) -> list[Tensor]:
    """The scales of the part's HF tensors, whole; none without FP8. Collective over the ranks of its shards.

    What FP8 cannot hold is told in ``refused``, and gets scales of one, so that all ranks go on.
    """
    if not part.fp8:
        return []
    shapes = [info.shape for info in part.scale_infos]
    flat = torch.zeros(sum(map(math.prod, shapes)), device=compute_device())
    largest = [
        each.view(shape) for each, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)
    ]
    step = part.rows_within(most_bytes, 4)
    for index, rows in enumerate(part.rows):
        for start in range(0, rows, step):
            numbers = part.piece(index, start, min(start + step, rows))
            add_largest(largest[index], numbers, place=part.place(index, start))
    if part.local.shards > 1:
        distributed.all_reduce(flat, op=distributed.ReduceOp.MAX, group=part.local.group)
    result = []
    for info, each in zip(part.infos, largest, strict=False):
        try:
            result.append(scales(each))
        except ValueError as error:
            refused.append(f"{info.name} {error}")
            result.append(torch.ones_like(each))
    return result
