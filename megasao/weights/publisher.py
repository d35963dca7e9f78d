"""The trainer's side of live weights: announces a version, serves its buckets, and commits it on all receivers.

A version is either here in memory, and goes out in buckets, or lies elsewhere: in a directory that the receivers read,
or in the memory of the trainer's ranks, which they ask.

Runs in a thread of its own beside the training loop. Invariants, asserted by the tests:
- a version is committed on all live receivers together; one that fails, is late or falls silent is quarantined by
  name, and the others go on; no receiver at all is fine;
- whoever says hello later gets the newest version, whatever version number it had in an earlier life (epoch);
- a malformed message is refused with its reason, and the publisher goes on;
- every wait is bounded: a publication lasts at most two phases of ``timeout_s``.
"""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
import torch
import zmq

from megasao.config.rollout import TransportConfig
from megasao.transport.codec import MalformedMessage, decode, encode
from megasao.transport.endpoints import bind_router
from megasao.transport.keys import CurveKeys
from megasao.weights.flat import FlatWeights, pack
from megasao.weights.messages import (
    Bucket,
    Commit,
    Committed,
    Current,
    Failed,
    Fetch,
    FromReceiver,
    Hello,
    Quarantine,
    Ready,
    Refused,
    ToReceiver,
)
from megasao.weights.publication import Elsewhere, Payload, Publication, PublishResult

_log = logging.getLogger(__name__)

_TICK_MS = 200
_GRACE_S = 5.0


