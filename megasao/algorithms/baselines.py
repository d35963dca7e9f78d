"""Advantages from rewards alone: one number a trajectory, from the manifest of the whole step. Pure, no torch.

Invariants that the tests assert:
- the result depends on the manifest alone, so it is the same on every rank and for every packing;
- the advantages of a group sum to 0 (to rounding);
- a reward is in the running mean only after the step that it belongs to; the state saved and loaded goes on the same.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from megasao.config.algorithm import GroupBaseline, RunningMean
from megasao.transport.messages import ManifestEntry

STD_EPS = 1e-6
MOST_KEYS = 100_000
"""Prompts (or tasks) whose rewards are remembered; beyond, the one that was heard of longest ago is forgotten."""


def group_advantages(entries: Sequence[ManifestEntry], options: GroupBaseline) -> dict[str, float]:
    """By trajectory id: reward minus its group's mean.

    ``std``: divided by the group's population standard deviation + 1e-6 (GRPO). ``leave_one_out``: the baseline is
    the mean of the others, G/(G-1) times the above. ``rescale``: times n / (n - m) for m of n trajectories in groups
    whose rewards are all equal (GPG's alpha); 0 throughout if all are.

    Raises:
        ValueError: a group with one trajectory, whose advantage would be 0 whatever it did.
    """
    groups: dict[str, list[ManifestEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.group_id, []).append(entry)
    advantages: dict[str, float] = {}
    useful = 0
    for name, members in groups.items():
        if len(members) < 2:
            raise ValueError(
                f"group {name!r} has one trajectory in this step: its advantage would be 0 whatever it did; "
                "batches must hold whole groups of at least 2"
            )
        rewards = [member.reward for member in members]
        useful += len(members) if max(rewards) > min(rewards) else 0
        advantages |= dict(zip([m.trajectory_id for m in members], _relative(rewards, options), strict=True))
    scale = len(entries) / useful if options.rescale and useful else 1.0
    return {name: scale * advantage for name, advantage in advantages.items()}


def _relative(rewards: list[float], options: GroupBaseline) -> list[float]:
    mean, scale = fmean(rewards), 1.0
    if options.leave_one_out:
        scale *= len(rewards) / (len(rewards) - 1)
    if options.std:
        scale /= pstdev(rewards) + STD_EPS
    return [scale * (reward - mean) for reward in rewards]


class RunningMeans:
    """Means of the newest rewards, by prompt, by task, or over all."""

    def __init__(self, options: RunningMean) -> None:
        self._options = options
        self._rewards: dict[str, deque[float]] = {}

    def baseline(self, entry: ManifestEntry) -> float:
        """The mean of the newest ``window`` earlier rewards; ``initial`` where there is none."""
        rewards = self._rewards.get(self._key(entry))
        return fmean(rewards) if rewards else self._options.initial

    def step(self, entries: Sequence[ManifestEntry]) -> dict[str, float]:
        """By trajectory id: reward minus the baseline of before this step. Takes the step's rewards in, in order."""
        advantages = {entry.trajectory_id: entry.reward - self.baseline(entry) for entry in entries}
        for entry in entries:
            key = self._key(entry)
            rewards = self._rewards.pop(key, None) or deque(maxlen=self._options.window)
            rewards.append(entry.reward)
            self._rewards[key] = rewards  # at the end: heard of last
        while len(self._rewards) > MOST_KEYS:
            del self._rewards[next(iter(self._rewards))]
        return advantages

    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint."""
        return {"rewards": [[key, list(rewards)] for key, rewards in self._rewards.items()]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. ValueError if it does not come from ``state``."""
        rewards = state.get("rewards")
        if not isinstance(rewards, list):
            raise ValueError(f"state of the running mean: expected a list 'rewards', got {sorted(state)}")
        self._rewards = {key: deque(values, maxlen=self._options.window) for key, values in rewards}
        assert all(math.isfinite(value) for values in self._rewards.values() for value in values)

    def _key(self, entry: ManifestEntry) -> str:
        match self._options.scope:
            case "prompt":
                return entry.prompt_id
            case "task":
                return entry.task
            case "global":
                return ""
