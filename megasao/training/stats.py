"""Statistics of a step: combined over rows and data-parallel ranks without changing what they mean."""

import torch

from megasao.algorithms.stats import combine, is_maximum
from megasao.megatron.runtime import Topology
from megasao.ops.reference import Stats


def reduce_stats(stats: list[Stats], topology: Topology) -> Stats:
    """Combine over this rank's rows, then over ranks. Every rank enters, with the same names."""
    local = {name: value.double() for name, value in combine(stats).items()}
    maxima = sorted(name for name in local if is_maximum(name))
    sums = sorted(local.keys() - set(maxima))
    result = dict(zip(sums, topology.all_reduce_data(torch.stack([local[n] for n in sums])), strict=True))
    if maxima:
        largest = topology.all_reduce_data(torch.stack([local[n] for n in maxima]), op="max")
        result.update(zip(maxima, largest, strict=True))
    return result
