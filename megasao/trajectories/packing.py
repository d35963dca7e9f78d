"""Packing trajectories into micro-batch rows, balanced over data-parallel ranks. Numpy only, no torch.

Invariants that the tests assert:
- every trajectory is in exactly one row; every rank has the same number of rows (at least one);
- no row is longer than the token budget;
- a trajectory is in one piece; each of its segments is a sequence of its own, with positions from 0;
- the plan depends on the lengths alone, so every rank can compute it by itself;
- a row without trajectories is one masked token: collectives are entered, nothing is trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megasao.trajectories.schema import Trajectory

ATTENTION_LENGTH = 16384
"""Length at which attention is taken to cost as much as the rest of the model."""


def attention_cost(length: int) -> float:
    """Work of one trajectory in token units: linear part plus the quadratic part of attention."""
    return length + length * length / ATTENTION_LENGTH


@dataclass(frozen=True)
class PackedRow:
    """Trajectories one after another, flat, aligned with the token itself. T tokens, E trajectories, B >= E sequences.

    A sequence is what attends to itself: a trajectory, or one segment of it.
    ``tokens``, ``position_ids`` (from 0 in each sequence), ``sequence_ids`` (0 to B-1): int64 [T];
    ``cu_seqlens`` int32 [B+1]; ``max_seqlen`` the longest sequence; ``trajectory_cu_seqlens`` int32 [E+1];
    ``action_mask`` bool [T];
    ``rollout_logprobs`` (0 at observations, or where none were recorded), ``rewards``, ``temperature``: float32 [T];
    ``trajectory_ids`` of the real trajectories, in order: padding is a masked one of its own after them.
    """

    tokens: np.ndarray
    position_ids: np.ndarray
    sequence_ids: np.ndarray
    cu_seqlens: np.ndarray
    max_seqlen: int
    trajectory_cu_seqlens: np.ndarray
    action_mask: np.ndarray
    rollout_logprobs: np.ndarray
    rewards: np.ndarray
    temperature: np.ndarray
    trajectory_ids: tuple[str, ...]


def plan(
    lengths: Sequence[int], *, data_size: int, token_budget: int, cost: Callable[[int], float] = attention_cost
) -> list[list[list[int]]]:
    """Rows of trajectory indices for each rank: ``plan[rank][row]``, as few rows as found, balanced by ``cost``.

    Rows of the same number cost about the same on all ranks, as they run in step. A row may be empty.

    Raises:
        ValueError: a length below 1 or above ``token_budget`` (named by its index), or a size below 1.
    """
    _check_plan(lengths, data_size, token_budget)
    rows_per_rank = max(1, -(-sum(lengths) // (token_budget * data_size)))
    while (rows := _fill(lengths, rows_per_rank * data_size, token_budget, cost)) is None:
        rows_per_rank += 1
    return _deal(rows, [sum(cost(lengths[index]) for index in row) for row in rows], data_size)


def _check_plan(lengths: Sequence[int], data_size: int, token_budget: int) -> None:
    if data_size < 1 or token_budget < 1:
        raise ValueError(f"expected data_size >= 1 and token_budget >= 1, got {data_size} and {token_budget}")
    for index, length in enumerate(lengths):
        if not 1 <= length <= token_budget:
            raise ValueError(
                f"trajectory {index}: expected 1 to token_budget = {token_budget} tokens, got {length}; "
                "raise trainer.token_budget or lower environment.max_tokens"
            )


def _fill(lengths: Sequence[int], rows: int, token_budget: int, cost: Callable[[int], float]) -> list[list[int]] | None:
    """Longest first, each into the cheapest row that has room; None if one finds no room."""
    filled: list[list[int]] = [[] for _ in range(rows)]
    used, costs = np.zeros(rows, dtype=np.int64), np.zeros(rows)
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        candidates = np.where(used + lengths[index] <= token_budget, costs, np.inf)
        row = int(candidates.argmin())
        if candidates[row] == np.inf:
            return None
        filled[row].append(index)
        used[row] += lengths[index]
        costs[row] += cost(lengths[index])
    return filled


def _deal(rows: list[list[int]], costs: list[float], data_size: int) -> list[list[list[int]]]:
    """Deal rows to ranks in rounds of similar cost, the dearest of a round to the rank with the least so far."""
    ranks: list[list[list[int]]] = [[] for _ in range(data_size)]
    load = [0.0] * data_size
    dearest_first = sorted(range(len(rows)), key=lambda row: (-costs[row], row))
    for start in range(0, len(rows), data_size):
        idle_first = sorted(range(data_size), key=lambda rank: (load[rank], rank))
        for rank, row in zip(idle_first, dearest_first[start : start + data_size], strict=True):
            ranks[rank].append(sorted(rows[row]))
            load[rank] += costs[row]
    return ranks


def pack_row(trajectories: Sequence[Trajectory], *, multiple_of: int = 1) -> PackedRow:
    """One row of ``trajectories``; padded with one masked sequence to a multiple of ``multiple_of`` tokens.

    Sequence parallelism needs ``multiple_of`` = its size. Without trajectories the row is padding alone.

    Raises:
        ValueError: a trajectory is empty, its lists differ in length, or the first token of a segment is an action (no
            output precedes it, so it has no log-probability); or ``multiple_of`` is below 1.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of: expected a number >= 1, got {multiple_of}")
    for trajectory in trajectories:
        _check_trajectory(trajectory)
    whole = [len(trajectory.tokens) for trajectory in trajectories]
    lengths = [length for trajectory in trajectories for length in trajectory.segment_lengths]
    padding = -sum(lengths) % multiple_of if lengths else multiple_of
    if padding:
        whole, lengths = [*whole, padding], [*lengths, padding]
    mask = _flat([trajectory.action_mask for trajectory in trajectories], padding, False, np.bool_)
    logprobs = _flat([t.rollout_logprobs or [0.0] * len(t.tokens) for t in trajectories], padding, 0.0, np.float32)
    return PackedRow(
        tokens=_flat([trajectory.tokens for trajectory in trajectories], padding, 0, np.int64),
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        sequence_ids=np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
        cu_seqlens=_bounds(lengths),
        max_seqlen=max(lengths),
        trajectory_cu_seqlens=_bounds(whole),
        action_mask=mask,
        rollout_logprobs=np.where(mask, logprobs, np.float32(0)),
        rewards=_flat([trajectory.rewards for trajectory in trajectories], padding, 0.0, np.float32),
        temperature=_flat([[t.temperature] * len(t.tokens) for t in trajectories], padding, 1.0, np.float32),
        trajectory_ids=tuple(trajectory.trajectory_id for trajectory in trajectories),
    )


def _check_trajectory(trajectory: Trajectory) -> None:
    length = len(trajectory.tokens)
    where = f"trajectory {trajectory.trajectory_id!r}"
    if length == 0:
        raise ValueError(f"{where}: expected at least one token, got none")
    for name in ("action_mask", "rewards", "rollout_logprobs"):
        column = getattr(trajectory, name)
        if column is not None and len(column) != length:
            raise ValueError(f"{where}: expected {length} entries in {name} (one per token), got {len(column)}")
    if any(trajectory.action_mask[start] for start in trajectory.segment_starts or [0]):
        raise ValueError(f"{where}: expected an observation as first token (the prompt), got an action")


def _bounds(lengths: Sequence[int]) -> np.ndarray:
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _flat(parts: Sequence[Sequence[float]], padding: int, fill: float, dtype: type) -> np.ndarray:
    """The parts one after another, then ``padding`` times ``fill``."""
    arrays: list[np.ndarray] = [np.asarray(part, dtype=dtype) for part in parts]
    return np.concatenate([*arrays, np.full(padding, fill, dtype=dtype)])
