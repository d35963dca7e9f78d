"""Payload by trajectory id: where the trainer's ranks get the rows of a manifest. ``JournalStore`` is the controller's,
``hosted.PayloadJournal`` that of a rollout host.

Invariants:
- ``fetch`` gives the rows in the order asked for, exactly as they were journaled; of what was journaled with them it
  holds one batch at a time;
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
        wanted: dict[Location, list[int]] = {}
        for location, row in dict.fromkeys(places):
            wanted.setdefault(location, []).append(row)
        parts = [select_rows(self._read(location), rows) for location, rows in wanted.items()]
        found = [(location, row) for location, rows in wanted.items() for row in rows]
        together = join(parts, SCHEMA)
        order = {place: number for number, place in enumerate(found)}
        return together if found == places else select_rows(together, [order[place] for place in places])

    def _read(self, location: Location) -> pa.RecordBatch:
        return read_batch(self._journal.path(location.segment), location.offset)

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
