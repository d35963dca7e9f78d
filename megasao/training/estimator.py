"""The configured advantage estimator as a rank uses it: per row from values, or per trajectory from the manifest.

Invariants, asserted by the tests:
- every rank comes to the same advantage of a trajectory, whatever the layout and the packing;
- whitening uses the action tokens of all ranks;
- its state (the running mean's) is part of the checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megasao.algorithms.advantages import Advantages, estimate_from_values
from megasao.algorithms.baselines import RunningMeans, group_advantages
from megasao.config.algorithm import AlgorithmConfig, GroupBaseline, RunningMean
from megasao.ops.response import sequence_of_tokens
from megasao.training.batch import Batch, TrainRow

WHITEN_EPS = 1e-8

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sum over data-parallel ranks."""


class Estimator:
    """Advantages of a step. ``reduce`` sums a tensor over data-parallel ranks; every rank enters it."""

    def __init__(self, config: AlgorithmConfig, reduce: Reduce) -> None:
        self._options = config.advantages
        self._whiten = config.whiten
        self._reduce = reduce
        self._means = RunningMeans(self._options) if isinstance(self._options, RunningMean) else None

    def estimate(self, batch: Batch, values: Sequence[torch.Tensor]) -> list[Advantages]:
        """Per row. ``values``: float32 [T] per row, or none where the estimator needs no critic. Call once a step."""
        match self._options:
            case GroupBaseline() as options:
                estimates = _per_trajectory(batch, group_advantages(batch.entries, options))
            case RunningMean():
                assert self._means is not None
                estimates = _per_trajectory(batch, self._means.step(batch.entries))
            case _ as options:
                estimates = [
                    estimate_from_values(row.rewards, value, row.action_mask, row.cu_seqlens, options)
                    for row, value in zip(batch.rows, values, strict=True)
                ]
        return whiten(batch, estimates, self._reduce) if self._whiten else estimates

    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint; {} where nothing is remembered from step to step."""
        return self._means.state() if self._means is not None else {}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's ``state``."""
        if self._means is not None:
            self._means.load(state)


def whiten(batch: Batch, estimates: Sequence[Advantages], reduce: Reduce) -> list[Advantages]:
    """Advantages with mean 0 and variance 1 over the action tokens of all rows and ranks; returns are left alone."""
    chosen = [
        estimate.advantages[row.action_mask].double() for row, estimate in zip(batch.rows, estimates, strict=True)
    ]
    flat = torch.cat(chosen)
    count = max(batch.action_tokens, 1)
    mean = reduce(flat.sum()) / count
    variance = reduce((flat - mean).square().sum()) / count
    scale = 1 / (variance.sqrt() + WHITEN_EPS)
    return [
        Advantages(
            torch.where(row.action_mask, (estimate.advantages - mean) * scale, 0.0).to(estimate.advantages.dtype),
            estimate.returns,
            estimate.lam,
        )
        for row, estimate in zip(batch.rows, estimates, strict=True)
    ]


def _per_trajectory(batch: Batch, advantages: dict[str, float]) -> list[Advantages]:
    """One number a trajectory, at each of its action tokens."""
    return [Advantages(_spread(row, advantages)) for row in batch.rows]


def _spread(row: TrainRow, advantages: dict[str, float]) -> torch.Tensor:
    sequences = row.cu_seqlens.numel() - 1
    numbers = [advantages[trajectory.trajectory_id] for trajectory in row.trajectories]
    numbers += [0.0] * (sequences - len(numbers))  # padding
    per_sequence = torch.tensor(numbers, dtype=torch.float32)
    tokens = per_sequence[sequence_of_tokens(row.cu_seqlens, row.action_mask.numel())]
    return torch.where(row.action_mask, tokens, 0.0)
