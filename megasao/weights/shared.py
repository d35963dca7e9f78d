"""A version of the weights as shares: each trainer rank keeps its own in host memory, a receiver holds all of them.

A share is one flat buffer and its manifest: the pieces of tensors in it, and a checksum of each bucket. Invariants,
asserted by the tests:
- a change of any one word of a bucket changes its checksum;
- shares that do not make every tensor whole, exactly once, are refused by name;
- memory of a version is used again only when nobody has a tensor of it any more.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from megasao.storage.header import TensorInfo
from megasao.weights.flat import DTYPES
from megasao.weights.messages import AnnounceShares, Carrier, Share

ALIGNMENT = 64
"""Pieces begin, and shares end, at multiples of it, bytes."""


class Piece(msgspec.Struct, frozen=True):
    """What a share has of one tensor: entries ``start`` to ``start + shape[dim]`` of ``dim``, and all of the others.

    ``whole`` is the shape of the tensor, ``offset`` where its bytes begin in the share.
    """

    name: str
    dtype: str
    whole: tuple[int, ...]
    dim: int
    start: int
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Without what fills up to the next piece."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def view(self, share: Tensor) -> Tensor:
        """The piece in its share, uint8."""
        return share[self.offset : self.offset + self.nbytes].view(DTYPES[self.dtype]).view(self.shape)


class ShareManifest(msgspec.Struct, frozen=True):
    """What is in a share, and :func:`bucket_sum` of each ``bucket_bytes`` of it (the last bucket may be shorter)."""

    pieces: list[Piece]
    total_bytes: int
    bucket_bytes: int
    sums: list[int]


@dataclass(frozen=True)
class SharedWeights:
    """A version that the trainer's ranks hold ready, as the publisher announces it. ``secret``: who may fetch it."""

    version: int
    shares: list[Share]
    secret: bytes
    carrier: Carrier = "tcp"

    @property
    def total_bytes(self) -> int:
        """Of all shares."""
        return sum(share.total_bytes for share in self.shares)

    def announcement(self, epoch: str) -> AnnounceShares:
        """What receivers are told of it."""
        return AnnounceShares(epoch, self.version, self.shares, self.secret, self.carrier)


# checksums


def bucket_sum(bucket: np.ndarray) -> int:
    """Checksum of uint8 [n], n a multiple of 8: its 64-bit words times fixed odd weights, summed up mod 2^64.

    Odd weights have an inverse, so that a change of one word never goes unseen; of several, with a chance of about
    2^-64. A CRC needs a tenfold time on machines without an instruction for it.
    """
    words = bucket.view(np.uint64)
    return int(np.dot(words, _weights(_room(len(words)))[: len(words)])) ^ len(words)


def _room(words: int) -> int:
    return 1 << max(words - 1, 0).bit_length()


@cache
def _weights(count: int) -> np.ndarray:
    """The first ``count`` weights: splitmix64, made odd."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


# memory


class BufferPool:
    """Host memory that is used again: touching fresh pages is slower than filling them over the network."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[np.ndarray] = deque()  # by whatever thread lets go last, without a lock
        self._free: list[np.ndarray] = []

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], with whatever is in it; back in the pool once nobody holds it or a view of it."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            fitting = [memory for memory in self._free if len(memory) == nbytes]
            if fitting:
                memory = fitting[0]
                self._free = [other for other in self._free if other is not memory]
            else:
                self._free = []  # of another layout
                memory = np.empty(nbytes, dtype=np.uint8)
        lease = Lease(memory)
        weakref.finalize(lease, self._returned.append, memory)
        return np.asarray(lease)


class Lease:
    """The base of every view of ``memory``, which it does not hold: it goes when the last of them goes."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__


# the whole


class ShareTensors(Mapping[str, Tensor]):
    """The tensors of all shares: a view where one share has a whole tensor, else put together when it is asked for."""

    def __init__(self, shares: Sequence[tuple[ShareManifest, np.ndarray]], label: str = "") -> None:
        """``shares``: manifest and uint8 [total_bytes] of each rank; ``label`` names the version, over restarts too.

        ValueError names a tensor that is not whole.
        """
        self.label = label
        self._pieces: dict[str, list[tuple[Piece, Tensor]]] = {}
        for manifest, buffer in shares:
            flat = torch.from_numpy(buffer)
            for piece in manifest.pieces:
                self._pieces.setdefault(piece.name, []).append((piece, flat))
        for found in self._pieces.values():
            found.sort(key=lambda pair: pair[0].start)
            _check_whole([piece for piece, _ in found])

    def release(self) -> None:
        """Let go of all tensors."""
        self._pieces = {}

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Dtype and shape of every tensor."""
        firsts = {name: found[0][0] for name, found in self._pieces.items()}
        return {name: TensorInfo(name, DTYPES[first.dtype], first.whole) for name, first in firsts.items()}

    def __getitem__(self, name: str) -> Tensor:
        found = self._pieces[name]
        views = [piece.view(flat) for piece, flat in found]
        return views[0] if len(views) == 1 else torch.cat(views, dim=found[0][0].dim)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def check_manifest(manifest: ShareManifest, expected_bytes: int) -> None:
    """ValueError saying what is wrong with a manifest that arrived."""
    if manifest.total_bytes != expected_bytes:
        raise ValueError(f"its manifest is of {manifest.total_bytes} bytes, announced were {expected_bytes}")
    if manifest.bucket_bytes < ALIGNMENT or manifest.bucket_bytes % ALIGNMENT or manifest.total_bytes % ALIGNMENT:
        raise ValueError(f"buckets of {manifest.bucket_bytes} bytes; expected a multiple of {ALIGNMENT}")
    if len(manifest.sums) != -(-manifest.total_bytes // manifest.bucket_bytes):
        raise ValueError(f"{len(manifest.sums)} checksums for {manifest.total_bytes} bytes do not fit")
    for piece in manifest.pieces:
        if piece.dtype not in DTYPES:
            raise ValueError(f"{piece.name} has dtype {piece.dtype!r}, expected one of {sorted(DTYPES)}")
        if min(piece.shape, default=0) < 0 or piece.offset < 0 or piece.offset % ALIGNMENT:
            raise ValueError(f"{piece.name} has no place at byte {piece.offset}")
        if piece.offset + piece.nbytes > manifest.total_bytes:
            raise ValueError(f"{piece.name} ends beyond the share")


def _check_whole(pieces: Sequence[Piece]) -> None:
    first, at = pieces[0], 0
    if len(pieces) == 1 and first.shape == first.whole:
        return
    for piece in pieces:
        same = (piece.dtype, piece.whole, piece.dim) == (first.dtype, first.whole, first.dim)
        fits = same and piece.dim < len(piece.whole) == len(piece.shape) and piece.start == at
        if not fits or _without(piece.shape, piece.dim) != _without(piece.whole, piece.dim):
            break
        at += piece.shape[piece.dim]
    else:
        if at == first.whole[first.dim]:
            return
    spans = ", ".join(f"{piece.start}: {piece.shape}" for piece in pieces)
    raise ValueError(f"the ranks' pieces of {first.name}, {first.whole}, do not make it whole once: {spans}")


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
