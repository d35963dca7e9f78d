"""Which session holds which KV slot, and which of its tokens are cached there.

Token ids are the truth, the cache is only a help: a slot remembers the ids whose keys and values it holds, and only a
common prefix with the new request is reused.

Invariants, asserted by the tests:
- a slot belongs to one session; a busy slot is never given away or moved;
- when no slot is free, the idle session used least recently loses its slot, and nothing but time is lost.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Slot:
    """One row of the KV cache. ``tokens``: ids at positions 0.. whose keys and values are valid."""

    index: int
    session_id: str | None = None
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    forget: bool = False


class SlotTable:
    """Slots of the KV cache, least recently used session first."""

    def __init__(self, count: int) -> None:
        self._free = [Slot(index) for index in reversed(range(count))]
        self._by_session: OrderedDict[str, Slot] = OrderedDict()
        self.evictions = 0

    def acquire(self, session_id: str, ids: Sequence[int]) -> Slot | None:
        """The session's slot, cut to the prefix it shares with ``ids`` (at least one token stays to be computed).

        None if every slot is busy, or the session's own one is.
        """
        slot = self._by_session.get(session_id)
        if slot is None:
            slot = self._take_unused()
            if slot is None:
                return None
            slot.session_id = session_id
            self._by_session[session_id] = slot
        elif slot.busy:
            return None
        slot.busy = True
        del slot.tokens[min(common_prefix(slot.tokens, ids), len(ids) - 1) :]
        return slot

    def release(self, slot: Slot) -> None:
        """The slot's request is over; the session keeps the slot for its next turn unless it has ended."""
        assert slot.busy and slot.session_id is not None
        slot.busy = False
        self._by_session.move_to_end(slot.session_id)
        if slot.forget:
            self._vacate(slot)

    def end_session(self, session_id: str) -> None:
        """Free the session's slot, at once or when its running request is over."""
        slot = self._by_session.get(session_id)
        if slot is None:
            return
        slot.forget = True
        if not slot.busy:
            self._vacate(slot)

    def invalidate(self) -> None:
        """Forget what is cached in every slot; sessions keep their slots."""
        for slot in self._by_session.values():
            slot.tokens.clear()

    def _take_unused(self) -> Slot | None:
        if not self._free:
            idle = next((slot for slot in self._by_session.values() if not slot.busy), None)
            if idle is None:
                return None
            self.evictions += 1
            self._vacate(idle)
        return self._free.pop()

    def _vacate(self, slot: Slot) -> None:
        assert slot.session_id is not None
        del self._by_session[slot.session_id]
        slot.session_id, slot.forget = None, False
        slot.tokens.clear()
        self._free.append(slot)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    limit = min(len(left), len(right))
    if list(left[:limit]) == list(right[:limit]):
        return limit
    return next(index for index in range(limit) if left[index] != right[index])
