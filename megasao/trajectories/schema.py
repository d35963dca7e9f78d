"""One trajectory, as a dataclass and as an Arrow row.

Invariants:
- ``from_batch(to_batch(t)) == t`` for every valid trajectory whose log-probs and rewards are float32 numbers;
- log-probs at observation tokens are 0 on both sides, whatever they were (NaN included).
"""

from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa

from megasao.trajectories.columns import SCHEMA, SCHEMA_VERSION, check_columns, conform
from megasao.trajectories.ipc import from_ipc, to_ipc
from megasao.trajectories.validation import select_rows, validate, validate_rows

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Trajectory",
    "check_columns",
    "conform",
    "from_batch",
    "from_ipc",
    "select_rows",
    "to_batch",
    "to_ipc",
    "validate",
    "validate_rows",
]


@dataclass(frozen=True)
class Trajectory:
    """One finished episode. All per-token lists have the same length T and are aligned with ``tokens``.

    ``segment_starts``: first index of each segment of a long episode, from 0 on; None is one segment. A segment is a
    context of its own: its tokens saw nothing of the segments before it.
    ``rollout_logprobs[t]`` is log p(tokens[t] | tokens before t in its segment) under the sampled distribution where
    ``action_mask[t]``, and 0.0 elsewhere; None for objectives that need none.
    ``rewards[t]`` is the reward that arrived when token t had been seen.
    ``weight_versions`` is run-length over ``tokens``: (first index, version), starting at index 0. An observation
    token has the version of the action before it (the first action's, for the prompt). None for objectives that need
    no versions.
    ``finish_reason``: ``done`` (the environment ended it), ``max_turns``, ``max_tokens``.
    """

    trajectory_id: str
    prompt_id: str
    group_id: str
    task: str
    tokens: list[int]
    action_mask: list[bool]
    rewards: list[float]
    weight_versions: list[tuple[int, int]] | None
    turn_starts: list[int]
    finish_reason: str
    segment_starts: list[int] | None = None
    rollout_logprobs: list[float] | None = None
    temperature: float = 1.0
    routed_experts: bytes | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    created_at: float = 0.0
    finished_at: float = 0.0

    @property
    def segment_lengths(self) -> list[int]:
        """Tokens of each segment."""
        bounds = [*(self.segment_starts or [0]), len(self.tokens)]
        return [end - start for start, end in pairwise(bounds)]

    @property
    def oldest_version(self) -> int | None:
        """The staleness of the trajectory is measured from this version; None where versions were not recorded."""
        return None if self.weight_versions is None else min(version for _, version in self.weight_versions)

    @property
    def newest_version(self) -> int | None:
        """The version of the last weights that produced a token; None where versions were not recorded."""
        return None if self.weight_versions is None else max(version for _, version in self.weight_versions)


def to_batch(trajectories: list[Trajectory]) -> pa.RecordBatch:
    """Rows in the order given, with the columns of SCHEMA. ValueError where a value does not fit its column."""
    rows = [_to_row(trajectory) for trajectory in trajectories]
    try:
        batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise ValueError(f"a trajectory does not fit the schema: {error}") from error
    return conform(batch)


def from_batch(batch: pa.RecordBatch) -> list[Trajectory]:
    """The trajectories of ``batch``, in order. ValueError naming column and row where it is not valid."""
    validate(batch)
    return [_from_row(row) for row in conform(batch).to_pylist()]


def _to_row(trajectory: Trajectory) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(trajectory, name) for name in SCHEMA.names}
    if trajectory.weight_versions is not None:
        row["weight_versions"] = [{"start": start, "version": version} for start, version in trajectory.weight_versions]
    row["metrics"] = list(trajectory.metrics.items())
    return row


def _from_row(row: dict[str, object]) -> Trajectory:
    spans, metrics = row["weight_versions"], row["metrics"]
    assert isinstance(spans, list | None) and isinstance(metrics, list)
    row["weight_versions"] = None if spans is None else [(span["start"], span["version"]) for span in spans]
    row["metrics"] = dict(metrics)
    return Trajectory(**row)  # type: ignore[arg-type]
