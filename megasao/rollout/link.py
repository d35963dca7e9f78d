"""A worker's connection to the controller: numbered messages, signs of life, reconnection.

Invariants:
- sending never blocks: what cannot be sent now is sent again (numbered messages) or is out of date anyway;
- a controller that does not know this worker, or was silent for two heartbeats, is told ``Hello``;
- a controller that was restarted, or had given this worker up (a new incarnation), is sent again what it has not
  acknowledged;
- after ``give_up_after_s`` of silence the worker fails with an error that names the controller's address.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import zmq

from megasao.rollout.outbox import Outbox
from megasao.transport.codec import MalformedMessage, decode, encode
from megasao.transport.messages import FromWorker, Hello, ToWorker

logger = logging.getLogger(__name__)


class ControllerSilent(RuntimeError):
    """The controller has not answered within the bound."""


class ControllerLink:
    """Owns the DEALER socket (asyncio kind) and the outbox."""

    def __init__(
        self, socket: Any, address: str, peer: str, *, heartbeat_s: float, give_up_after_s: float, payload: str = ""
    ) -> None:
        """``payload``: where this worker is asked for trajectories, if it keeps them itself."""
        self._socket = socket
        self._address = address
        self._peer = peer
        self._heartbeat_s = heartbeat_s
        self._give_up_after_s = give_up_after_s
        self._payload = payload
        self._last_heard = time.monotonic()
        self._last_hello = -float("inf")
        self._incarnation: str | None = None
        self.outbox = Outbox(resend_after_s=4 * heartbeat_s)
        self.connected = False
        """Whether the controller knows this worker."""

    async def send(self, message: FromWorker, payload: bytes = b"") -> bool:
        """Send if the queue has room; whether it had."""
        return await self._send_frames(encode(message, payload))

    def keep(self, message: Any, lease_ids: Iterable[str], payload: bytes = b"") -> None:
        """Put a numbered message into the outbox; ``flush`` sends it."""
        self.outbox.add(message.seq, encode(message, payload), tuple(lease_ids))

    async def flush(self) -> None:
        """Send what the outbox has due."""
        if not self.connected:
            return
        now = time.monotonic()
        for entry in self.outbox.due(now):
            if not await self._send_frames(entry.frames):
                return
            entry.sent_at = now

    async def receive(self) -> Any:
        """The next message from the controller; malformed ones are logged and passed over."""
        while True:
            frames = await self._socket.recv_multipart()
            self._last_heard = time.monotonic()
            try:
                message, _ = decode(frames, ToWorker)
            except MalformedMessage as error:
                logger.warning("message from the controller was not understood: %s", error)
                continue
            return message

    async def keep_alive(self, active_leases: list[str]) -> None:
        """Say ``Hello`` where needed. ControllerSilent after ``give_up_after_s``."""
        now = time.monotonic()
        silent = now - self._last_heard
        if silent > self._give_up_after_s:
            raise ControllerSilent(
                f"{self._peer}: no controller at {self._address} answered for {silent:.0f} s "
                f"(bound: supervision.start_timeout_s = {self._give_up_after_s:g}); is its process alive?"
            )
        overdue = not self.connected or silent > 2 * self._heartbeat_s
        if overdue and now - self._last_hello > min(self._heartbeat_s, 1.0):
            self._last_hello = now
            await self.send(Hello(peer=self._peer, active_leases=active_leases, payload=self._payload))

    def welcomed(self, incarnation: str) -> bool:
        """The controller knows this worker; whether it is new to it, and is sent again what is not acknowledged."""
        self.connected = True
        is_new = incarnation != self._incarnation
        if is_new:
            self._incarnation = incarnation
            self.outbox.forget_sending()
        return is_new

    def lost(self) -> None:
        """The controller does not know this worker: say ``Hello`` before anything else."""
        self.connected = False

    async def _send_frames(self, frames: list[Any]) -> bool:
        try:
            await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
