"""The asking side of a request / reply protocol: one blocking request, one reply.

Invariants:
- a reply always belongs to the request just made: a resend goes out on a new connection, so that a late reply to
  an earlier attempt is never mistaken for it;
- a request ends within its time: with the reply (``Refused`` is one), or with TimeoutError naming the endpoint.
"""

import os
import time
import uuid
from typing import Any, ClassVar, Self

import msgspec
import zmq

from megasao.transport.codec import decode, encode
from megasao.transport.endpoints import connect_dealer
from megasao.transport.keys import CurveKeys
from megasao.transport.messages import FromPayloadHost, ToTrainer

RESEND_S = 2.0


class RequestClient:
    """Blocking client. Not for use from two threads at once. Requests are idempotent, hence may be sent again.

    Of a protocol, ``peer`` names the other side in errors, and ``replies`` is the union of what it may say.
    ``identity`` is a prefix: every connection has a name of its own.
    """

    peer: ClassVar[str]
    replies: ClassVar[Any]

    def __init__(
        self,
        address: str,
        *,
        high_water_mark: int = 64,
        keys: CurveKeys | None = None,
        identity: str = "trainer",
        resend_s: float = RESEND_S,
    ) -> None:
        self.address = address
        self._name = identity
        self._high_water_mark = high_water_mark
        self._keys = keys
        self._resend_s = resend_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._connect()

    def request(self, message: msgspec.Struct, *, timeout_s: float) -> tuple[Any, bytes]:
        """Send ``message`` until it is answered; (reply, payload).

        A request that the other side will not serve is answered by ``Refused`` with its reason.
        TimeoutError after ``timeout_s`` seconds.
        """
        frames = encode(message)
        deadline = time.monotonic() + timeout_s
        attempts = 0
        while (left := deadline - time.monotonic()) > 0:
            attempts += 1
            reply = self._attempt(frames, min(left, self._resend_s))
            if reply is None:
                self._reconnect()
                continue
            return decode(reply, self.replies)
        raise TimeoutError(
            f"{self.peer} at {self.address} did not answer {type(message).__name__} within {timeout_s:g} s "
            f"({attempts} attempts); is it running?"
        )

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._context.closed:
            self._socket.close(linger=0)
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _attempt(self, frames: list[Any], wait_s: float) -> list[bytes] | None:
        end = time.monotonic() + wait_s
        if not self._socket.poll(max(1, int(wait_s * 1000)), zmq.POLLOUT):
            return None
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # the connection was lost since the question
            return None
        left_ms = max(1, int((end - time.monotonic()) * 1000))
        return self._socket.recv_multipart() if self._socket.poll(left_ms, zmq.POLLIN) else None

    def _connect(self) -> zmq.Socket[bytes]:
        identity = f"{self._name}-{os.getpid()}-{uuid.uuid4().hex[:12]}".encode()
        socket: zmq.Socket[bytes] = connect_dealer(
            self._context, self.address, identity=identity, high_water_mark=self._high_water_mark, keys=self._keys
        )
        return socket

    def _reconnect(self) -> None:
        self._socket.close(linger=0)
        self._socket = self._connect()


class ControllerClient(RequestClient):
    """The trainer's side of the controller protocol."""

    peer = "the controller"
    replies = ToTrainer


class PayloadClient(RequestClient):
    """The trainer's side of the protocol with a rollout host that keeps payload."""

    peer = "the rollout host"
    replies = FromPayloadHost
