"""A receiver takes the shares of all ranks, several beside one another, and compares every bucket as it arrives.

A small version is asked for over the connections of the one before, where the ranks have not closed them.

Invariants, asserted by the tests:
- nothing is handed on before every bucket of every share is here and intact;
- what went wrong is named with the rank, its address and the bucket;
- every wait is bounded, and whoever gives up leaves no connection behind.
"""

import asyncio
import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from functools import partial

import msgspec
import numpy as np
from torch import Tensor

from megasao.weights.intake import Intake, Link
from megasao.weights.messages import AnnounceShares, Share
from megasao.weights.nodes import NodeWeights
from megasao.weights.serving import LENGTH, NONCE_BYTES, bound, proof, receive_into
from megasao.weights.shared import SMALL_BYTES, ShareManifest, ShareTensors, read_manifest

MOST_MANIFEST_BYTES = 2**28


class SharesDownload:
    """The announced version on its way from the memory of the trainer's ranks."""

    complete = True
    idle_s = 0.0

    def __init__(self, announce: AnnounceShares, intake: Intake) -> None:
        self.epoch, self.version = announce.epoch, announce.version
        self._announce, self._intake = announce, intake
        self._tensors: ShareTensors | None = None
        self.staged = False

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, once verified."""
        assert self._tensors is not None, "verify() comes first"
        return self._tensors

    async def verify(self, timeout_s: float) -> str | None:
        """Fetch and compare everything; what went wrong, or that it took too long."""
        fetching = self._attempt(timeout_s)
        try:
            await asyncio.wait_for(asyncio.to_thread(fetching.run), timeout_s)
            self._tensors = fetching.take()
        except TimeoutError:
            return f"fetching weights {self.version} from the trainer's ranks took more than {timeout_s:g} s"
        except (ValueError, OSError) as error:
            return str(error)
        finally:
            fetching.stop()
        return None

    def _attempt(self, timeout_s: float) -> "Fetching":
        return Fetching(self._announce, self._intake, timeout_s)


class NodesDownload:
    """The announced version, of which a worker has the label: the nodes of its servers take the bytes."""

    complete = True
    idle_s = 0.0

    def __init__(self, announce: AnnounceShares) -> None:
        self.epoch, self.version, self._label = announce.epoch, announce.version, label(announce)
        self.staged = False

    def tensors(self) -> Mapping[str, Tensor]:
        """None, under the version's label."""
        return NodeWeights(self._label)

    async def verify(self, timeout_s: float) -> str | None:
        """Nothing has arrived that could be wrong."""
        return None


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
        self._small = sum(share.total_bytes for share in announce.shares) <= SMALL_BYTES
        self._lock = threading.Lock()
        self._stopped = False

    def run(self) -> None:
        """Fetch all shares. ValueError if one is damaged or cannot be had."""
        shares = self._announce.shares
        self._intake.keep_only((share.host, share.port) for share in shares)
        if self._small:
            self._run_in_turn(shares)
            return
        self._beside([partial(self._fetch, share, None) for share in shares])

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

    def _run_in_turn(self, shares: Sequence[Share]) -> None:
        """Ask all ranks, then read what each sends: for a few megabytes threads take longer than they save."""
        asked = deque((share, self._hurry(share)) for share in shares)
        try:
            while asked:
                self._fetch(*asked.popleft())
        finally:
            for _, link in asked:
                if link is not None:
                    self._close(link.connection)

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

    def _fetch(self, share: Share, asked: Link | None) -> None:
        """Take a share; ``asked`` is a kept connection over which we have asked for it."""
        try:
            link, size = self._answered(asked) or self._connected(share)
            try:
                self._found.append(self._read(link.connection, share, size))
            except BaseException:
                self._close(link.connection)
                raise
            if not self._small:
                self._close(link.connection)
                return
            with self._lock:
                self._open.discard(link.connection)
            self._intake.keep(link)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise ValueError(self._about(share, error)) from error

    def _about(self, share: Share, what: object) -> str:
        return f"weights {self._announce.version} of trainer rank {share.rank} at {share.host}:{share.port}: {what}"

    def _hurry(self, share: Share) -> Link | None:
        """Ask for a share over the connection of the version before; None if there is none any more."""
        kept = self._intake.take((share.host, share.port))
        if kept is None:
            return None
        self._enter(kept.connection)
        try:
            self._ask(kept)
        except OSError:
            self._close(kept.connection)
            return None
        return kept

    def _answered(self, asked: Link | None) -> tuple[Link, int] | None:
        """The connection, and how long the manifest on it is; None if the rank had closed it before we asked."""
        if asked is None:
            return None
        try:
            return asked, self._length(asked)
        except BaseException as error:
            self._close(asked.connection)
            if isinstance(error, ConnectionError):
                return None
            raise

    def _connected(self, share: Share) -> tuple[Link, int]:
        """A new connection, over which the share comes, and how long its manifest is."""
        link = self._opened(share)
        try:
            self._ask(link)
            return link, self._length(link)
        except BaseException:
            self._close(link.connection)
            raise

    def _opened(self, share: Share) -> Link:
        """A new connection, over which nothing is asked yet."""
        connection = socket.socket(socket.AF_INET6 if ":" in share.host else socket.AF_INET)
        self._enter(connection)
        try:
            bound(connection, self._timeout_s)
            connection.connect((share.host, share.port))
            nonce = bytearray(NONCE_BYTES)
            receive_into(connection, memoryview(nonce))
            return Link((share.host, share.port), connection, bytes(nonce))
        except BaseException:
            self._close(connection)
            raise

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

    def _ask(self, link: Link) -> None:
        link.connection.sendall(self._proven(link, LENGTH.pack(self._announce.version)))

    def _proven(self, link: Link, asked: bytes) -> bytes:
        return asked + proof(self._announce.secret, link.nonce, asked)

    def _length(self, link: Link) -> int:
        length = bytearray(LENGTH.size)
        receive_into(link.connection, memoryview(length))
        (size,) = LENGTH.unpack(length)
        return int(size)

    def _read(self, connection: socket.socket, share: Share, size: int) -> tuple[ShareManifest, np.ndarray]:
        manifest = self._manifest(connection, share, size)
        return manifest, self._buckets(connection, manifest)

    def _manifest(self, connection: socket.socket, share: Share, size: int) -> ShareManifest:
        if not 0 < size <= MOST_MANIFEST_BYTES:
            raise ValueError("it does not have this version any more" if not size else f"a manifest of {size} bytes")
        raw = bytearray(size)
        receive_into(connection, memoryview(raw))
        if zlib.crc32(raw) != share.manifest_crc32:
            raise ValueError("its manifest is damaged: the CRC-32 is not the announced one")
        return read_manifest(raw, share.total_bytes)

    def _buckets(self, connection: socket.socket, manifest: ShareManifest) -> np.ndarray:
        buffer = self._intake.memory.take(manifest.layout.total_bytes)
        for index in range(len(manifest.sums)):
            try:
                receive_into(connection, manifest.bucket(buffer, index).data)
            except OSError as error:
                raise ValueError(f"bucket {index} of {len(manifest.sums)}: {error}") from error
            manifest.check(buffer, index)
        return buffer
