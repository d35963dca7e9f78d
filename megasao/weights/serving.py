"""One trainer rank's share of the newest versions, for every receiver that asks: a thread of its own for each.

Over one connection: a nonce to the receiver; then, for each version, which one it wants, with a proof that it knows the
secret; the version that comes, and how long its manifest is (0: there is no such version); the manifest; the share. A
receiver may ask for the next version on the same connection, also before there is one: it goes out as soon as it is
offered. Invariants, asserted by the tests:
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
HEAD = struct.Struct("<QQ")
"""What comes first: the version, and how long its manifest is."""
AFTER = 2**63
"""Added to a version: the newest one after it, as soon as there is one."""
_GRACE_S = 10.0
_PAUSE_S = 0.1
_LOOK_S = 0.5
"""How often a rank looks whether a receiver that waits for the next version is still there."""
_MOST_WAITING = 256
"""Connections that the kernel keeps until they are accepted."""


@dataclass(frozen=True)
class Offer:
    """A version as one rank has it."""

    version: int
    manifest: bytes
    share: memoryview


class ShareServer:
    """Serves at ``host``, on a port that the system chooses."""

    def __init__(self, host: str, secret: bytes, *, timeout_s: float) -> None:
        """``timeout_s`` bounds the wait for a receiver that takes nothing. ValueError if ``host`` is not ours."""
        self.host, self._secret, self._timeout_s = host, secret, timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=_MOST_WAITING)
        except OSError as error:
            raise ValueError(f"cannot serve weights at {host}: {error}; is it an address of this machine?") from error
        self.port: int = listener.getsockname()[1]
        here = socket.socket(socket.AF_UNIX)
        here.bind(nearby(host, self.port, secret))
        here.listen(_MOST_WAITING)
        self._offers: dict[int, Offer] = {}
        self._peers: set[socket.socket] = set()
        self._reading: dict[socket.socket, int] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._doors = [
            (door, threading.Thread(target=self._accept, args=(door,), name="weight-share", daemon=True))
            for door in (listener, here)
        ]
        for _, thread in self._doors:
            thread.start()

    def offer(self, version: int, manifest: bytes, share: memoryview) -> None:
        """Serve this version too from now on. ``share`` must not change before :meth:`retire`."""
        with self._changed:
            self._offers[version] = Offer(version, manifest, share)
            self._changed.notify_all()

    def retire(self, version: int) -> bool:
        """Serve it no more; whether nobody reads its share now, so that the memory may be used again.

        RuntimeError if a connection cannot be cut.
        """
        with self._changed:
            del self._offers[version]
            return self._end(lambda: [peer for peer, read in self._reading.items() if read == version])

    def _end(self, peers: Callable[[], Collection[socket.socket]]) -> bool:
        """Cut connections; whether their threads have ended."""
        for peer in peers():
            cut(peer)
        self._changed.notify_all()
        if not self._changed.wait_for(lambda: not peers(), _GRACE_S):
            raise RuntimeError(f"{len(peers())} connections to {self.host}:{self.port} do not end")
        return True

    def close(self) -> None:
        """Stop."""
        self._closed = True
        for door, thread in self._doors:
            cut(door)
            door.close()
            thread.join(_GRACE_S)
        with self._changed:
            self._offers = {}
            self._end(lambda: self._peers)

    def _accept(self, door: socket.socket) -> None:
        while not self._closed:
            try:
                peer, _ = door.accept()
            except OSError as error:
                self._cannot_take(error)  # the peer is gone already, or too many files are open for now
                continue
            with self._changed:
                self._peers.add(peer)
            try:
                threading.Thread(target=self._serve, args=(peer,), name="weight-share-peer", daemon=True).start()
            except RuntimeError as error:  # there can be no more threads for now
                self._forget(peer)
                self._cannot_take(error)

    def _cannot_take(self, error: Exception) -> None:
        if not self._closed:
            logger.warning("a receiver could not connect to %s:%d: %s", self.host, self.port, error)
            time.sleep(_PAUSE_S)

    def _forget(self, peer: socket.socket) -> None:
        with self._changed:
            peer.close()
            self._peers.discard(peer)
            self._reading.pop(peer, None)
            self._changed.notify_all()

    def _serve(self, peer: socket.socket) -> None:
        try:
            bound(peer, self._timeout_s)
            if peer.family != socket.AF_UNIX:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(NONCE_BYTES)
            peer.sendall(nonce)
            while (asked := self._asked(peer, nonce)) is not None:
                self._answer(peer, nonce, asked)
        except (OSError, ValueError) as error:
            logger.info("a receiver of weights is gone: %s", error)
        finally:
            self._leave(peer)
            self._forget(peer)

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

    def _answer(self, peer: socket.socket, nonce: bytes, asked: int) -> None:
        """Send the version, if it is here; or the next one, once it is."""
        offer = self._next(peer, asked - AFTER) if asked >= AFTER else self._start_reading(peer, asked)
        self._tell(peer, offer)
        if offer is not None:
            peer.sendall(offer.share)
        self._stop_reading(peer)

    def _tell(self, peer: socket.socket, offer: Offer | None) -> None:
        """Send the manifest, or that there is none."""
        version, manifest = (offer.version, offer.manifest) if offer is not None else (0, b"")
        peer.sendall(HEAD.pack(version, len(manifest)) + manifest)

    def _next(self, peer: socket.socket, version: int) -> Offer | None:
        """Wait for what follows ``version``, and start to read it. ConnectionError if nobody waits any more."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while (newest := max(self._offers, default=version)) <= version:
                if self._closed or time.monotonic() >= deadline or _has_left(peer):
                    raise ConnectionError("it waits for no version any more")
                self._changed.wait(_LOOK_S)
            return self._start_reading(peer, newest)

    def _start_reading(self, peer: socket.socket, version: int) -> Offer | None:
        """The version, if it is here; then its memory does not change before :meth:`_stop_reading`."""
        with self._changed:
            offer = self._offers.get(version)
            if offer is not None:
                self._reading[peer] = version
            return offer

    def _stop_reading(self, peer: socket.socket) -> None:
        with self._changed:
            self._reading.pop(peer, None)
            self._changed.notify_all()

    def _leave(self, peer: socket.socket) -> None:
        """What a carrier has for this connection goes."""


