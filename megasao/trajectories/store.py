"""Payload by trajectory id: where the trainer's ranks get the rows of a manifest. ``JournalStore`` is the controller's,
``hosted.PayloadJournal`` that of a rollout host.

Invariants:
- ``fetch`` gives the rows in the order asked for, exactly as they were journaled;
- a segment is deleted only when every row in it may be forgotten.
"""

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from megasao.trajectories.columns import SCHEMA
from megasao.trajectories.ipc import join
from megasao.trajectories.journal import Journal, Location, read_batch
from megasao.trajectories.validation import select_rows


class TrajectoryStore(Protocol):
    """Holds payload."""

    def fetch(self, trajectory_ids: list[str]) -> pa.RecordBatch:
        """The rows in this order. ValueError names ids that are not held."""


class JournalStore:
    """The store over one journal: rows lie in its segments, only their places in memory."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._places: dict[str, tuple[Location, int]] = {}
        self._segments: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._places

    @property
    def ids(self) -> list[str]:
        """The trajectories that are held, in order of arrival."""
        return list(self._places)

    def add(self, batch: pa.RecordBatch, location: Location) -> None:
        """Remember where the rows of a journaled batch lie."""
        ids = batch.column("trajectory_id").to_pylist()
        self._segments.setdefault(location.segment, []).extend(ids)
        for row, trajectory_id in enumerate(ids):
            self._places[trajectory_id] = (location, row)

    def fetch(self, trajectory_ids: list[str]) -> pa.RecordBatch:
        """See TrajectoryStore."""
        missing = [name for name in trajectory_ids if name not in self._places]
        if missing:
            raise ValueError(f"{len(missing)} trajectories are not in the journal, first {missing[0]!r}")
        places = [self._places[name] for name in trajectory_ids]
        batches: list[pa.RecordBatch] = []
        first_row: dict[Location, int] = {}
        rows = 0
        for location, _ in places:
            if location not in first_row:
                batch = read_batch(self._journal.path(location.segment), location.offset)
                first_row[location] = rows
                rows += batch.num_rows
                batches.append(batch)
        together = join(batches, SCHEMA)
        return select_rows(together, [first_row[location] + row for location, row in places])

    def forget(self, may_forget: Callable[[str], bool]) -> list[str]:
        """Delete closed segments whose every trajectory may be forgotten; returns the ids that are gone."""
        gone: list[str] = []
        for segment, ids in list(self._segments.items()):
            if not self._journal.is_open(segment) and all(map(may_forget, ids)):
                self._journal.delete(segment)
                del self._segments[segment]
                for name in ids:
                    self._places.pop(name, None)
                gone.extend(ids)
        return gone
