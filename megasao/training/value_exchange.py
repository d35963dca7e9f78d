"""Values of whole trajectories, as they pass between two worlds that pack the same step differently.

Invariants, asserted by the tests:
- the values of a step are one array, trajectory after trajectory in the manifest's order, whatever the layout;
- what one world's rows give, another world's rows get bit for bit, also where trajectories have several segments.
"""

from collections.abc import Iterator, Sequence

import torch

from megasao.megatron.runtime import Topology
from megasao.training.batch import Batch, TrainRow


def whole_step(batch: Batch, values: Sequence[torch.Tensor], topology: Topology) -> torch.Tensor:
    """float32 [tokens of the step] on every rank, from each rank's rows (float32 [T] per row). Collective."""
    starts = _starts(batch)
    step = torch.zeros(batch.tokens, dtype=torch.float32)
    for row, own in zip(batch.rows, values, strict=True):
        for name, part in _parts(row):
            step[starts[name] : starts[name] + part.stop - part.start] = own[part]
    return topology.all_reduce_data(step)


def of_rows(batch: Batch, step: torch.Tensor) -> list[torch.Tensor]:
    """float32 [T] for each of this rank's rows, from the values of the whole step; padding has 0."""
    starts = _starts(batch)
    rows = []
    for row in batch.rows:
        own = torch.zeros(row.action_mask.numel(), dtype=torch.float32)
        for name, part in _parts(row):
            own[part] = step[starts[name] : starts[name] + part.stop - part.start]
        rows.append(own)
    return rows


def _starts(batch: Batch) -> dict[str, int]:
    """Where each trajectory begins in the array of the step."""
    starts, position = {}, 0
    for entry in batch.entries:
        starts[entry.trajectory_id] = position
        position += entry.tokens
    return starts


def _parts(row: TrainRow) -> Iterator[tuple[str, slice]]:
    """Each trajectory of a row, and where it is there."""
    bounds = row.cu_seqlens.tolist()
    for number, trajectory in enumerate(row.trajectories):
        yield trajectory.trajectory_id, slice(bounds[number], bounds[number + 1])
