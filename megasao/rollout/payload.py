"""A rollout worker as the host of its trajectories: it keeps them, and the trainer's ranks fetch them from it.

Invariants, asserted by the tests:
- questions are answered by a thread of their own, whatever the worker's event loop is busy with;
- a message that is malformed, or asks for what is not held, is refused and changes nothing;
- one that starts again is asked where it was before, if it can be: a separate critic has the manifest of then;
- beyond loopback the socket has the run's CURVE keys, like every other.
"""

import socket
from typing import Any
from urllib.parse import urlsplit

import zmq

from megasao.config.rundir import write_atomically
from megasao.trajectories.hosted import PayloadJournal
from megasao.trajectories.ipc import to_ipc
from megasao.transport.answering import AnsweringThread, Frames
from megasao.transport.codec import MalformedMessage, decode, encode
from megasao.transport.endpoints import bind_router
from megasao.transport.keys import CurveKeys
from megasao.transport.messages import Fetched, FetchRequest, Refused

MOST_ANSWERS = 4
"""Answers that wait for one rank to read them: they may be large, and who does not read asks again."""
PORT = "port"
"""The file, beside the journal, that says where the host was asked last."""


class PayloadService:
    """Serves ``journal`` on ``host``, at ``address``, until ``close``. ValueError where it cannot be bound."""

    def __init__(self, journal: PayloadJournal, host: str, *, keys: CurveKeys | None = None) -> None:
        self.journal = journal
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        shown = f"[{host}]" if ":" in host else host
        bound = self._bind(shown, keys)
        port = bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        write_atomically(journal.directory / PORT, port)
        self.address = f"tcp://{shown}:{port}"
        """Where the trainer's ranks ask."""
        self._thread = AnsweringThread(bound, self._answer, name="payload")

    def _bind(self, shown: str, keys: CurveKeys | None) -> Any:
        """On the port of the life before, if it is free, else on any."""
        file = self.journal.directory / PORT
        before = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        for port in [before, "*"] if before.isascii() and before.isdigit() else ["*"]:
            try:
                return bind_router(self._context, f"tcp://{shown}:{port}", high_water_mark=MOST_ANSWERS, keys=keys)
            except ValueError:
                if port == "*":
                    raise
        raise AssertionError("any port is tried last")

    def close(self) -> None:
        """Stop to answer, and close the journal."""
        self._thread.close()
        self._context.term()
        self.journal.close()

    def _answer(self, frames: list[bytes]) -> Frames:
        try:
            message, _ = decode(frames, FetchRequest)
            batch = self.journal.fetch(message.trajectory_ids)
            return encode(Fetched(batch.num_rows), to_ipc(batch))
        except (MalformedMessage, ValueError) as error:
            return encode(Refused(str(error)))


def own_host(controller: str) -> str:
    """The address of this machine that the way to ``controller`` (``tcp://HOST:PORT``) starts from.

    OSError where there is no way.
    """
    place = urlsplit(controller)
    family, _, _, _, target = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
