"""The critic of another world, as the actor's ranks use it.

Invariants, asserted by the tests:
- every wait is bounded by ``critic.timeout_s``, and its error names the critic's address, what was asked, and whether
  the critic answers at all;
- rank 0 alone asks; every rank gets the same answer, and no collective is longer than one round of questions;
- values belong to the trajectories of the step that was asked for, or they are refused.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from megasao.config.lifesign import LifeSign
from megasao.megatron.runtime import Topology
from megasao.training.batch import Batch
from megasao.training.payload import PayloadUnreachable
from megasao.training.value_exchange import of_rows
from megasao.transport.client import RequestClient
from megasao.transport.keys import CurveKeys
from megasao.transport.messages import Refused
from megasao.transport.values import (
    CriticLacksPayload,
    FromCritic,
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

ROUND_S = 2.0
"""Bound on one round of questions, after which all ranks show a sign of life."""
_LEAST_WAIT_S = 0.5
"""For an answer, also to the last question: a critic that is at work must have the time to say so."""
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


class Silent(msgspec.Struct, tag=True, frozen=True):
    """What rank 0 tells the others when the critic gives no answer at all."""


class Overdue(msgspec.Struct, tag=True, frozen=True):
    """What rank 0 tells the others when the time is over."""

    reason: str


Shared = FromCritic | Silent | Overdue


class CriticClient(RequestClient):
    """The actor's side of the protocol with a separate critic."""

    peer = "the critic"
    replies = FromCritic


def connect(address: str, *, high_water_mark: int, keys: CurveKeys | None) -> CriticClient:
    """Rank 0's connection; it does not wait for the critic."""
    return CriticClient(address, identity="actor", high_water_mark=high_water_mark, keys=keys)


@dataclass
class RemoteCritic:
    """Every rank of the actor's world enters every method. ``client`` exists on rank 0 only."""

    address: str
    client: RequestClient | None
    topology: Topology
    timeout_s: float
    lifesign: LifeSign
    attempt: int = 0
    """How often the critic could not have the payload of the step that it is asked for."""

    def values(self, batch: Batch, *, step: int) -> list[torch.Tensor]:
        """float32 [T] per row: V before the step's updates. The critic then goes on to its updates by itself.

        TimeoutError names the critic. RuntimeError: it refused, with its reason. PayloadUnreachable, on every rank: it
        cannot have what it is to learn from, and may be asked again for this step, also with other trajectories.
        """
        answer, payload = self._wait(Train(step, list(batch.entries), self.attempt), Values, CriticLacksPayload)
        if isinstance(answer, CriticLacksPayload):
            self.attempt += 1
            raise PayloadUnreachable(f"the critic at {self.address}: {answer.reason}")
        self.attempt = 0
        return of_rows(batch, read_values(answer, payload, batch, step))

    def learned(self, *, step: int) -> Learned:
        """The metrics of the step's updates, once they are done. Errors as those of :meth:`values`."""
        answer, _ = self._wait(LearnedRequest(step), Learned)
        assert isinstance(answer, Learned)
        return answer

    def save(self, *, step: int) -> None:
        """Ask for its part of the checkpoint after ``step`` steps; its next step comes after. Errors as above."""
        self._wait(Save(step), Working, Saved)

    def saved(self, *, step: int) -> bool:
        """Whether that is written by now."""
        answer, _ = self._share(Save(step), time.monotonic() + self.timeout_s, (Saved, Working, Silent))
        return isinstance(answer, Saved)

    def leave(self, *, step: int) -> None:
        """Tell its ranks to end. Errors as those of :meth:`values`."""
        self._wait(Leave(step), Working, Leaving)

    def close(self) -> None:
        """Close the connection."""
        if self.client is not None:
            self.client.close()

    def _wait(self, message: ToCritic, *enough: type) -> tuple[Any, bytes]:
        """Ask, round by round, until it is answered by one of ``enough``."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            self.lifesign.beat()
            answer, payload = self._share(message, deadline, enough)
            if isinstance(answer, enough):
                return answer, payload

    def _share(self, message: ToCritic, deadline: float, enough: tuple[type, ...]) -> tuple[Any, bytes]:
        """One round of rank 0's questions; its outcome on every rank."""
        answer, payload = self._ask(message, deadline, enough) if self.client is not None else (None, None)
        head = self.topology.broadcast_bytes(msgspec.msgpack.encode(answer) if answer is not None else None)
        answer = msgspec.msgpack.decode(head, type=Shared)
        if isinstance(answer, Overdue):
            raise TimeoutError(answer.reason)
        if isinstance(answer, Refused):
            raise RuntimeError(f"the critic at {self.address} refused {_name(message)}: {answer.reason}")
        return answer, self.topology.broadcast_bytes(payload) if isinstance(answer, Values) else b""

    def _ask(self, message: ToCritic, deadline: float, enough: tuple[type, ...]) -> tuple[Any, bytes]:
        """Rank 0: ask until it is answered so, the round is over, or the time is."""
        end, pause = min(deadline, time.monotonic() + ROUND_S), _FIRST_PAUSE_S
        while True:
            answer, payload = self._exchange(message, deadline)
            if isinstance(answer, (Refused, *enough)):
                return answer, payload
            if time.monotonic() >= deadline:
                return self._overdue(message, answer), b""
            if time.monotonic() >= end:
                return answer, b""
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _exchange(self, message: ToCritic, deadline: float) -> tuple[Any, bytes]:
        assert self.client is not None
        try:
            left = deadline - time.monotonic()
            return self.client.request(message, timeout_s=min(ROUND_S, max(_LEAST_WAIT_S, left)))
        except TimeoutError:
            return Silent(), b""

    def _overdue(self, message: ToCritic, last: Any) -> Overdue:
        why = "it does not answer; is it running?" if isinstance(last, Silent) else "it is still at work"
        return Overdue(
            f"waited for the critic at {self.address} to answer {_name(message)} longer than critic.timeout_s = "
            f"{self.timeout_s:g} s ({why})"
        )


def read_values(answer: Any, payload: bytes, batch: Batch, step: int) -> torch.Tensor:
    """float32 [tokens of the step]. ValueError where they are not those of the batch's trajectories."""
    assert isinstance(answer, Values)
    expected = {entry.trajectory_id: entry.tokens for entry in batch.entries}
    got = dict(zip(answer.trajectory_ids, answer.tokens, strict=False))
    if answer.step != step or list(got.items()) != list(expected.items()) or len(payload) != 4 * batch.tokens:
        raise ValueError(
            f"the critic sent values of {len(got)} trajectories of step {answer.step} ({len(payload)} bytes); expected "
            f"those of {len(expected)} trajectories of step {step} ({4 * batch.tokens} bytes): are both worlds of one "
            "run and one checkpoint?"
        )
    return torch.from_numpy(np.frombuffer(payload, dtype="<f4").astype(np.float32))


def _name(message: ToCritic) -> str:
    return f"{type(message).__name__} of step {message.step}"
