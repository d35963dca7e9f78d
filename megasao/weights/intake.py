"""What a receiver keeps from one version to the next: memory, threads, and connections to the trainer's ranks.

Invariants, asserted by the tests:
- a connection is used by one thread at a time, and only for the rank that it leads to;
- connections to ranks that do not announce any more are closed.
"""

import socket
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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


class Intake:
    """Of one receiver."""

    def __init__(self) -> None:
        self.memory = BufferPool()
        self.threads = ThreadPoolExecutor(LANES, thread_name_prefix="weights")
        self._links: dict[Place, Link] = {}
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
            other.connection.close()

    def keep_only(self, places: Iterable[Place]) -> None:
        """Close the connections to all other ranks."""
        with self._lock:
            gone = [self._links.pop(place) for place in self._links.keys() - set(places)]
        for link in gone:
            link.connection.close()

    def close(self) -> None:
        """End all connections and threads; what has begun ends by its own bound."""
        self.keep_only(())
        self.threads.shutdown(wait=False)
