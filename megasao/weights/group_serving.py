"""One trainer rank's share of the newest version, sent through process groups that receivers ask it to join.

The connection of :mod:`~megasao.weights.serving` stays, for control: after the version the receiver names a group, with
the same proof; the rank joins it if it is not in it already, and answers with the manifest and its address there. Once
the receiver has that from all ranks of the stage, it says so, and the rank sends the share through the group, bucket by
bucket. Invariants, asserted by the tests:
- the trainer never waits for a receiver: one that hangs in a bucket keeps the old memory, and the rank gets new one;
- nothing is sent before the receiver has said that it expects exactly this;
- a group ends with its connection.
"""

import hmac
import socket
from collections.abc import Callable, Collection

import msgspec
import torch

from megasao.weights.groups import AHEAD, GO, MOST_CALL_BYTES, RECEIVER, Group, GroupCall, check_call, finish, under_way
from megasao.weights.serving import LENGTH, PROOF_BYTES, Offer, ShareServer, cut, proof, receive_into
from megasao.weights.shared import read_manifest

_AT_ONCE_S = 0.25
"""How long the trainer waits for a reader that is in a bucket; after that it takes new memory."""


class GroupShareServer(ShareServer):
    """As its base, with groups of gloo for the bytes."""

    def __init__(self, host: str, secret: bytes, *, timeout_s: float) -> None:
        """``timeout_s`` bounds also each wait in a group."""
        self._groups: dict[socket.socket, Group] = {}
        super().__init__(host, secret, timeout_s=timeout_s)

    def _end(self, peers: Callable[[], Collection[socket.socket]]) -> bool:
        """A thread that waits in gloo cannot be cut: it ends by its own bound."""
        for peer in peers():
            cut(peer)
        return self._changed.wait_for(lambda: not peers(), _AT_ONCE_S)

    def _leave(self, peer: socket.socket) -> None:
        self._groups.pop(peer, None)

    def _answer(self, peer: socket.socket, nonce: bytes, version: int) -> None:
        call = self._called(peer, nonce)
        offer = self._offers.get(version)
        if offer is None:
            self._tell(peer, None)
            return
        group = self._joined(peer, call) if offer.share else None
        self._tell(peer, offer)
        address = group.address if group is not None else b""
        peer.sendall(LENGTH.pack(len(address)) + address)
        receive_into(peer, memoryview(bytearray(len(GO))))
        if group is not None:
            self._send(group, peer, version, offer)

    def _called(self, peer: socket.socket, nonce: bytes) -> GroupCall:
        """The group that the receiver names. ValueError if it does not know the secret, or names none that can be."""
        head = bytearray(LENGTH.size)
        receive_into(peer, memoryview(head))
        (size,) = LENGTH.unpack(head)
        if size > MOST_CALL_BYTES:
            raise ValueError(f"a group in {size} bytes")
        body, proven = bytearray(size), bytearray(PROOF_BYTES)
        receive_into(peer, memoryview(body))
        receive_into(peer, memoryview(proven))
        if not hmac.compare_digest(proven, proof(self._secret, nonce, bytes(head + body))):
            raise ValueError("it does not know the secret of this run")
        try:
            call = msgspec.msgpack.decode(body, type=GroupCall)
        except msgspec.DecodeError as error:
            raise ValueError(f"it names no group: {error}") from error
        return call

    def _joined(self, peer: socket.socket, call: GroupCall) -> Group:
        """The group, in which we are already or from now on."""
        group = self._groups.get(peer)
        if group is None or group.name != call.name:
            check_call(call)
            group = self._groups[peer] = Group(call.name, call.rank, call.size, self.host, self._timeout_s)
            group.meet(RECEIVER, call.address)
        return group

    def _send(self, group: Group, peer: socket.socket, version: int, offer: Offer) -> None:
        """All buckets, unless the share is taken back before. ConnectionError."""
        bucket_bytes = read_manifest(offer.manifest, len(offer.share)).layout.bucket_bytes
        self._start_reading(peer, version)
        flat = torch.frombuffer(offer.share, dtype=torch.uint8)
        with under_way() as works:
            for tag, bucket in enumerate(flat.split(bucket_bytes)):
                if self._offers.get(version) is not offer:
                    raise ConnectionError("the version was taken back")
                works.append(group.send(bucket, tag))
                if len(works) == AHEAD:
                    finish(works.popleft())
            while works:
                finish(works.popleft())
        self._stop_reading(peer)
