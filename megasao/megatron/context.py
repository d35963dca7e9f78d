"""Context parallelism: the tokens of a packed row over several ranks, and attention across them.

Each sequence of a row, padded to a multiple of 2 x CP tokens, is cut into 2 x CP chunks; rank r has chunks r and
2 x CP - 1 - r (zig-zag), so that causal attention costs every rank the same.

Invariants (tests assert them):

- the ranks' parts, put together, are the row; outputs and gradients equal those of one rank that has the whole row;
- no buffer of size [T, T] is made or kept: scores exist for one tile of queries at a time, forward and backward;
- where queries see selected keys only, the result is that of the same selection on one rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def own_positions(cu_seqlens: Tensor) -> Tensor:
    """int64 [T / CP]: the place of each of this rank's tokens in its own sequence."""
    bounds, group = cu_seqlens.long(), parallel_state.get_context_parallel_group()
    lengths = bounds.diff()
    positions = torch.arange(int(bounds[-1]), device=bounds.device) - bounds[:-1].repeat_interleave(lengths)
    return positions if group.size() == 1 else positions[zigzag(cu_seqlens, group.rank(), group.size())]


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


def gather_parts(part: Tensor) -> Tensor:
    """[CP x n, ...] on every rank: the ranks' parts [n, ...] laid end to end. The ranks' gradients are summed."""
    whole: Tensor = tensor_parallel.gather_from_sequence_parallel_region(
        part.contiguous(), tensor_parallel_output_grad=True, group=parallel_state.get_context_parallel_group()
    )
    return whole


def gather_tokens(part: Tensor, order: Tensor) -> Tensor:
    """[T, ...] on every rank, from each rank's part [T / CP, ...]. The ranks' gradients are summed."""
    return gather_parts(part).index_select(0, order)


def context_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal attention of this rank's queries to the whole row's keys, which all ranks gather.

    ``query`` [T / CP, heads, d], ``key`` and ``value`` [T / CP, groups, d] -> [T / CP, heads, d of value].
    ``cu_seqlens``: int32 [B + 1] of the whole, padded row.
    """
    order = whole_order(cu_seqlens, parallel_state.get_context_parallel_world_size())
    return attend_to_row(query, gather_tokens(key, order), gather_tokens(value, order), cu_seqlens, scale)


def attend_to_row(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, selected: Tensor | None = None
) -> Tensor:
    """Causal attention of this rank's queries to the keys of the whole row, or to those selected for each.

    Args:
        query: [T / CP, heads, d].
        key, value: [T, groups, d], of the whole, padded row.
        cu_seqlens: int32 [B + 1], of that row.
        selected: int [T / CP, k], places of keys in the query's own sequence, none after the query's; None is all.

    Returns:
        [T / CP, heads, d of value].
    """
    parts = []
    for tile in own_tiles(cu_seqlens):
        keys = slice(tile.sequence, tile.end)
        given = query[tile.own], key[keys], value[keys], scale, None if selected is None else selected[tile.own]
        large = (tile.end - tile.start) * (tile.end - tile.sequence) > TILE * TILE
        parts.append(checkpoint(_tile, *given, use_reentrant=False) if large else _tile(*given))
    return torch.cat(parts)


@dataclass(frozen=True)
class Tile:
    """Queries that attend at a time, neighbours in one sequence of the whole row.

    Attributes:
        own: the queries among this rank's own tokens.
        sequence: start of their sequence in the row.
        start, end: the queries in the row.
    """

    own: slice
    sequence: int
    start: int
    end: int


def own_tiles(cu_seqlens: Tensor, most: Callable[[int], int] | None = None) -> Iterator[Tile]:
    """This rank's tokens in their own order, by tiles of TILE queries, or of ``most(length of the sequence)``."""
    group = parallel_state.get_context_parallel_group()
    rank, ranks = group.rank(), group.size()
    own = 0
    for first, last in pairwise(cu_seqlens.tolist()):
        size = (last - first) // (2 * ranks)
        step = TILE if most is None else most(last - first)
        for chunk in (rank, 2 * ranks - 1 - rank):
            for start in range(first + chunk * size, first + (chunk + 1) * size, step):
                end = min(start + step, first + (chunk + 1) * size)
                yield Tile(slice(own, own + end - start), first, start, end)
                own += end - start


def _tile(query: Tensor, key: Tensor, value: Tensor, scale: float, selected: Tensor | None = None) -> Tensor:
    """The last queries of a sequence's first keys: query i of n sees all but the last n - 1 - i keys, or selected."""
    queries, keys = len(query), len(key)
    mask = None
    if selected is not None:
        mask = torch.zeros(queries, keys, dtype=torch.bool, device=query.device).scatter_(-1, selected.long(), True)
    elif keys > queries:
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
