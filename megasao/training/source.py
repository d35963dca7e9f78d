"""Where a step's trajectories come from: the controller's manifest, and payload fetched by id.

Invariants:
- rank 0 alone asks for a manifest, and every rank gets the same one;
- every rank fetches only what its own rows hold; payload never passes through rank 0;
- all ranks leave before the same step;
- payload that one rank, or a critic elsewhere, cannot have makes all ask again; one bound on time holds over both.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.families.routing import Routing
from megasao.megatron.runtime import Topology, gather_counts
from megasao.training.batch import Batch, pack_manifest
from megasao.training.payload import PayloadReader, PayloadUnreachable
from megasao.transport.client import ControllerClient
from megasao.transport.messages import BatchRequest, Manifest, Refused, Waiting

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 0.5
POLL_SECONDS = 30.0
"""Bound on one exchange with the controller; the whole wait is bounded by ``loop.batch_timeout_s``."""

Reply = TypeVar("Reply")
Made = TypeVar("Made")


def ask(client: ControllerClient, message: msgspec.Struct, kind: type[Reply]) -> Reply:
    """One bounded exchange; RuntimeError with the controller's reason if it refuses."""
    reply, _ = client.request(message, timeout_s=POLL_SECONDS)
    return expect(reply, kind)


def expect(reply: object, kind: type[Reply]) -> Reply:
    """``reply``, if it is of this kind."""
    if isinstance(reply, kind):
        return reply
    reason = reply.reason if isinstance(reply, Refused) else f"it sent {type(reply).__name__}"
    raise RuntimeError(f"the controller did not answer with {kind.__name__}: {reason}")


class Leave(msgspec.Struct, tag=True, frozen=True):
    """What rank 0 tells the others when it was asked to leave: no batch, save and stop."""


Answer = Manifest | Waiting | Refused | Leave


def never() -> bool:
    """Nobody asks this process to leave."""
    return False


@dataclass
class BatchSource:
    """Batches for this rank. ``asked_to_leave`` of rank 0 decides for all."""

    client: ControllerClient
    topology: Topology
    config: Config
    lifesign: LifeSign
    payload: PayloadReader
    routing: Routing | None = None
    """Of the model, where the trajectories' experts are to be repeated."""
    asked_to_leave: Callable[[], bool] = never

    def next_manifest(self, step: int, version: int) -> Manifest | None:
        """The step's manifest, or None where the run is to leave; the same on every rank.

        TimeoutError after ``loop.batch_timeout_s``, saying what is missing.
        """
        deadline = time.monotonic() + self.config.loop.batch_timeout_s
        while True:
            self.lifesign.beat()
            answer = None
            if self.topology.rank == 0:
                answer = msgspec.msgpack.encode(self._ask(step, version, deadline))
            match msgspec.msgpack.decode(self.topology.broadcast_bytes(answer), type=Answer):
                case Manifest() as manifest:
                    return manifest
                case Leave():
                    return None
                case Refused(reason=reason):
                    raise TimeoutError(reason)

    def _ask(self, step: int, version: int, deadline: float) -> Answer:
        if self.asked_to_leave():
            return Leave()
        reply, _ = self.client.request(BatchRequest(step=step, version=version), timeout_s=POLL_SECONDS)
        match reply:
            case Manifest() | Refused():
                return reply
            case Waiting() if time.monotonic() < deadline:
                return reply
            case Waiting():
                return Refused(
                    f"no batch for step {step} within loop.batch_timeout_s = {self.config.loop.batch_timeout_s:g} s: "
                    f"{reply.have} of {reply.need} trajectories ({reply.detail})"
                )
            case _:
                return Refused(f"the controller answered a batch request with {type(reply).__name__}")

    def until_payload_is_had(self, step: int, attempt: Callable[[], Made]) -> Made:
        """What ``attempt`` at the step makes, on every rank; another one while it raises PayloadUnreachable on all.

        TimeoutError, on every rank, after ``loop.batch_timeout_s`` since it first did, whoever could not have payload.
        """
        deadline = None
        while True:
            try:
                return attempt()
            except PayloadUnreachable as error:
                deadline = deadline or time.monotonic() + self.config.loop.batch_timeout_s
                self._before_asking_again(step, str(error), deadline)

    def load(self, manifest: Manifest) -> Batch:
        """Plan the step, fetch what this rank's rows hold, and pack it.

        PayloadUnreachable, on every rank, if a rollout host does not give one of them what it has. The step may then
        be asked for again, and its manifest be another one.
        """
        if not any(entry.payload for entry in manifest.entries):
            return self._pack(manifest)
        batch, problem = None, "another rank did not get its payload"
        try:
            batch = self._pack(manifest)
        except PayloadUnreachable as error:
            problem = str(error)
        if any(gather_counts(int(batch is None))):
            raise PayloadUnreachable(problem)
        assert batch is not None
        return batch

    def _before_asking_again(self, step: int, problem: str, deadline: float) -> None:
        """Wait a moment; after the deadline TimeoutError, on every rank."""
        if any(gather_counts(int(time.monotonic() >= deadline))):
            raise TimeoutError(f"step {step}: {problem}")
        logger.warning("step %d is asked for again: %s", step, problem)
        self.lifesign.beat()
        time.sleep(ASK_AGAIN_S)

    def close(self) -> None:
        """Close the connections to rollout hosts; the client is its owner's."""
        self.payload.close()

    def _pack(self, manifest: Manifest) -> Batch:
        entries = {entry.trajectory_id: entry for entry in manifest.entries}
        return pack_manifest(
            manifest.entries,
            lambda ids: self.payload.fetch([entries[name] for name in ids], POLL_SECONDS),
            data_rank=self.topology.data_rank,
            data_size=self.topology.data_size,
            token_budget=self.config.trainer.token_budget,
            routing=self.routing,
        )
