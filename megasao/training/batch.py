"""One step's trajectories as this rank trains on them: packed rows of torch tensors.

Invariants:
- every data-parallel rank holds the same number of rows (a row may be a one-token dummy without actions);
- denominators come from the manifest, which every rank sees whole, so no split changes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megasao.megatron.rows import Row
from megasao.trajectories.packing import PackedRow, pack_row, plan
from megasao.trajectories.schema import Trajectory
from megasao.transport.messages import ManifestEntry


@dataclass(frozen=True)
class TrainRow:
    """A packed row and its per-token data. T tokens, B sequences."""

    row: Row
    action_mask: torch.Tensor
    """bool [T]"""
    rollout_logprobs: torch.Tensor
    """float32 [T]"""
    rewards: torch.Tensor
    """float32 [T]"""
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class Batch:
    """This rank's rows, and totals of the whole step over all ranks."""

    rows: tuple[TrainRow, ...]
    action_tokens: int
    sequences: int
    tokens: int
    entries: tuple[ManifestEntry, ...]
    """What is known of every trajectory of the step, in the manifest's order."""


def train_row(packed: PackedRow, trajectories: Sequence[Trajectory]) -> TrainRow:
    """Move a packed row to torch."""
    return TrainRow(
        row=Row(
            tokens=torch.from_numpy(packed.tokens),
            position_ids=torch.from_numpy(packed.position_ids),
            cu_seqlens=torch.from_numpy(packed.cu_seqlens),
            max_seqlen=packed.max_seqlen,
            temperature=torch.from_numpy(packed.temperature),
        ),
        action_mask=torch.from_numpy(packed.action_mask),
        rollout_logprobs=torch.from_numpy(packed.rollout_logprobs),
        rewards=torch.from_numpy(packed.rewards),
        trajectories=tuple(trajectories),
    )


def pack_trajectories(
    trajectories: Sequence[Trajectory], *, data_rank: int, data_size: int, token_budget: int
) -> Batch:
    """Plan the whole step from its lengths, and pack the rows of ``data_rank``."""
    by_id = {t.trajectory_id: t for t in trajectories}
    return pack_manifest(
        [entry_of(t) for t in trajectories],
        lambda ids: [by_id[trajectory_id] for trajectory_id in ids],
        data_rank=data_rank,
        data_size=data_size,
        token_budget=token_budget,
    )


def entry_of(trajectory: Trajectory) -> ManifestEntry:
    """What a manifest says of a trajectory."""
    return ManifestEntry(
        trajectory_id=trajectory.trajectory_id,
        tokens=len(trajectory.tokens),
        action_tokens=sum(trajectory.action_mask),
        oldest_version=trajectory.oldest_version or 0,
        newest_version=trajectory.newest_version,
        reward=sum(trajectory.rewards),
        truncated=trajectory.finish_reason != "done",
        prompt_id=trajectory.prompt_id,
        group_id=trajectory.group_id,
        task=trajectory.task,
    )


def pack_manifest(
    entries: Sequence[ManifestEntry],
    fetch: Callable[[list[str]], Sequence[Trajectory]],
    *,
    data_rank: int,
    data_size: int,
    token_budget: int,
) -> Batch:
    """The same from a manifest: fetch only what the rows of ``data_rank`` hold."""
    rows = plan([e.tokens for e in entries], data_size=data_size, token_budget=token_budget)[data_rank]
    wanted = [entries[i].trajectory_id for row in rows for i in row]
    payload = {t.trajectory_id: t for t in fetch(wanted)} if wanted else {}
    return Batch(
        rows=tuple(_pack([payload[entries[i].trajectory_id] for i in row]) for row in rows),
        action_tokens=sum(e.action_tokens for e in entries),
        sequences=len(entries),
        tokens=sum(e.tokens for e in entries),
        entries=tuple(entries),
    )


def _pack(trajectories: Sequence[Trajectory]) -> TrainRow:
    return train_row(pack_row(trajectories), trajectories)
