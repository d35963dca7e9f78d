"""One trainer rank's share of the newest versions, for every receiver that asks: a thread of its own for each.

Over one connection: a nonce to the receiver; then, for each version, which one it wants, with a proof that it knows the
secret; the manifest, length first (0: there is no such version); the share. A receiver may ask for the next version on
the same connection. Invariants, asserted by the tests:
- the trainer never waits for a receiver: a share that is taken back cuts the connections of those who still read it,
  and only those;
- a receiver that hangs, dies, or does not know the secret disturbs nobody else;
- every wait is bounded.
"""

import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

NONCE_BYTES = 16
PROOF_BYTES = 32
LENGTH = struct.Struct("<Q")
_GRACE_S = 10.0
_PAUSE_S = 0.1
_MOST_WAITING = 256
"""Connections that the kernel keeps until they are accepted."""


@dataclass(frozen=True)
class _Offer:
    manifest: bytes
    share: memoryview


class ShareServer:
    """Serves at ``host``, on a port that the system chooses."""

    def __init__(self, host: str, secret: bytes, *, timeout_s: float) -> None:
        """``timeout_s`` bounds the wait for a receiver that takes nothing. ValueError if ``host`` is not ours."""
        self.host, self._secret, self._timeout_s = host, secret, timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=_MOST_WAITING)
        except OSError as error:
            raise ValueError(f"cannot serve weights at {host}: {error}; is it an address of this machine?") from error
        self.port: int = self._listener.getsockname()[1]
        self._offers: dict[int, _Offer] = {}
        self._peers: set[socket.socket] = set()
        self._reading: dict[socket.socket, int] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="weight-share", daemon=True)
        self._thread.start()

    def offer(self, version: int, manifest: bytes, share: memoryview) -> None:
        """Serve this version too from now on. ``share`` must not change before :meth:`retire`."""
        with self._changed:
            self._offers[version] = _Offer(manifest, share)

    def retire(self, version: int) -> None:
        """Serve it no more; on return nobody reads its share. RuntimeError if a connection cannot be cut."""
        with self._changed:
            del self._offers[version]
            self._cut_all(lambda: [peer for peer, read in self._reading.items() if read == version])

    def _cut_all(self, peers: Callable[[], Collection[socket.socket]]) -> None:
        for peer in peers():
            _cut(peer)
        if not self._changed.wait_for(lambda: not peers(), _GRACE_S):
            raise RuntimeError(f"{len(peers())} connections to {self.host}:{self.port} do not end")

    def close(self) -> None:
        """Stop."""
        self._closed = True
        _cut(self._listener)
        self._listener.close()
        self._thread.join(_GRACE_S)
        with self._changed:
            self._offers = {}
            self._cut_all(lambda: self._peers)

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:  # the peer is gone already, or too many files are open for now
                    logger.warning("a receiver could not connect to %s:%d: %s", self.host, self.port, error)
                    time.sleep(_PAUSE_S)
                continue
            with self._changed:
                self._peers.add(peer)
            threading.Thread(target=self._serve, args=(peer,), name="weight-share-peer", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            bound(peer, self._timeout_s)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(NONCE_BYTES)
            peer.sendall(nonce)
            while (version := self._asked(peer, nonce)) is not None:
                self._answer(peer, version)
        except (OSError, ValueError) as error:
            logger.info("a receiver of weights is gone: %s", error)
        finally:
            with self._changed:
                peer.close()
                self._peers.discard(peer)
                self._reading.pop(peer, None)
                self._changed.notify_all()

    def _asked(self, peer: socket.socket, nonce: bytes) -> int | None:
        """The version that the receiver asks for; None once it has left. ValueError if it does not know the secret."""
        asked = memoryview(bytearray(LENGTH.size + PROOF_BYTES))
        if not peer.recv_into(asked, 1, socket.MSG_PEEK):
            return None
        receive_into(peer, asked)
        if not hmac.compare_digest(asked[LENGTH.size :], proof(self._secret, nonce, bytes(asked[: LENGTH.size]))):
            raise ValueError("it does not know the secret of this run")
        (version,) = LENGTH.unpack(asked[: LENGTH.size])
        return int(version)

    def _answer(self, peer: socket.socket, version: int) -> None:
        """Send the version, if it is here."""
        with self._changed:
            offer = self._offers.get(version)
            if offer is not None:
                self._reading[peer] = version
        manifest = offer.manifest if offer is not None else b""
        peer.sendall(LENGTH.pack(len(manifest)) + manifest)
        if offer is not None:
            peer.sendall(offer.share)
        with self._changed:
            self._reading.pop(peer, None)
            self._changed.notify_all()


def proof(secret: bytes, nonce: bytes, asked: bytes) -> bytes:
    """Shows that its sender knows ``secret``, and goes for one connection only."""
    return hmac.digest(secret, nonce + asked, hashlib.sha256)


def bound(connection: socket.socket, seconds: float) -> None:
    """No single wait of a blocking socket lasts longer (a timeout of Python's would turn it into a polling one)."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def receive_into(connection: socket.socket, place: memoryview) -> None:
    """Fill ``place``. ConnectionError if the other side ends before, TimeoutError if nothing comes."""
    while place:
        try:
            count = connection.recv_into(place, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("nothing arrived in time") from None
        if not count:
            raise ConnectionError(f"the connection ended {len(place)} bytes too early")
        place = place[count:]


def address_towards(host: str) -> str:
    """This machine's address on the network on which it reaches ``host``. ValueError if it does not."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"no way to {host}, where the trainer's first rank announces weights: {error}") from error


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
