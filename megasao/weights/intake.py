"""What a receiver keeps from one version to the next: memory, threads, connections to the trainer's ranks, groups.

Invariants, asserted by the tests:
- a connection is used by one thread at a time, and only for the rank that it leads to;
- connections to ranks that do not announce any more are closed, and what a group needs goes as a whole;
- no two groups that are made for this receiver, or another one, have the same name.
"""

import itertools
import secrets
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megasao.weights.groups import Group
from megasao.weights.shared import BufferPool

LANES = 16
"""Ranks that one receiver reads at once."""

Place = tuple[str, int]
"""Host and port of a rank."""


@dataclass(frozen=True, eq=False)
class Link:
    """A connection to the rank at ``place``, which has given us this ``nonce`` for it."""

    place: Place
    connection: socket.socket
    nonce: bytes

    def close(self) -> None:
        """End it."""
        self.connection.close()


@dataclass(eq=False)
class Stage:
    """The ranks of one pipeline stage, and the group that they are in with us, if one of them has bytes."""

    links: list[Link] = field(default_factory=list)
    group: Group | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        """Of the ranks, in their order."""
        return tuple(link.place for link in self.links)

    def close(self) -> None:
        """End it all; it can be made anew."""
        for link in self.links:
            link.close()
        self.links, self.group = [], None


class Intake:
    """Of one receiver, ``name``."""

    def __init__(self, name: str = "receiver") -> None:
        self._name, self._made = f"{name}.{secrets.token_hex(8)}", itertools.count(1)
        self.memory = BufferPool()
        self.threads = ThreadPoolExecutor(LANES, thread_name_prefix="weights")
        self._links: dict[Place, Link] = {}
        self._stages: dict[tuple[Place, ...], Stage] = {}
        self._lock = threading.Lock()

    def take(self, place: Place) -> Link | None:
        """The connection to a rank, if there is one that nobody uses."""
        with self._lock:
            return self._links.pop(place, None)

    def keep(self, link: Link) -> None:
        """Nobody uses it now."""
        with self._lock:
            other, self._links[link.place] = self._links.get(link.place), link
        if other is not None:
            other.close()

    def take_stage(self, places: tuple[Place, ...]) -> Stage | None:
        """The connections to the ranks of a stage, and the group, if there is one that nobody uses."""
        with self._lock:
            return self._stages.pop(places, None)

    def keep_stage(self, stage: Stage) -> None:
        """Nobody uses it now."""
        with self._lock:
            other, self._stages[stage.places] = self._stages.get(stage.places), stage
        if other is not None:
            other.close()

    def group_name(self, epoch: str, stage: int) -> str:
        """Of a new group."""
        return f"weights/{epoch}/stage-{stage}/{self._name}/{next(self._made)}"

    def keep_only(self, places: Iterable[Place]) -> None:
        """Close the connections to all other ranks."""
        wanted = set(places)
        with self._lock:
            gone: list[Link | Stage] = [self._links.pop(place) for place in self._links.keys() - wanted]
            gone += [self._stages.pop(key) for key in list(self._stages) if not wanted.issuperset(key)]
        for one in gone:
            one.close()

    def close(self) -> None:
        """End all connections and threads; what has begun ends by its own bound."""
        self.keep_only(())
        self.threads.shutdown(wait=False)
