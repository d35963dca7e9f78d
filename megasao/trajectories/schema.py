"""One trajectory, as a dataclass and as an Arrow row (DESIGN section 5)."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trajectory:
    """One finished episode. All per-token lists have the same length T and are aligned with ``tokens``.

    ``rollout_logprobs[t]`` is log p(tokens[t] | tokens[:t]) under the sampled distribution where
    ``action_mask[t]``, and 0.0 elsewhere; None for objectives that need none.
    ``rewards[t]`` is the reward that arrived when token t had been seen.
    ``weight_versions`` is run-length over ``tokens``: (first index, version), starting at index 0. An observation
    token has the version of the action before it (the first action's, for the prompt).
    ``finish_reason``: ``done`` (the environment ended it), ``max_turns``, ``max_tokens``.
    """

    trajectory_id: str
    prompt_id: str
    group_id: str
    task: str
    tokens: list[int]
    action_mask: list[bool]
    rewards: list[float]
    weight_versions: list[tuple[int, int]]
    turn_starts: list[int]
    finish_reason: str
    rollout_logprobs: list[float] | None = None
    temperature: float = 1.0
    routed_experts: bytes | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    created_at: float = 0.0
    finished_at: float = 0.0

    @property
    def oldest_version(self) -> int:
        """The staleness of the trajectory is measured from this version."""
        return min(version for _, version in self.weight_versions)

    @property
    def newest_version(self) -> int:
        """The version of the last weights that produced a token."""
        return max(version for _, version in self.weight_versions)
