"""A share as it comes over a connection: asked for, its manifest, its buckets.

Invariants, asserted by the tests:
- no bucket is handed on that is not what its manifest says;
- a manifest is bounded before it is read.
"""

import socket
from dataclasses import dataclass

import numpy as np

from megasao.weights.messages import Place
from megasao.weights.serving import LENGTH, proof, receive_into
from megasao.weights.shared import BufferPool, ShareManifest

MOST_MANIFEST_BYTES = 2**28


@dataclass(frozen=True, eq=False)
class Link:
    """A connection to the rank at ``place``, which has given us this ``nonce`` for it."""

    place: Place
    connection: socket.socket
    nonce: bytes

    @property
    def is_open(self) -> bool:
        """Whether we have not closed it."""
        return self.connection.fileno() >= 0

    def close(self) -> None:
        """End it."""
        self.connection.close()


def ask(link: Link, secret: bytes, version: int) -> None:
    """Ask for a version, or for what comes :data:`~megasao.weights.serving.AFTER` one."""
    link.connection.sendall(proven(link, secret, LENGTH.pack(version)))


def proven(link: Link, secret: bytes, asked: bytes) -> bytes:
    """``asked``, and that we know the secret."""
    return asked + proof(secret, link.nonce, asked)


def receive_manifest(link: Link, size: int) -> bytes:
    """The manifest of ``size`` bytes. ValueError if there is none, or it is far too large."""
    if not 0 < size <= MOST_MANIFEST_BYTES:
        raise ValueError("it does not have this version any more" if not size else f"a manifest of {size} bytes")
    raw = bytearray(size)
    receive_into(link.connection, memoryview(raw))
    return bytes(raw)


def receive_buckets(link: Link, manifest: ShareManifest, memory: BufferPool) -> np.ndarray:
    """All of the share, uint8 [total_bytes]. ValueError or ConnectionError name the bucket that is damaged or does not
    come."""
    buffer = memory.take(manifest.layout.total_bytes)
    for index in range(len(manifest.sums)):
        try:
            receive_into(link.connection, manifest.bucket(buffer, index).data)
        except OSError as error:
            raise ConnectionError(f"bucket {index} of {len(manifest.sums)}: {error}") from error
        manifest.check(buffer, index)
    return buffer
