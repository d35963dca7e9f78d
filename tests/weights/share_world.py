"""Helpers for weights that trainer ranks give out themselves: versions cut in two, shared memory, and a wire that
holds or damages."""

import os
import socket
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import torch

from megasao.weights.group_serving import GroupShareServer
from megasao.weights.mapped import MappedWeights, SegmentPair
from megasao.weights.messages import Carrier, Mapped, Share
from megasao.weights.publisher import WeightPublisher
from megasao.weights.serving import ShareServer
from megasao.weights.shared import (
    ALIGNMENT,
    Piece,
    SharedWeights,
    ShareLayout,
    ShareManifest,
    bucket_sum,
    encode_layout,
    encode_manifest,
)

SECRET = b"known to trainer and workers ..."
SHARE_BUCKET = 1024
SMALL_STEPS = 2**14
"""Bytes that a wire passes on little by little; what is beyond them goes at full speed."""


def large(seed: int) -> dict[str, torch.Tensor]:
    """More than sockets keep on their way: whoever sends it waits for whoever takes it."""
    return {"large": torch.full((4096, 4096), float(seed))}


def cut_in_two(
    tensors: Mapping[str, torch.Tensor], large_bucket: int = 2**20
) -> list[tuple[ShareManifest, np.ndarray]]:
    """The shares of two ranks: a matrix is cut by its columns, others are on one of them."""
    rows: list[list[tuple[Piece, torch.Tensor]]] = [[], []]
    for number, (name, tensor) in enumerate(tensors.items()):
        dtype, whole = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if tensor.ndim < 2:
            rows[number % 2].append((Piece(name, dtype, whole, 0, 0, whole, 0), tensor))
            continue
        for rank, part in enumerate(tensor.tensor_split(2, dim=1)):
            start = rank * ((whole[1] + 1) // 2)
            rows[rank].append((Piece(name, dtype, whole, 1, start, tuple(part.shape), 0), part))
    return [_share(pieces, large_bucket) for pieces in rows]


def _share(rows: list[tuple[Piece, torch.Tensor]], large_bucket: int) -> tuple[ShareManifest, np.ndarray]:
    pieces, offset = [], 0
    for piece, _ in rows:
        pieces.append(msgspec.structs.replace(piece, offset=offset))
        offset += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    flat = torch.zeros(offset, dtype=torch.uint8)
    for piece, (_, tensor) in zip(pieces, rows, strict=True):
        piece.view(flat).copy_(tensor)
    data = flat.numpy()
    bucket = SHARE_BUCKET if offset < 2**20 else large_bucket
    sums = [bucket_sum(data[at : at + bucket]) for at in range(0, offset, bucket)]
    return ShareManifest(ShareLayout(pieces, offset, bucket), sums), data


def encode(manifest: ShareManifest) -> bytes:
    """As a rank gives it out."""
    return encode_manifest(encode_layout(manifest.layout), manifest.sums)


def offer(
    server: ShareServer, rank: int, version: int, share: tuple[ShareManifest, np.ndarray], stage: int = 0
) -> Share:
    """Let ``server`` give out a share; how it is announced."""
    raw = encode(share[0])
    server.offer(version, raw, share[1].data)
    return Share(rank, server.host, server.port, share[0].layout.total_bytes, zlib.crc32(raw), stage)


def retire(server: ShareServer) -> None:
    """Let ``server`` give out nothing."""
    for version in list(server._offers):
        server.retire(version)


class Distributed:
    """Versions go out from two ranks; as the trainer does it. ``through`` may put a wire before the ranks.

    ``stages``: of the pipeline, in which the ranks are.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        carrier: Carrier = "tcp",
        stages: Sequence[int] = (0, 0),
    ) -> None:
        serve = GroupShareServer if carrier == "gloo" else ShareServer
        self.servers = [serve(host, SECRET, timeout_s=timeout_s) for _ in stages]
        self.carrier, self.stages = carrier, stages
        self.through: Callable[[Share], Share] = lambda share: share

    def send(self, sender: WeightPublisher, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        sender.make_room(version)
        for server in self.servers:
            retire(server)
        shares = [self.through(share) for share in self.offer(version, tensors)]
        sender.publish_elsewhere(SharedWeights(version, shares, SECRET, self.carrier))

    def offer(self, version: int, tensors: Mapping[str, torch.Tensor]) -> list[Share]:
        """Let the ranks give out a version; how it is announced."""
        rows = enumerate(zip(self.servers, cut_in_two(tensors), self.stages, strict=True))
        return [offer(server, rank, version, share, stage) for rank, (server, share, stage) in rows]

    def close(self) -> None:
        for server in self.servers:
            server.close()


def two_pairs(tensors: Mapping[str, torch.Tensor]) -> list[SegmentPair]:
    """Memory of two ranks that share such weights with others on their machine."""
    return [SegmentPair(manifest.layout.total_bytes) for manifest, _ in cut_in_two(tensors)]


def write_mapped(pair: SegmentPair, rank: int, tensors: Mapping[str, torch.Tensor]) -> Mapped:
    """Put one rank's share of a version there; how it is announced."""
    manifest, data = cut_in_two(tensors)[rank]
    pair.begin().flat.numpy()[:] = data
    raw = encode(manifest)
    return Mapped(rank, os.getpid(), pair.show(raw), manifest.layout.total_bytes, len(raw), zlib.crc32(raw))


class Embedded:
    """Versions lie in memory of two ranks that receivers map; as the trainer does it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: of the shapes that every version has."""
        self.pairs = two_pairs(tensors)

    def send(self, sender: WeightPublisher, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        sender.make_room(version)
        memories = [write_mapped(pair, rank, tensors) for rank, pair in enumerate(self.pairs)]
        sender.publish_elsewhere(MappedWeights(version, memories))

    def close(self) -> None:
        for pair in self.pairs:
            pair.close()


class Wire:
    """Sits before one rank: what that sends passes ``change(position, data)``, and is held from ``hold_at`` on.

    ``only_first``: the second connection, and later ones, are not held.
    """

    def __init__(
        self,
        share: Share,
        change: Callable[[int, bytearray], None] = lambda position, data: None,
        hold_at: int | None = None,
        only_first: bool = False,
    ) -> None:
        self._target, self._change = (share.host, share.port), change
        self._hold_at, self._only_first = hold_at, only_first
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.share = msgspec.structs.replace(share, port=self._listener.getsockname()[1])
        self.held = threading.Event()
        self._stop = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                threading.Thread(target=self._asks, args=(near, far), daemon=True).start()
                threading.Thread(target=self._answers, args=(far, near), daemon=True).start()

    def _asks(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(4096):
                far.sendall(data)

    def _answers(self, far: socket.socket, near: socket.socket) -> None:
        position = 0
        with suppress(OSError), far, near:
            while data := bytearray(far.recv(512 if position < SMALL_STEPS else 2**16)):
                self._change(position, data)
                position += len(data)
                near.sendall(data)
                if self._holds(position):
                    self.held.set()
                    self._stop.wait(60)
                    break
            near.shutdown(socket.SHUT_RDWR)  # closing alone does not, while another thread reads from it

    def _holds(self, position: int) -> bool:
        past = self._hold_at is not None and position >= self._hold_at
        return past and not (self._only_first and self.held.is_set())

    def close(self) -> None:
        """Both ends see the connection end."""
        self._stop.set()
        self._listener.close()
