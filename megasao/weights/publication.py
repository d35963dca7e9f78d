"""The two-phase commit of one weight version, without sockets: who is required, ready, quarantined, committed.

Invariants, asserted by the tests:
- nobody is told to commit before every required receiver is ready or quarantined;
- both phases end at their deadline at the latest; who is missing then is quarantined by name and reason;
- a receiver that joins late is served but never waited for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megasao.weights.directory import PublishedWeights
from megasao.weights.flat import FlatWeights
from megasao.weights.mapped import MappedWeights
from megasao.weights.shared import SharedWeights

Elsewhere = PublishedWeights | SharedWeights | MappedWeights
"""A version that does not lie at the publisher: in a directory, or in the memory of all ranks."""

Payload = FlatWeights | Elsewhere
"""A version as it is announced."""


@dataclass(frozen=True)
class PublishResult:
    """How a version went out. ``engines``: names of receivers that run it; ``quarantined``: name to reason."""

    version: int
    engines: list[str]
    quarantined: dict[str, str]
    seconds: float
    megabytes: float


class Publication:
    """One version on its way. Times are seconds of one monotone clock; receivers are named by their identity."""

    def __init__(self, weights: Payload, required: Iterable[str], *, now: float, timeout_s: float) -> None:
        self.weights = weights
        self.required = set(required)
        self.ready: set[str] = set()
        self.committed: set[str] = set()
        self.quarantined: dict[str, str] = {}
        self.phase: Literal["prepare", "commit", "done"] = "prepare"
        self._started, self._timeout_s = now, timeout_s
        self.deadline = now + timeout_s

    def set_ready(self, name: str) -> None:
        """All of it is staged at ``name``."""
        self.ready.add(name)

    def set_committed(self, name: str) -> None:
        """``name`` runs it."""
        self.committed.add(name)

    def quarantine(self, name: str, reason: str) -> None:
        """Go on without ``name``; what it reports later no longer counts for this publication."""
        if name in self.required:
            self.quarantined.setdefault(name, reason)
        self.ready.discard(name)

    def outstanding(self) -> set[str]:
        """Who is waited for in this phase."""
        answered = self.ready if self.phase == "prepare" else self.committed
        return self.required - answered - self.quarantined.keys()

    def advance(self, now: float) -> set[str]:
        """Move to the next phase if its time has come; names that have just been quarantined for being late."""
        late: set[str] = set()
        if now >= self.deadline:
            late = self.outstanding()
            for name in late:
                verb = "was not ready" if self.phase == "prepare" else "did not commit"
                self.quarantine(name, f"{verb} within {self._timeout_s:g} s")
        if not self.outstanding() and self.phase != "done":
            self.phase = "commit" if self.phase == "prepare" else "done"
            self.deadline = now + self._timeout_s
        return late

    def result(self, now: float) -> PublishResult:
        """The account of a publication that is done."""
        assert self.phase == "done"
        return PublishResult(
            version=self.weights.version,
            engines=sorted(self.required - self.quarantined.keys()),
            quarantined=dict(self.quarantined),
            seconds=now - self._started,
            megabytes=self.weights.total_bytes / 2**20,
        )
