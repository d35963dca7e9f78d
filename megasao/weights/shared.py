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
from functools import cache, lru_cache
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

SMALL_BYTES = 32 * 2**20
"""Versions of at most so many bytes go out in fewer steps: they take no longer than another thread, a new connection or
a meeting of the ranks does, and may be kept twice."""


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


class ShareLayout(msgspec.Struct, frozen=True, eq=False):
    """What is in a share, in all versions; checksums are of ``bucket_bytes`` (the last bucket may be shorter).

    The same layout read again is the same object.
    """

    pieces: list[Piece]
    total_bytes: int
    bucket_bytes: int


@dataclass(frozen=True)
class ShareManifest:
    """A share's layout, and :func:`bucket_sum` of each bucket of this version."""

    layout: ShareLayout
    sums: list[int]

    def bucket(self, share: np.ndarray, number: int) -> np.ndarray:
        """Where it lies in ``share``, uint8 [total_bytes]."""
        each = self.layout.bucket_bytes
        return share[number * each : (number + 1) * each]

    def check(self, share: np.ndarray, number: int) -> None:
        """ValueError if a bucket of ``share`` is not what its rank has."""
        if bucket_sum(self.bucket(share, number)) != self.sums[number]:
            raise ValueError(f"bucket {number} is damaged: its checksum does not match")


class _Wire(msgspec.Struct, frozen=True):
    layout: msgspec.Raw
    sums: list[int]


def encode_layout(layout: ShareLayout) -> msgspec.Raw:
    """For :func:`encode_manifest`, once for all versions."""
    return msgspec.Raw(msgspec.msgpack.encode(layout))


def encode_manifest(layout: msgspec.Raw, sums: list[int]) -> bytes:
    """As it goes to the receivers."""
    return msgspec.msgpack.encode(_Wire(layout, sums))


def read_manifest(raw: bytes | bytearray, expected_bytes: int) -> ShareManifest:
    """The manifest of a share of ``expected_bytes``. ValueError (of msgspec too) saying what is wrong with it."""
    wire = msgspec.msgpack.decode(raw, type=_Wire)
    layout = _read_layout(bytes(wire.layout))
    if layout.total_bytes != expected_bytes:
        raise ValueError(f"its manifest is of {layout.total_bytes} bytes, announced were {expected_bytes}")
    if len(wire.sums) != -(-layout.total_bytes // layout.bucket_bytes):
        raise ValueError(f"{len(wire.sums)} checksums for {layout.total_bytes} bytes do not fit")
    return ShareManifest(layout, wire.sums)


@lru_cache(maxsize=1024)
def _read_layout(raw: bytes) -> ShareLayout:
    layout = msgspec.msgpack.decode(raw, type=ShareLayout)
    if layout.bucket_bytes < ALIGNMENT or layout.bucket_bytes % ALIGNMENT or layout.total_bytes % ALIGNMENT:
        raise ValueError(f"buckets of {layout.bucket_bytes} bytes; expected a multiple of {ALIGNMENT}")
    for piece in layout.pieces:
        if piece.dtype not in DTYPES:
            raise ValueError(f"{piece.name} has dtype {piece.dtype!r}, expected one of {sorted(DTYPES)}")
        if min(piece.shape, default=0) < 0 or piece.offset < 0 or piece.offset % ALIGNMENT:
            raise ValueError(f"{piece.name} has no place at byte {piece.offset}")
        if piece.offset + piece.nbytes > layout.total_bytes:
            raise ValueError(f"{piece.name} ends beyond the share")
    return layout


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
        self._flats = [torch.from_numpy(buffer) for _, buffer in shares]
        self._pieces = _whole(tuple(manifest.layout for manifest, _ in shares))

    def release(self) -> None:
        """Let go of all tensors."""
        self._flats, self._pieces = [], {}

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Dtype and shape of every tensor."""
        firsts = {name: found[0][0] for name, found in self._pieces.items()}
        return {name: TensorInfo(name, DTYPES[first.dtype], first.whole) for name, first in firsts.items()}

    def __getitem__(self, name: str) -> Tensor:
        found = self._pieces[name]
        views = [piece.view(self._flats[share]) for piece, share in found]
        return views[0] if len(views) == 1 else torch.cat(views, dim=found[0][0].dim)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


@lru_cache(maxsize=2)
def _whole(layouts: tuple[ShareLayout, ...]) -> Mapping[str, list[tuple[Piece, int]]]:
    """Each tensor's pieces in their order, with the number of the share that has it. ValueError if one is not whole."""
    pieces: dict[str, list[tuple[Piece, int]]] = {}
    for share, layout in enumerate(layouts):
        for piece in layout.pieces:
            pieces.setdefault(piece.name, []).append((piece, share))
    for found in pieces.values():
        found.sort(key=lambda pair: pair[0].start)
        _check_whole([piece for piece, _ in found])
    return pieces


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
