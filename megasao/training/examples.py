"""Example trajectories with the trainer's own numbers beside the engine's, for the report.

Invariants:
- the log-probabilities and ratios are those of the policy that the step's update started from;
- numbers stand at action tokens only; at observation tokens they are None.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from megasao.environments.encoding import TokenizerCodec
from megasao.training.batch import Batch
from megasao.training.step import StepResult
from megasao.trajectories.schema import Trajectory


def example_rows(
    batch: Batch,
    logprobs: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    result: StepResult,
    codec: TokenizerCodec,
    *,
    count: int,
) -> list[dict[str, Any]]:
    """The first ``count`` trajectories of this rank's rows. ``logprobs`` float32, ``kept`` bool: [T] per row.

    What the algorithm does not have (values, returns, rollout log-probs, ratios) is left out.
    """
    examples: list[dict[str, Any]] = []
    for index, row in enumerate(batch.rows):
        bounds = row.cu_seqlens.tolist()
        per_token = {"logprobs": logprobs[index], "kept": kept[index], **_estimates(result, index)}
        for number, trajectory in enumerate(row.trajectories):
            if len(examples) == count:
                return examples
            part = slice(bounds[number], bounds[number + 1])
            numbers = {name: tensor[part].tolist() for name, tensor in per_token.items()}
            examples.append(_example(trajectory, numbers, codec))
    return examples


def _estimates(result: StepResult, index: int) -> dict[str, torch.Tensor]:
    estimate = result.advantages[index]
    tensors = {"advantages": estimate.advantages}
    if estimate.returns is not None:
        tensors["returns"] = estimate.returns
    if result.values:
        tensors["values"] = result.values[index]
    return tensors


def _example(trajectory: Trajectory, numbers: dict[str, list[Any]], codec: TokenizerCodec) -> dict[str, Any]:
    mask, rollout = trajectory.action_mask, trajectory.rollout_logprobs
    if rollout is not None:
        log_ratios = [ours - theirs for ours, theirs in zip(numbers["logprobs"], rollout, strict=True)]
        numbers = {**numbers, "rollout_logprobs": rollout, "ratio": [math.exp(min(x, 80.0)) for x in log_ratios]}
    return {
        "trajectory_id": trajectory.trajectory_id,
        "prompt_id": trajectory.prompt_id,
        "task": trajectory.task,
        "reward": sum(trajectory.rewards),
        "finish_reason": trajectory.finish_reason,
        "weight_versions": trajectory.weight_versions,
        "segment_starts": trajectory.segment_starts,
        "tokens": trajectory.tokens,
        "text": [codec.token_text(token) for token in trajectory.tokens],
        "action_mask": mask,
        **{
            name: [value if action else None for value, action in zip(values, mask, strict=True)]
            for name, values in numbers.items()
        },
    }
