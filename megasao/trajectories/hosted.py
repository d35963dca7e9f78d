"""A rollout host's own journal: payload that stays where it was made, and is fetched from there by id.

Invariants (tests assert them):
- what ``keep`` returned for is durable, and comes back after a crash of the process or the machine;
- a segment is deleted when every row in it may be forgotten, and not before;
- a row that breaks a rule, or that no message could carry, is refused and changes nothing;
- what is asked for and cannot be had, because it is not held or cannot be read, is said to be lacking.
"""

import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from megasao.config.lock import exclusive
from megasao.trajectories.buffer import Summary, summarise
from megasao.trajectories.columns import conform
from megasao.trajectories.journal import SEGMENT_BYTES, Journal
from megasao.trajectories.store import JournalStore
from megasao.trajectories.validation import validate
from megasao.transport.codec import MAX_PAYLOAD_BYTES

ROW_BYTES = MAX_PAYLOAD_BYTES - 2**20
"""Most of one row: with what Arrow puts around it, it must fit one message."""


class PayloadJournal:
    """The journal of one rollout host; a ``TrajectoryStore``. Any thread may call it."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, lock_wait_s: float = 0.0) -> None:
        """Recovers what can be read. ValueError: another process has it for ``lock_wait_s``."""
        directory.mkdir(parents=True, exist_ok=True)
        self._held = exclusive(directory / "lock", "rollout worker with this payload", wait_s=lock_wait_s)
        self._journal = Journal(directory, segment_bytes=segment_bytes)
        self._store = JournalStore(self._journal)
        self.directory = directory
        self._summaries: dict[str, Summary] = {}
        self._unwanted: set[str] = set()
        self._lacking: dict[str, None] = {}
        self._guard = threading.Lock()
        self.damage: list[str] = []
        """What could not be read, in words; of its rows those that are asked for are lacking."""
        for batch, location in self._journal.recover(self.damage.append):
            self._store.add(batch, location)
            self._remember(batch)
        self.discarded_bytes = self._journal.discarded_bytes
        """Of a torn tail: rows that nobody was told of."""

    def __len__(self) -> int:
        return len(self._store)

    @property
    def summaries(self) -> list[Summary]:
        """Of every trajectory that is held and may be wanted, in order of arrival."""
        with self._guard:
            return list(self._summaries.values())

    def keep(self, batch: pa.RecordBatch) -> list[Summary]:
        """Make rows durable; what is to be said of them. ValueError names the rule that one breaks: none is kept."""
        rows = conform(batch)
        validate(rows)
        _refuse_too_large(rows)
        with self._guard:
            self._store.add(rows, self._journal.append(rows))
            self._journal.sync()
            return self._remember(rows)

    def fetch(self, trajectory_ids: list[str]) -> pa.RecordBatch:
        """See TrajectoryStore."""
        with self._guard:
            try:
                return self._store.fetch(trajectory_ids)
            except ValueError:
                self._lacking |= dict.fromkeys(name for name in trajectory_ids if not self._can_read(name))
                raise

    def take_lacking(self) -> list[str]:
        """What was asked for since the last call and could not be had, in order."""
        with self._guard:
            lacking, self._lacking = list(self._lacking), {}
            return lacking

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Nobody will ask for these again; ids that are not held are passed over."""
        with self._guard:
            for name in trajectory_ids:
                if name in self._store:
                    self._unwanted.add(name)
                    self._summaries.pop(name, None)
            self._unwanted -= set(self._store.forget(self._unwanted.__contains__))

    def close(self) -> None:
        """Close the files; the lock goes last."""
        with self._guard:
            self._journal.close()
            self._held.close()

    def _can_read(self, trajectory_id: str) -> bool:
        try:
            self._store.fetch([trajectory_id])
        except ValueError:
            return False
        return True

    def _remember(self, rows: pa.RecordBatch) -> list[Summary]:
        summaries = summarise(rows)
        self._summaries |= {summary.trajectory_id: summary for summary in summaries}
        return summaries


def _refuse_too_large(rows: pa.RecordBatch) -> None:
    for row in range(rows.num_rows):
        if (size := rows.slice(row, 1).nbytes) > ROW_BYTES:
            raise ValueError(f"row {row}: {size} bytes, and nobody could fetch more than {ROW_BYTES} at once")
