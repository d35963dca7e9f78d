"""A socket that is answered by a thread of its own, whatever else its process is busy with."""

import logging
import threading
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)

POLL_MS = 100
Frames = list[bytes | memoryview]


class AnsweringThread:
    """Sends each peer of a ROUTER socket what ``answer`` makes of its frames, until ``close``; owns ``socket``.

    An answer that cannot be made (its error is logged) or sent at once is left out: who asked asks again.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", answer: Callable[[list[bytes]], Frames], *, name: str) -> None:
        self._socket, self._answer = socket, answer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to answer; what is on its way is still sent, within the socket's bound."""
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(POLL_MS):
                continue
            peer, *frames = self._socket.recv_multipart()
            try:
                self._socket.send_multipart([peer, *self._answer(frames)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                logger.info("an answer could not be sent (%s); who asked asks again", error)
            except Exception:  # of one question; the others must still be answered
                logger.exception("%s: an answer could not be made", self._thread.name)
