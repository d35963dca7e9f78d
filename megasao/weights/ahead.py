"""The next small version, asked for before there is one: each rank sends its share as soon as it has its copy, while
the trainer's ranks still agree that there is a version, and announce it.

Invariants, asserted by the tests:
- what has come is only what a rank has sent: whoever takes it compares version and manifest with what is announced;
- a rank that ends its connection holds up nobody, and its share is only missing;
- the threads that read end with the connections, and close none: whoever has the connections does, after them;
- where there can be no more threads, nothing is asked ahead.
"""

import logging
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import numpy as np

from megasao.weights.incoming import Link, ask, receive_buckets, receive_manifest
from megasao.weights.messages import AnnounceShares, Place, Share
from megasao.weights.serving import AFTER, cut, read_head
from megasao.weights.shared import BufferPool, ShareManifest, read_manifest

_log = logging.getLogger(__name__)

_LANES = 2
"""Ranks that are read at once: while one is read, the other fills what its socket holds."""


@dataclass(frozen=True)
class Arrived:
    """A rank's share of a version: ``buffer``, uint8 [total_bytes], is what ``manifest`` says."""

    version: int
    manifest_crc32: int
    manifest: ShareManifest
    buffer: np.ndarray


@dataclass(frozen=True)
class Damaged:
    """What is wrong with one."""

    version: int
    reason: str


class Ahead:
    """Connections to the ranks of ``announce``, over which they are asked for the version after it."""

    def __init__(self, announce: AnnounceShares, links: Sequence[Link], memory: BufferPool) -> None:
        """``links``: to the ranks, in their order; nothing is asked over them before :meth:`ask`."""
        self._announce, self._memory = announce, memory
        self.links = list(links)
        self.found: dict[Place, Arrived | Damaged] = {}
        """What has come; all of it, once the ranks have :attr:`answered`."""
        self.answered: Future[None] = Future()
        """Done when each rank that was asked has answered, or ended its connection."""
        self.asked = False
        """Whether there are answers to wait for."""
        self._threads: list[threading.Thread] = []
        self._lost: set[Link] = set()
        self._reading, self._lock = 0, threading.Lock()

    @property
    def places(self) -> list[Place]:
        """Of the ranks, in their order."""
        return [link.place for link in self.links]

    def may_have(self, announce: AnnounceShares) -> bool:
        """Whether ``announce`` can be what they were asked for: a later version of the same ranks, in as many bytes."""
        return announce.version > self._announce.version and _sizes(announce) == _sizes(self._announce)

    def ask(self) -> None:
        """Ask, unless that was done, and read what comes, in threads."""
        if self.asked:
            return
        self.asked = True
        self.answered.set_running_or_notify_cancel()
        pairs = list(zip(self.links, self._announce.shares, strict=True))
        parts = [part for lane in range(_LANES) if (part := pairs[lane::_LANES])]
        self._reading = len(parts)
        for part in parts:
            self._start(part)

    def _start(self, pairs: Sequence[tuple[Link, Share]]) -> None:
        thread = threading.Thread(target=self._read, args=(pairs,), name="weights-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # it will be asked for once it is announced
            _log.warning("weights after %d are not asked for ahead: %s", self._announce.version, error)
            self._has_read()
        else:
            self._threads.append(thread)

    def close_lost(self) -> dict[Place, Link]:
        """The connections over which more can be asked, once the ranks have answered; the others are closed."""
        for link in self._lost:
            link.close()
        return {link.place: link for link in self.links if link.is_open}

    def end(self) -> None:
        """Nobody wants it."""
        for link in self.links:
            cut(link.connection)
        for thread in self._threads:
            thread.join()
        for link in self.links:
            link.close()

    def _read(self, pairs: Sequence[tuple[Link, Share]]) -> None:
        self._lost.update(link for link, _ in pairs)  # until they have answered
        try:
            asked = [self._ask(link) for link, _ in pairs]
            for (link, share), alive in zip(pairs, asked, strict=True):
                if alive and self._take(link, share):
                    self._lost.discard(link)
                else:
                    cut(link.connection)
        finally:
            self._has_read()

    def _has_read(self) -> None:
        with self._lock:
            self._reading -= 1
            if not self._reading:
                self.answered.set_result(None)

    def _ask(self, link: Link) -> bool:
        try:
            ask(link, self._announce.secret, AFTER + self._announce.version)
        except OSError:
            return False
        return True

    def _take(self, link: Link, share: Share) -> bool:
        """Read what a rank sends; whether it can be asked again over this connection."""
        version = 0
        try:
            version, size = read_head(link.connection)
            raw = receive_manifest(link, size)
            manifest = read_manifest(raw, share.total_bytes)
            buffer = receive_buckets(link, manifest, self._memory)
        except OSError:
            return False
        except (ValueError, msgspec.DecodeError) as error:
            self.found[link.place] = Damaged(version, str(error))
            return False
        self.found[link.place] = Arrived(version, zlib.crc32(raw), manifest, buffer)
        return True


def _sizes(announce: AnnounceShares) -> list[tuple[Place, int]]:
    return [(share.place, share.total_bytes) for share in announce.shares]
