"""What rank 0 of a separate critic says to the actor: a thread that answers at once, whatever the ranks are busy with.

Invariants, asserted by the tests:
- a command is handed on once, however often it is sent, and answered the same until a later step makes it old;
- a command of a step that is past is refused: then the worlds do not go on from the same checkpoint;
- a message that is malformed is refused and changes nothing.
"""

import logging
import queue
import threading
from typing import Any

import msgspec
import zmq

from megasao.transport.answering import AnsweringThread, Frames
from megasao.transport.codec import MalformedMessage, decode, encode
from megasao.transport.endpoints import bind_router
from megasao.transport.keys import CurveKeys
from megasao.transport.messages import Refused
from megasao.transport.values import (
    Command,
    CriticLacksPayload,
    Learned,
    LearnedRequest,
    Leave,
    Leaving,
    Save,
    Saved,
    ToCritic,
    Train,
    Values,
    Working,
)

logger = logging.getLogger(__name__)

_COMMANDS: dict[type, type] = {
    Values: Train,
    CriticLacksPayload: Train,
    Learned: LearnedRequest,
    Saved: Save,
    Leaving: Leave,
}
"""What each is the answer to."""

Place = tuple[int, int]
"""Step and attempt."""


class ValueService:
    """Binds ``address`` and serves it from its own thread until ``close``. ValueError where it cannot be bound."""

    def __init__(self, address: str, *, high_water_mark: int, keys: CurveKeys | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        bound = bind_router(self._context, address, high_water_mark=high_water_mark, keys=keys)
        self._commands: queue.Queue[Command] = queue.Queue()
        self._newest: dict[type, Place] = {}
        self._answers: dict[tuple[type, Place], Frames] = {}
        self._lock = threading.Lock()
        self._thread = AnsweringThread(bound, self._reply, name="value-service")

    def next(self, timeout_s: float) -> Command | None:
        """The next command, in the order in which they came; None if there is none within the time."""
        try:
            return self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def say(self, answer: Values | CriticLacksPayload | Learned | Saved | Leaving, payload: bytes = b"") -> None:
        """Answer what was asked of ``answer.step``, from now on."""
        self._keep(_COMMANDS[type(answer)], _place(answer), encode(answer, payload))

    def refuse(self, command: Command, reason: str) -> None:
        """This command cannot be followed."""
        self._keep(type(command), _place(command), encode(Refused(reason)))

    def close(self) -> None:
        """Stop to answer; what is on its way is still sent, within the sockets' bound."""
        self._thread.close()
        self._context.term()

    def _keep(self, command: type, place: Place, frames: Frames) -> None:
        with self._lock:
            for old in [key for key in self._answers if key[0] is command]:
                del self._answers[old]
            self._answers[command, place] = frames

    def _reply(self, frames: list[bytes]) -> Frames:
        try:
            message, _ = decode(frames, ToCritic)
        except MalformedMessage as error:
            logger.warning("refused a message: %s", error)
            return encode(Refused(str(error)))
        with self._lock:
            answer = self._answers.get((type(message), _place(message)))
            return answer if answer is not None else encode(self._take(message))

    def _take(self, message: Any) -> msgspec.Struct:
        """Hand on a command that is new."""
        place, newest = _place(message), self._newest.get(type(message), (-1, 0))
        if place < newest:
            return Refused(
                f"{type(message).__name__} of step {message.step}, but the critic was asked for that of step "
                f"{newest[0]} already; both worlds must go on from the same checkpoint: restart them together"
            )
        if place > newest and isinstance(message, Command):
            self._newest[type(message)] = place
            self._commands.put(message)
        return Working()


def _place(message: Any) -> Place:
    return message.step, getattr(message, "attempt", 0)
