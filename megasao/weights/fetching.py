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
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress

import msgspec
import numpy as np
from torch import Tensor

from megasao.weights.messages import AnnounceShares, Share
from megasao.weights.nodes import NodeWeights
from megasao.weights.serving import LENGTH, NONCE_BYTES, bound, proof, receive_into
from megasao.weights.shared import BufferPool, ShareManifest, ShareTensors, bucket_sum, check_manifest

LANES = 16
"""Ranks that one receiver reads at once."""

MOST_MANIFEST_BYTES = 2**28


class SharesDownload:
    """The announced version on its way from the memory of the trainer's ranks."""

    complete = True
    idle_s = 0.0

    def __init__(self, announce: AnnounceShares, pool: BufferPool) -> None:
        self.epoch, self.version = announce.epoch, announce.version
        self._announce, self._pool = announce, pool
        self._tensors: ShareTensors | None = None
        self.staged = False

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, once verified."""
        assert self._tensors is not None, "verify() comes first"
        return self._tensors

    async def verify(self, timeout_s: float) -> str | None:
        """Fetch and compare everything; what went wrong, or that it took too long."""
        fetching = _Fetching(self._announce, self._pool, timeout_s)
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


class _Fetching:
    """One attempt. ``stop`` may be called from another thread."""

    def __init__(self, announce: AnnounceShares, pool: BufferPool, timeout_s: float) -> None:
        self._announce, self._pool, self._timeout_s = announce, pool, timeout_s
        self._open: set[socket.socket] = set()
        self._found: list[
            tuple[ShareManifest, np.ndarray]
        ] = []  # not in futures, which would keep the memory for a while
        self._lock = threading.Lock()
        self._stopped = False

    def run(self) -> None:
        """Fetch all shares. ValueError if one is damaged or cannot be had."""
        shares = self._announce.shares
        with ThreadPoolExecutor(max(1, min(len(shares), LANES)), thread_name_prefix="weights") as lanes:
            fetched = [lanes.submit(self._fetch, share) for share in shares]
            done, left = wait(fetched, return_when=FIRST_EXCEPTION)
            failures = [error for one in done if (error := one.exception()) is not None]
            if failures:
                self.stop()
                for one in left:
                    one.cancel()
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
        connection = socket.socket(socket.AF_INET6 if ":" in share.host else socket.AF_INET)
        with self._lock:
            if self._stopped:
                connection.close()
                raise ValueError("given up")
            self._open.add(connection)
        try:
            bound(connection, self._timeout_s)
            connection.connect((share.host, share.port))
            self._found.append(self._read(connection, share))
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise ValueError(
                f"weights {self._announce.version} of trainer rank {share.rank} at {share.host}:{share.port}: {error}"
            ) from error
        finally:
            with self._lock:
                self._open.discard(connection)
                connection.close()

    def _read(self, connection: socket.socket, share: Share) -> tuple[ShareManifest, np.ndarray]:
        nonce, length = bytearray(NONCE_BYTES), bytearray(LENGTH.size)
        receive_into(connection, memoryview(nonce))
        asked = LENGTH.pack(self._announce.version)
        connection.sendall(asked + proof(self._announce.secret, bytes(nonce), asked))
        receive_into(connection, memoryview(length))
        (size,) = LENGTH.unpack(length)
        if not 0 < size <= MOST_MANIFEST_BYTES:
            raise ValueError("it does not have this version any more" if not size else f"a manifest of {size} bytes")
        raw = bytearray(size)
        receive_into(connection, memoryview(raw))
        if zlib.crc32(raw) != share.manifest_crc32:
            raise ValueError("its manifest is damaged: the CRC-32 is not the announced one")
        manifest = msgspec.msgpack.decode(raw, type=ShareManifest)
        check_manifest(manifest, share.total_bytes)
        return manifest, self._buckets(connection, manifest)

    def _buckets(self, connection: socket.socket, manifest: ShareManifest) -> np.ndarray:
        buffer = self._pool.take(manifest.total_bytes)
        for index, expected in enumerate(manifest.sums):
            start = index * manifest.bucket_bytes
            bucket = buffer[start : start + manifest.bucket_bytes]
            try:
                receive_into(connection, bucket.data)
            except OSError as error:
                raise ValueError(f"bucket {index} of {len(manifest.sums)}: {error}") from error
            if bucket_sum(bucket) != expected:
                raise ValueError(f"bucket {index} is damaged: its checksum does not match")
        return buffer
