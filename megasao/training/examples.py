"""Example trajectories with the trainer's own numbers beside the engine's, for the report.

Invariants:
- the log-probabilities and ratios are those of the policy that the step's update started from;
- numbers stand at action tokens only; at observation tokens they are None.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from megasao.config.algorithm import DisObjective
from megasao.environments.encoding import TokenizerCodec
from megasao.training.batch import Batch
from megasao.training.step import StepResult
from megasao.trajectories.schema import Trajectory


def example_rows(
    batch: Batch,
    logprobs: Sequence[torch.Tensor],
    result: StepResult,
    codec: TokenizerCodec,
    objective: DisObjective,
    *,
    count: int,
) -> list[dict[str, Any]]:
    """The first ``count`` trajectories of this rank's rows. ``logprobs``: float32 [T] per row."""
    examples: list[dict[str, Any]] = []
    for index, row in enumerate(batch.rows):
        bounds = row.row.cu_seqlens.tolist()
        for number, trajectory in enumerate(row.trajectories):
            if len(examples) == count:
                return examples
            part = slice(bounds[number], bounds[number + 1])
            numbers = {
                "logprobs": logprobs[index][part].tolist(),
                "values": result.values[index][part].tolist(),
                "advantages": result.advantages[index].advantages[part].tolist(),
                "returns": result.advantages[index].returns[part].tolist(),
            }
            examples.append(_example(trajectory, numbers, codec, objective))
    return examples


def _example(
    trajectory: Trajectory, numbers: dict[str, list[float]], codec: TokenizerCodec, objective: DisObjective
) -> dict[str, Any]:
    mask = trajectory.action_mask
    rollout = trajectory.rollout_logprobs or [0.0] * len(mask)
    log_ratios = [ours - theirs for ours, theirs in zip(numbers["logprobs"], rollout, strict=True)]
    low, high = math.log1p(-objective.eps_low), math.log1p(objective.eps_high)
    per_token: dict[str, list[Any]] = {
        **numbers,
        "rollout_logprobs": rollout,
        "ratio": [math.exp(min(x, 80.0)) for x in log_ratios],
        "kept": [low < x < high for x in log_ratios],
    }
    return {
        "trajectory_id": trajectory.trajectory_id,
        "prompt_id": trajectory.prompt_id,
        "task": trajectory.task,
        "reward": sum(trajectory.rewards),
        "finish_reason": trajectory.finish_reason,
        "weight_versions": trajectory.weight_versions,
        "tokens": trajectory.tokens,
        "text": [codec.token_text(token) for token in trajectory.tokens],
        "action_mask": mask,
        **{
            name: [value if action else None for value, action in zip(values, mask, strict=True)]
            for name, values in per_token.items()
        },
    }