def proof(secret: bytes, nonce: bytes, asked: bytes) -> bytes:
    """Shows that its sender knows ``secret``, and goes for one connection only."""
    return hmac.digest(secret, nonce + asked, hashlib.sha256)


def nearby(host: str, port: int, secret: bytes) -> bytes:
    """The Unix socket (in the abstract namespace) of the rank that serves at ``host``:``port``, for receivers on its
    machine: half the work of TCP. Nobody can take the name before who knows the secret; whoever sees it there (the
    kernel lists all of them) still has to prove that he knows the secret."""
    return b"\0megasao-weights-" + hmac.digest(secret, f"{host}:{port}".encode(), hashlib.sha256).hex().encode()


def bound(connection: socket.socket, seconds: float) -> None:
    """No single wait of a blocking socket lasts longer (a timeout of Python's would turn it into a polling one)."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _has_left(peer: socket.socket) -> bool:
    """Whether the other side has ended the connection."""
    try:
        return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


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


def read_head(connection: socket.socket) -> tuple[int, int]:
    """The version that comes, and how long its manifest is: 0 if there is none. Raises as :func:`receive_into`."""
    head = bytearray(HEAD.size)
    receive_into(connection, memoryview(head))
    version, size = HEAD.unpack(head)
    return int(version), int(size)


def address_towards(host: str) -> str:
    """This machine's address on the network on which it reaches ``host``. ValueError if it does not."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"no way to {host}, where the trainer's first rank announces weights: {error}") from error


def cut(connection: socket.socket) -> None:
    """End it for whoever waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
