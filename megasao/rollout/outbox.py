"""What a worker has said and the controller has not yet acknowledged.

Invariants: a message leaves the outbox only by its ``Ack`` (or a refusal that names it); until then it is sent
again after every reconnection, and after ``resend_after_s`` of silence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Entry:
    """One numbered message as frames on the wire."""

    frames: list[Any]
    lease_ids: tuple[str, ...]
    sent_at: float | None = None


class Outbox:
    """Numbered messages in order. ``now`` is a monotonic clock in seconds, given by the caller."""

    def __init__(self, resend_after_s: float) -> None:
        self._resend_after_s = resend_after_s
        self._entries: dict[int, Entry] = {}
        self._next_seq = 0

    def __len__(self) -> int:
        return len(self._entries)

    def next_seq(self) -> int:
        """A number that was not used before."""
        self._next_seq += 1
        return self._next_seq

    def add(self, seq: int, frames: list[Any], lease_ids: tuple[str, ...]) -> None:
        """Keep a message until it is acknowledged."""
        assert seq not in self._entries, seq
        self._entries[seq] = Entry(frames, lease_ids)

    def settle(self, seq: int) -> bool:
        """``seq`` is acknowledged; False if it was settled before."""
        return self._entries.pop(seq, None) is not None

    def forget_sending(self) -> None:
        """The peer is new: everything counts as unsent."""
        for entry in self._entries.values():
            entry.sent_at = None

    def due(self, now: float) -> Iterator[Entry]:
        """Messages to send now, oldest first."""
        for entry in list(self._entries.values()):
            if entry.sent_at is None or now - entry.sent_at > self._resend_after_s:
                yield entry

    def lease_ids(self) -> set[str]:
        """Leases whose result waits here."""
        return {lease for entry in self._entries.values() for lease in entry.lease_ids}
