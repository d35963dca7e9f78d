"""A receiver takes the shares of all ranks, several beside one another, and compares every bucket as it arrives.

Invariants, asserted by the tests:
- nothing is handed on before every bucket of every share is here and intact;
- what went wrong is named with the rank, its address and the bucket;
- every wait is bounded, and whoever gives up leaves no connection behind.
"""

import asyncio
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import numpy as np

from megasao.weights.incoming import Link, ask, receive_buckets, receive_manifest
from megasao.weights.intake import Intake
from megasao.weights.messages import AnnounceShares, Share
from megasao.weights.serving import NONCE_BYTES, bound, nearby, read_head, receive_into
from megasao.weights.shared import ShareManifest, ShareTensors, read_manifest


def label(announce: AnnounceShares) -> str:
    """A name that no other life of the trainer gives to another set of weights."""
    return f"{announce.version}.{announce.epoch[:12]}"


class Fetching:
    """One attempt. ``stop`` may be called from another thread."""

    def __init__(self, announce: AnnounceShares, intake: Intake, timeout_s: float) -> None:
        self._announce, self._intake, self._timeout_s = announce, intake, timeout_s
        self._open: set[socket.socket] = set()
        self._found: list[
            tuple[ShareManifest, np.ndarray]
        ] = []  # not in futures, which would keep the memory for a while
        self._lock = threading.Lock()
        self._stopped = False

    async def finish(self) -> None:
        """Fetch all shares. ValueError if one is damaged or cannot be had."""
        await asyncio.to_thread(self._run)

    def _run(self) -> None:
        self._intake.keep_only(())
        self._beside([partial(self._fetch, share) for share in self._announce.shares])

    def _beside(self, works: Iterable[Callable[[], None]]) -> None:
        """All of them; the first error, once all have ended."""
        fetched = [self._intake.threads.submit(work) for work in works]
        done, left = wait(fetched, return_when=FIRST_EXCEPTION)
        failures = [error for one in done if (error := one.exception()) is not None]
        if failures:
            self.stop()
            for one in left:
                one.cancel()
            wait(left)
            raise failures[0]

    def take(self) -> ShareTensors:
        """The whole, once. ValueError if the shares do not fit each other."""
        found, self._found = self._found, []
        return ShareTensors(found, label(self._announce))

    def stop(self) -> None:
        """End all connections."""
        with self._lock:
            self._stopped = True
            for connection in self._open:
                with suppress(OSError):  # one that is not connected yet ends by its bound
                    connection.shutdown(socket.SHUT_RDWR)

    def _fetch(self, share: Share) -> None:
        """Take a share over a connection of its own."""
        with self._named(share):
            link = self._opened(share)
            try:
                ask(link, self._announce.secret, self._announce.version)
                self._read(link, share, read_head(link.connection)[1])
            finally:
                self._close(link.connection)

    def _read(self, link: Link, share: Share, size: int) -> None:
        """The share that comes, with a manifest of ``size`` bytes."""
        manifest = self._manifest(link, share, size)
        self._found.append((manifest, receive_buckets(link, manifest, self._intake.memory)))

    def _manifest(self, link: Link, share: Share, size: int) -> ShareManifest:
        raw = receive_manifest(link, size)
        self._check_announced(zlib.crc32(raw), share)
        return read_manifest(raw, share.total_bytes)

    def _check_announced(self, manifest_crc32: int, share: Share) -> None:
        if manifest_crc32 != share.manifest_crc32:
            raise ValueError("its manifest is damaged: the CRC-32 is not the announced one")

    @contextmanager
    def _named(self, share: Share, place: str = "") -> Iterator[None]:
        """Errors say whose they are, and of what."""
        try:
            yield
        except (OSError, ValueError, msgspec.DecodeError) as error:
            rank = f"trainer rank {share.rank} at {share.host}:{share.port}"
            raise ValueError(f"weights {self._announce.version} of {rank}: {place}{error}") from error

    def _opened(self, share: Share) -> Link:
        """A new connection, over which nothing is asked yet."""
        connection = self._connected(share)
        try:
            nonce = bytearray(NONCE_BYTES)
            receive_into(connection, memoryview(nonce))
            return Link(share.place, connection, bytes(nonce))
        except BaseException:
            self._close(connection)
            raise

    def _connected(self, share: Share) -> socket.socket:
        """To the rank, by a Unix socket if it is on this machine."""
        try:
            return self._reached(socket.AF_UNIX, nearby(share.host, share.port, self._announce.secret))
        except OSError:  # it is on another one
            return self._by_network(share)

    def _by_network(self, share: Share) -> socket.socket:
        return self._reached(socket.AF_INET6 if ":" in share.host else socket.AF_INET, share.place)

    def _reached(self, family: socket.AddressFamily, address: bytes | tuple[str, int]) -> socket.socket:
        connection = socket.socket(family)
        self._enter(connection)
        try:
            bound(connection, self._timeout_s)
            connection.connect(address)
        except BaseException:
            self._close(connection)
            raise
        return connection

    def _enter(self, connection: socket.socket) -> None:
        """From now on ``stop`` ends it. ValueError if that was already called."""
        with self._lock:
            if self._stopped:
                connection.close()
                raise ValueError("given up")
            self._open.add(connection)

    def _close(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            connection.close()
