"""Trajectories that wait for training: what is known of each without its payload. Pure, no clock, no files.

Invariants:
- first come, first trained;
- staleness is measured when a batch is assembled, from the OLDEST version in a trajectory (where versions were not
  recorded: from one that is not newer); time in flight and time in the queue both count; nothing with a lag above the
  bound is ever in a batch;
- a trajectory leaves the buffer exactly once, into a batch or dropped;
- a batch is whole groups, each in one piece, in the order in which they became complete.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Summary:
    """A trajectory without its payload. ``nbytes`` is its size in memory.

    ``newest_version`` is None where the rollout side recorded no versions; ``oldest_version`` is then a lower bound.
    """

    trajectory_id: str
    prompt_id: str
    group_id: str
    task: str
    tokens: int
    action_tokens: int
    oldest_version: int
    newest_version: int | None
    reward: float
    truncated: bool
    has_logprobs: bool
    has_routed_experts: bool
    nbytes: int

    def lag(self, version: int) -> int:
        """Weight updates between the oldest token and ``version``; 0 for a trajectory from a later version."""
        return max(0, version - self.oldest_version)


@dataclass(frozen=True)
class Assembly:
    """Outcome of asking for a batch: ``chosen`` is None while too few are complete and fresh enough.

    ``passed_over``: complete, but stale beyond the batch's quota; they still wait.
    """

    chosen: list[Summary] | None
    passed_over: list[Summary]


class TrajectoryBuffer:
    """FIFO of summaries."""

    def __init__(self) -> None:
        self._waiting: dict[str, Summary] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._waiting

    def add(self, summary: Summary) -> None:
        """Put one at the end; its id must be new."""
        assert summary.trajectory_id not in self._waiting, summary.trajectory_id
        self._waiting[summary.trajectory_id] = summary
        self.nbytes += summary.nbytes

    def take_stale(self, *, version: int, max_lag: int) -> list[Summary]:
        """Take out everything too stale for ``version``."""
        stale = [summary for summary in self._waiting.values() if summary.lag(version) > max_lag]
        self.remove(stale)
        return stale

    def assemble(
        self,
        *,
        version: int,
        groups: int,
        most_stale: int,
        expected: Callable[[str], int] = lambda group: 1,
        is_there: Callable[[str], bool] = lambda trajectory: True,
    ) -> Assembly:
        """Take out the first ``groups`` complete groups, if there are as many, with at most ``most_stale`` of lag > 0.

        ``expected`` says how many trajectories make a group complete, ``is_there`` whether a trajectory's payload can
        be had now: groups with others go on waiting.
        """
        open_groups: dict[str, list[Summary]] = {}
        chosen: list[Summary] = []
        passed_over: list[Summary] = []
        taken = stale = 0
        for summary in self._waiting.values():
            members = open_groups.setdefault(summary.group_id, [])
            members.append(summary)
            if taken == groups or len(members) < expected(summary.group_id):
                continue
            del open_groups[summary.group_id]
            if not all(is_there(member.trajectory_id) for member in members):
                continue
            old = sum(member.lag(version) > 0 for member in members)
            if stale + old > most_stale:
                passed_over += members
                continue
            chosen += members
            taken, stale = taken + 1, stale + old
        if taken < groups:
            return Assembly(None, passed_over)
        self.remove(chosen)
        return Assembly(chosen, passed_over)

    def of_group(self, group: str) -> list[Summary]:
        """The waiting trajectories of a group."""
        return [summary for summary in self._waiting.values() if summary.group_id == group]

    def waiting(self) -> Iterator[Summary]:
        """All that wait, first come first."""
        return iter(self._waiting.values())

    def remove(self, summaries: list[Summary]) -> None:
        """Take these out."""
        for summary in summaries:
            del self._waiting[summary.trajectory_id]
            self.nbytes -= summary.nbytes


def summarise(batch: pa.RecordBatch, version_of: Callable[[str], int] = lambda name: 0) -> list[Summary]:
    """The summaries of a valid batch (columns of SCHEMA).

    ``version_of`` gives the version that no token of a trajectory is older than, where the row does not say.
    """
    return [_summary(batch.slice(row, 1), version_of) for row in range(batch.num_rows)]


def _summary(row: pa.RecordBatch, version_of: Callable[[str], int]) -> Summary:
    def value(name: str) -> Any:
        return row.column(name)[0].as_py()

    mask = row.column("action_mask").flatten().to_numpy(zero_copy_only=False)
    tagged = row.column("weight_versions").null_count == 0
    versions = row.column("weight_versions").flatten().field("version").to_numpy(zero_copy_only=False)
    rewards = row.column("rewards").flatten().to_numpy(zero_copy_only=False)
    return Summary(
        trajectory_id=value("trajectory_id"),
        prompt_id=value("prompt_id"),
        group_id=value("group_id"),
        task=value("task"),
        tokens=len(mask),
        action_tokens=int(mask.sum()),
        oldest_version=int(versions.min()) if tagged else version_of(value("trajectory_id")),
        newest_version=int(versions.max()) if tagged else None,
        reward=float(rewards.sum(dtype=np.float64)),
        truncated=value("finish_reason") != "done",
        has_logprobs=row.column("rollout_logprobs").null_count == 0,
        has_routed_experts=row.column("routed_experts").null_count == 0,
        nbytes=row.nbytes,
    )
