"""What a receiver keeps from one version to the next: memory, threads, connections to the trainer's ranks, groups.

Invariants, asserted by the tests:
- a connection is used by one thread at a time, and only for the rank that it leads to;
- connections to ranks that do not announce any more are closed, and what a group needs goes as a whole;
- no two groups that are made for this receiver, or another one, have the same name.
"""

import itertools
import secrets
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megasao.weights.ahead import Ahead
from megasao.weights.groups import Group
from megasao.weights.incoming import Link
from megasao.weights.messages import Place
from megasao.weights.shared import BufferPool

LANES = 16
"""Ranks that one receiver reads at once."""


@dataclass(eq=False)
class Stage:
    """The ranks of one pipeline stage, and the group that they are in with us, if one of them has bytes."""

    links: list[Link] = field(default_factory=list)
    group: Group | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        """Of the ranks, in their order."""
        return tuple(link.place for link in self.links)

    def end(self) -> None:
        """Close it all; it can be made anew."""
        for link in self.links:
            link.close()
        self.links, self.group = [], None


class Intake:
    """Of one receiver, ``name``."""

    def __init__(self, name: str = "receiver") -> None:
        self._name, self._made = f"{name}.{secrets.token_hex(8)}", itertools.count(1)
        self.memory = BufferPool()
        self.threads = ThreadPoolExecutor(LANES, thread_name_prefix="weights")
        self._ahead: Ahead | None = None
        self._stages: dict[tuple[Place, ...], Stage] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def has_stages(self) -> bool:
        """Whether there are groups, or connections for them, that nobody uses."""
        return bool(self._stages)

    def take_ahead(self) -> Ahead | None:
        """The connections to the ranks of a small version, and what has come over them, if nobody uses them."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        return ahead

    def keep_ahead(self, ahead: Ahead) -> None:
        """Nobody uses them now."""
        with self._lock:
            other, self._ahead = self._ahead, ahead
        if other is not None:
            other.end()

    def ask_ahead(self) -> None:
        """Ask the ranks of a small version for the one after it."""
        with self._lock:
            if self._ahead is not None:
                self._ahead.ask()

    def take_stage(self, places: tuple[Place, ...]) -> Stage | None:
        """The connections to the ranks of a stage, and the group, if there is one that nobody uses."""
        with self._lock:
            return self._stages.pop(places, None)

    def keep_stage(self, stage: Stage) -> None:
        """Nobody uses it now. After :meth:`close` it ends: who was given up may be done only then."""
        with self._lock:
            other = stage if self._closed else self._stages.get(stage.places)
            if not self._closed:
                self._stages[stage.places] = stage
        if other is not None:
            other.end()

    def group_name(self, epoch: str, stage: int) -> str:
        """Of a new group."""
        return f"weights/{epoch}/stage-{stage}/{self._name}/{next(self._made)}"

    def keep_only(self, places: Iterable[Place]) -> None:
        """Close the connections to all other ranks."""
        wanted = set(places)
        with self._lock:
            gone: list[Ahead | Stage] = [
                self._stages.pop(key) for key in list(self._stages) if not wanted.issuperset(key)
            ]
            if self._ahead is not None and not wanted.issuperset(self._ahead.places):
                gone.append(self._ahead)
                self._ahead = None
        for one in gone:
            one.end()

    def close(self) -> None:
        """End all connections and threads; what has begun ends by its own bound."""
        with self._lock:
            self._closed = True
        self.keep_only(())
        self.threads.shutdown(wait=False)
