"""One step's trajectories as this rank trains on them: packed rows of torch tensors.

Invariants:
- every data-parallel rank holds the same number of rows (a row may be a one-token dummy without actions);
- denominators come from the manifest, which every rank sees whole, so no split changes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megasao.families.routing import Routing
from megasao.megatron.rows import Row
from megasao.trajectories.packing import PackedRow, pack_row, plan
from megasao.trajectories.schema import Trajectory
from megasao.transport.messages import ManifestEntry


@dataclass(frozen=True)
class TrainRow:
    """A packed row and its per-token data. T tokens, E trajectories (padding among them)."""

    row: Row
    """Its sequences are those of attention: the segments of the trajectories."""
    cu_seqlens: torch.Tensor
    """int32 [E + 1], of whole trajectories: returns run over a trajectory's segments."""
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


def train_row(packed: PackedRow, trajectories: Sequence[Trajectory], routing: Routing | None = None) -> TrainRow:
    """Move a packed row to torch; with ``routing``, also the experts that its trajectories' tokens went to."""
    return TrainRow(
        row=Row(
            tokens=torch.from_numpy(packed.tokens),
            position_ids=torch.from_numpy(packed.position_ids),
            cu_seqlens=torch.from_numpy(packed.cu_seqlens),
            max_seqlen=packed.max_seqlen,
            temperature=torch.from_numpy(packed.temperature),
            routed_experts=None if routing is None else _routed_experts(packed, trajectories, routing),
        ),
        cu_seqlens=torch.from_numpy(packed.trajectory_cu_seqlens),
        action_mask=torch.from_numpy(packed.action_mask),
        rollout_logprobs=torch.from_numpy(packed.rollout_logprobs),
        rewards=torch.from_numpy(packed.rewards),
        trajectories=tuple(trajectories),
    )


def _routed_experts(packed: PackedRow, trajectories: Sequence[Trajectory], routing: Routing) -> torch.Tensor:
    """int64 [T, M, K]. ValueError naming the trajectory whose ids are missing or not those of this model."""
    parts = []
    for trajectory in trajectories:
        try:
            parts.append(routing.decode(trajectory.routed_experts or b"", len(trajectory.tokens)))
        except ValueError as error:
            raise ValueError(f"trajectory {trajectory.trajectory_id}: {error}") from error
    padding = len(packed.tokens) - sum(map(len, parts))
    return torch.from_numpy(np.concatenate([*parts, routing.unknown(padding)]))


def pack_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    data_rank: int,
    data_size: int,
    token_budget: int,
    routing: Routing | None = None,
) -> Batch:
    """Plan the whole step from its lengths, and pack the rows of ``data_rank``."""
    by_id = {t.trajectory_id: t for t in trajectories}
    return pack_manifest(
        [entry_of(t) for t in trajectories],
        lambda ids: [by_id[trajectory_id] for trajectory_id in ids],
        data_rank=data_rank,
        data_size=data_size,
        token_budget=token_budget,
        routing=routing,
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
    routing: Routing | None = None,
) -> Batch:
    """The same from a manifest: fetch only what the rows of ``data_rank`` hold."""
    rows = plan([e.tokens for e in entries], data_size=data_size, token_budget=token_budget)[data_rank]
    wanted = [entries[i].trajectory_id for row in rows for i in row]
    payload = {t.trajectory_id: t for t in fetch(wanted)} if wanted else {}
    return Batch(
        rows=tuple(_pack([payload[entries[i].trajectory_id] for i in row], routing) for row in rows),
        action_tokens=sum(e.action_tokens for e in entries),
        sequences=len(entries),
        tokens=sum(e.tokens for e in entries),
        entries=tuple(entries),
    )


def _pack(trajectories: Sequence[Trajectory], routing: Routing | None) -> TrainRow:
    return train_row(pack_row(trajectories), trajectories, routing)