class WeightPublisher:
    """Publishes weights at ``address``. Not more than one thread may call ``publish`` and ``wait``."""

    def __init__(
        self,
        address: str,
        *,
        config: TransportConfig,
        keys: CurveKeys | None = None,
        bucket_bytes: int = 4 * 2**20,
    ) -> None:
        """Bind and start serving. ValueError if the address cannot be bound.

        ``config.weights_timeout_s`` bounds each phase; a receiver silent for ``config.dead_after_s`` is gone.
        """
        self.epoch = uuid.uuid4().hex
        self._address, self._bucket_bytes = address, bucket_bytes
        self._timeout_s, self._dead_after_s = config.weights_timeout_s, config.dead_after_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_router(self._context, address, high_water_mark=config.high_water_mark, keys=keys)
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_out.connect("inproc://wake")
        self._inbox: queue.SimpleQueue[Payload] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[PublishResult] = queue.SimpleQueue()
        self._in_flight: int | None = None
        self._last_result: PublishResult | None = None
        self._seen: dict[str, float] = {}
        self._holding: dict[str, set[tuple[str, int]]] = {}
        self._publication: Publication | None = None
        self._current: Payload | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` (Hugging Face names, any device) and send them out in the background as ``version``.

        Waits, bounded, for the previous publication. ValueError if ``version`` does not grow; RuntimeError if the
        publisher has died.
        """
        self.make_room(version)
        weights = pack(version, tensors, self._bucket_bytes)
        assert len(weights.checksums) == weights.buckets  # computed here, not in the serving thread
        self._send_out(weights)

    def publish_elsewhere(self, weights: Elsewhere) -> None:
        """Announce a version that lies complete in a directory or on the ranks. Waits and raises as :meth:`publish`."""
        self.make_room(weights.version)
        self._send_out(weights)

    def make_room(self, version: int) -> None:
        """Wait, bounded, until ``version`` can be published. ValueError if it does not grow."""
        if self._in_flight is not None:
            self.wait()
        if self._last_result is not None and version <= self._last_result.version:
            raise ValueError(f"weight version {version} cannot follow {self._last_result.version}; versions must grow")
        self._check_alive()

    def needed(self) -> set[tuple[str, int]]:
        """Epoch and version of what is current or on its way, or what a live receiver runs or loads."""
        publication, current = self._publication, self._current
        ours = (publication.weights if publication is not None else None, current)
        mine = {(self.epoch, weights.version) for weights in ours if weights is not None}
        return mine.union(*list(self._holding.values()))

    def _send_out(self, weights: Payload) -> None:
        self._in_flight = weights.version
        self._inbox.put(weights)
        self._wake()

    def wait(self, timeout: float | None = None) -> PublishResult:
        """The result of the last ``publish``. TimeoutError after ``timeout`` seconds (default: both phases' bound)."""
        if self._in_flight is None:
            if self._last_result is None:
                raise ValueError("nothing was published yet")
            return self._last_result
        bound = 2 * self._timeout_s + _GRACE_S if timeout is None else timeout
        deadline = time.monotonic() + bound
        while True:
            self._check_alive()
            try:
                self._last_result = self._results.get(timeout=max(0.0, min(0.5, deadline - time.monotonic())))
                break
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"weight version {self._in_flight} is not committed after {bound:g} s "
                        f"on {self._address}; receivers: {sorted(self._seen)}"
                    ) from None
        self._in_flight = None
        return self._last_result

    @property
    def last_result(self) -> PublishResult | None:
        """How the newest version that was waited for went out; each ``publish`` waits for the one before."""
        return self._last_result

    def close(self) -> None:
        """Stop serving; a publication that is under way is given up."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._wake()
        self._thread.join(timeout=_GRACE_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the weight publisher's thread on {self._address} did not stop within {_GRACE_S} s")
        self._wake_out.close(linger=0)
        self._context.term()

    def _wake(self) -> None:
        """Spare the serving thread its tick; a wake-up that does not fit is not needed."""
        with suppress(zmq.Again):
            self._wake_out.send(b"", zmq.NOBLOCK)

    def __enter__(self) -> "WeightPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the weight publisher on {self._address} died: {self._error!r}") from self._error
        if self._stop.is_set():
            raise RuntimeError(f"the weight publisher on {self._address} is closed")

    # the serving thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake_in, zmq.POLLIN)
            while not self._stop.is_set():
                events = dict(poller.poll(_TICK_MS))
                if self._wake_in in events:
                    self._wake_in.recv()
                if self._socket in events:
                    self._receive()
                self._advance()
        except BaseException as error:  # told to the training loop at its next call
            _log.exception("the weight publisher died")
            self._error = error
        finally:
            self._socket.close()
            self._wake_in.close(linger=0)

    def _receive(self) -> None:
        """Handle what has arrived, then give the publication its turn."""
        for _ in range(256):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            name = identity.decode("utf-8", "backslashreplace")
            try:
                message, _payload = decode(frames, FromReceiver)
            except MalformedMessage as error:
                self._reply_raw(identity, Refused(str(error)))
                continue
            if name.encode() != identity:
                self._reply_raw(identity, Refused("the identity of a receiver must be UTF-8 text"))
                continue
            self._handle(name, message)

    def _handle(self, name: str, message: Any) -> None:
        self._seen[name] = time.monotonic()
        if isinstance(message, Hello):
            self._on_hello(name, message)
        elif isinstance(message, Fetch):
            self._on_fetch(name, message)
        elif message.epoch == self.epoch:
            self._on_report(name, message)

    def _on_hello(self, name: str, hello: Hello) -> None:
        same_life = hello.epoch == self.epoch
        if hello.epoch is not None:
            held = (hello.version, hello.loading)
            self._holding[name] = {(hello.epoch, version) for version in held if version is not None}
        self._send(name, Current(self.epoch, self._current.version if self._current else None))
        target = self._target()
        if target is not None and not (same_life and target.version in (hello.version, hello.loading)):
            self._announce(name, target)

    def _on_fetch(self, name: str, fetch: Fetch) -> None:
        target = self._target()
        if target is None:
            return
        if (fetch.epoch, fetch.version) != (self.epoch, target.version):
            self._announce(name, target)
        elif not isinstance(target, FlatWeights):
            self._send(name, Refused(f"version {target.version} is not to be had in buckets here"))
        elif not 0 <= fetch.bucket < target.buckets:
            self._send(name, Refused(f"bucket {fetch.bucket} of version {target.version}: it has {target.buckets}"))
        else:
            crc = target.checksums[fetch.bucket]
            bucket = Bucket(self.epoch, target.version, fetch.bucket, crc)
            self._send(name, bucket, target.bucket(fetch.bucket))

    def _on_report(self, name: str, message: Ready | Committed | Failed) -> None:
        publication = self._publication
        if publication is not None and message.version == publication.weights.version:
            if isinstance(message, Failed):
                _log.warning("weights %d quarantined at %s: %s", message.version, name, message.reason)
                publication.quarantine(name, message.reason)
            elif isinstance(message, Ready):
                publication.set_ready(name)
            else:
                publication.set_committed(name)
                self._holding[name] = {(self.epoch, message.version)}
        if isinstance(message, Ready) and self._current is not None and message.version == self._current.version:
            self._send(name, Commit(self.epoch, message.version))

    def _target(self) -> Payload | None:
        """What a receiver should fetch now: the version on its way, or the newest one."""
        return self._publication.weights if self._publication is not None else self._current

    def _advance(self) -> None:
        now = time.monotonic()
        for name in [name for name, seen in self._seen.items() if now - seen > self._dead_after_s]:
            self._drop(name, f"was silent for {self._dead_after_s:g} s")
        if self._publication is None and not self._inbox.empty():
            self._publication = Publication(self._inbox.get(), self._seen, now=now, timeout_s=self._timeout_s)
            for name in list(self._seen):
                self._announce(name, self._publication.weights)
        publication = self._publication
        if publication is None:
            return
        before = publication.phase
        for name in publication.advance(now):
            self._send(name, Quarantine(self.epoch, publication.weights.version, publication.quarantined[name]))
        if before == "prepare" and publication.phase == "commit":
            self._current = publication.weights
            for name in sorted(publication.ready):
                self._send(name, Commit(self.epoch, publication.weights.version))
            publication.advance(now)
        if publication.phase == "done":
            self._publication = None
            self._results.put(publication.result(now))

    def _announce(self, name: str, weights: Payload) -> None:
        self._send(name, weights.announcement(self.epoch))

    def _send(self, name: str, message: ToReceiver, payload: bytes | memoryview = b"") -> None:
        if not self._reply_raw(name.encode(), message, payload):
            self._drop(name, "disconnected")

    def _reply_raw(self, identity: bytes, message: msgspec.Struct, payload: bytes | memoryview = b"") -> bool:
        """False if the peer is gone. A full pipe loses the message: the receiver's next heartbeat asks again."""
        try:
            self._socket.send_multipart([identity, *encode(message, payload)], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def _drop(self, name: str, reason: str) -> None:
        self._seen.pop(name, None)
        self._holding.pop(name, None)
        if self._publication is not None:
            self._publication.quarantine(name, reason)
