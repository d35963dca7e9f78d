"""Context parallelism: the tokens of a packed row over several ranks, and attention across them.

Each sequence of a row, padded to a multiple of 2 x CP tokens, is cut into 2 x CP chunks; rank r has chunks r and
2 x CP - 1 - r (zig-zag), so that causal attention costs every rank the same.

Invariants (tests assert them):

- the ranks' parts, put together, are the row; outputs and gradients equal those of one rank that has the whole row;
- no buffer of size [T, T] is made or kept: scores exist for one tile of queries at a time, forward and backward.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

TILE = 1024
"""Queries whose scores exist at one time."""


def zigzag(cu_seqlens: Tensor, rank: int, ranks: int) -> Tensor:
    """int64 [T / ranks]: the places in the whole row of the tokens that ``rank`` has, in its own order.

    ``cu_seqlens``: int32 [B + 1]; every sequence is a multiple of 2 x ``ranks`` tokens.
    """
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    assert not bool((lengths % (2 * ranks)).any()), f"lengths {lengths.tolist()} are no multiples of {2 * ranks}"
    chunks = lengths // (2 * ranks)
    starts = torch.stack([bounds[:-1] + rank * chunks, bounds[:-1] + (2 * ranks - 1 - rank) * chunks], dim=1).flatten()
    sizes = chunks.repeat_interleave(2)
    before = sizes.cumsum(0) - sizes
    total = int(sizes.sum())
    return torch.arange(total, device=bounds.device) + (starts - before).repeat_interleave(sizes, output_size=total)


def whole_order(cu_seqlens: Tensor, ranks: int) -> Tensor:
    """int64 [T]: where each token of the whole row stands in the ranks' parts laid end to end."""
    return torch.argsort(torch.cat([zigzag(cu_seqlens, rank, ranks) for rank in range(ranks)]))


def gather_outputs(part: Tensor, order: Tensor) -> Tensor:
    """[..., T] on every rank, from each rank's part [..., T / CP]; ``order`` as in :func:`whole_order`.

    Every rank goes on to compute the same from the whole: gradients come complete on each, and are cut, not summed.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return part
    whole = tensor_parallel.gather_from_sequence_parallel_region(
        part.movedim(-1, 0).contiguous(), tensor_parallel_output_grad=False, group=group
    )
    return whole.index_select(0, order).movedim(0, -1)


def gather_tokens(part: Tensor, order: Tensor) -> Tensor:
    """[T, ...] on every rank, from each rank's part [T / CP, ...]. The ranks' gradients are summed."""
    whole = tensor_parallel.gather_from_sequence_parallel_region(
        part.contiguous(), tensor_parallel_output_grad=True, group=parallel_state.get_context_parallel_group()
    )
    return whole.index_select(0, order)


def context_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal attention of this rank's queries to the whole row's keys, which all ranks gather.

    ``query`` [T / CP, heads, d], ``key`` and ``value`` [T / CP, groups, d] -> [T / CP, heads, d of value].
    ``cu_seqlens``: int32 [B + 1] of the whole, padded row.
    """
    group = parallel_state.get_context_parallel_group()
    order = whole_order(cu_seqlens, group.size())
    keys, values = gather_tokens(key, order), gather_tokens(value, order)
    parts = []
    for own, before, start, end in _tiles(cu_seqlens, group.rank(), group.size()):
        tile = query[own : own + end - start], keys[before:end], values[before:end]
        large = (end - start) * (end - before) > TILE * TILE
        parts.append(checkpoint(_tile, *tile, scale, use_reentrant=False) if large else _tile(*tile, scale))
    return torch.cat(parts)


def _tiles(cu_seqlens: Tensor, rank: int, ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """(place among the rank's own tokens, start of the sequence, first query, end of the queries), by tile."""
    bounds = cu_seqlens.tolist()
    own = 0
    for first, last in pairwise(bounds):
        size = (last - first) // (2 * ranks)
        for chunk in (rank, 2 * ranks - 1 - rank):
            for start in range(first + chunk * size, first + (chunk + 1) * size, TILE):
                end = min(start + TILE, first + (chunk + 1) * size)
                yield own, first, start, end
                own += end - start


def _tile(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The last queries of a sequence's first keys: query i of n sees all but the last n - 1 - i keys."""
    queries, keys = len(query), len(key)
    mask = None
    if keys > queries:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_(keys - queries)
    result = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result[0].transpose(0, 1)
