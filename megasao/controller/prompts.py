"""Which training rollout comes next, by index (with groups several are of one prompt: see ``groups``). Pure.

Invariants:
- every index is settled once: journaled, or given up after ``max_attempts`` failures or with its group;
- begun groups come first, then the lowest index;
- indices are durable in blocks before they are leased (``Reserved``), so that after a restart every index below the
  reservation is settled or comes again: none is skipped, none is used twice.
"""

from bisect import insort
from collections.abc import Callable

from megasao.trajectories.ledger import Failed, GaveUp, Record, Reserved

_BLOCK = 256


class IndexSet:
    """A set of indices that is dense from 0."""

    def __init__(self) -> None:
        self._below = 0
        self._beyond: set[int] = set()

    def __contains__(self, index: int) -> bool:
        return index < self._below or index in self._beyond

    def __len__(self) -> int:
        return self._below + len(self._beyond)

    def add(self, index: int) -> None:
        """Put ``index`` in."""
        if index >= self._below:
            self._beyond.add(index)
        while self._below in self._beyond:
            self._beyond.discard(self._below)
            self._below += 1


class PromptSource:
    """The stream of training prompts."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._cursor = 0
        self._reserved = 0
        self._again: list[int] = []
        self._orphans: set[int] = set()
        self._orphans_due = 0.0
        self._failures: dict[int, int] = {}
        self._settled = IndexSet()

    # recovery

    def restore(self, record: Record) -> None:
        """Take in a ledger record (others than this source's own are passed over)."""
        match record:
            case Reserved(below=below):
                self._cursor = self._reserved = max(self._reserved, below)
            case Failed(prompt_index=index):
                self._failures[index] = self._failures.get(index, 0) + 1
            case GaveUp(prompt_index=index):
                self.settle(index)

    def recovered(self, due: float) -> None:
        """All records and the journal were taken in; unsettled prompts come again at ``due``, unless adopted."""
        self._orphans = {index for index in range(self._reserved) if index not in self._settled}
        self._orphans_due = due

    # use

    def take(
        self,
        now: float,
        records: list[Record],
        *,
        begun: Callable[[int], bool] = lambda index: False,
        may_begin: bool = True,
    ) -> int | None:
        """The next rollout to lease; adds to ``records`` what must be durable before it is.

        One whose group is ``begun`` comes first; another only if a new group ``may_begin``, else None.
        """
        self._wake_orphans(now)
        self._again = [index for index in self._again if index not in self._settled]
        while self._cursor in self._settled:  # given up with its group, untouched
            self._cursor += 1
        waiting = next((index for index in self._again if begun(index)), None)
        if waiting is None and not begun(self._cursor):
            if not may_begin:
                return None
            waiting = self._again[0] if self._again else None
        if waiting is not None:
            self._again.remove(waiting)
            return waiting
        while self._cursor >= self._reserved:
            self._reserved += _BLOCK
            records.append(Reserved(self._reserved))
        self._cursor += 1
        return self._cursor - 1

    def _wake_orphans(self, now: float) -> None:
        if self._orphans and now >= self._orphans_due:
            for index in self._orphans:
                insort(self._again, index)
            self._orphans = set()

    def give_back(self, index: int) -> None:
        """Its lease ended without result, through no fault of the prompt."""
        if index not in self._settled:
            insort(self._again, index)

    def fail(self, index: int, reason: str, records: list[Record]) -> bool:
        """An attempt failed; whether the prompt is given up now."""
        if index in self._settled:
            return False
        records.append(Failed(index, reason))
        failures = self._failures[index] = self._failures.get(index, 0) + 1
        if failures < self._max_attempts:
            insort(self._again, index)
            return False
        self.give_up(index, reason, records)
        return True

    def give_up(self, index: int, reason: str, records: list[Record]) -> None:
        """The prompt will not be tried again."""
        records.append(GaveUp(index, reason))
        self.settle(index)

    def adopt(self, index: int) -> bool:
        """A worker says it is at work on this prompt; True if it was on nobody's lease and is still wanted."""
        if index in self._orphans:
            self._orphans.discard(index)
            return True
        if index in self._again and index not in self._settled:
            self._again.remove(index)
            return True
        return False

    def settle(self, index: int) -> None:
        """The prompt is done with."""
        self._settled.add(index)
        self._failures.pop(index, None)
        self._orphans.discard(index)

    def is_settled(self, index: int) -> bool:
        """Whether the prompt is done with."""
        return index in self._settled

    def is_known(self, index: int) -> bool:
        """Whether the prompt can ever have been leased."""
        return 0 <= index < self._reserved

    @property
    def settled(self) -> int:
        """How many prompts are done with."""
        return len(self._settled)
