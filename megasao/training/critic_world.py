"""The loop of one rank of a critic in a world of its own; every rank runs it and enters every collective.

It follows the actor's world: values of the batch, its own updates while the actor is updated, its part of a checkpoint.

Invariants, asserted by the tests:
- the numbers are those of a critic on the actor's ranks, to rounding: bit for bit under the same layout;
- having sent the values it waits for nobody before its updates are done;
- a step that is not the next one is refused: both worlds go on from the same checkpoint, or not at all;
- payload that it cannot have changes nothing: the actor is told, and asks again for the step as it is then;
- an actor that is silent for longer than it may be is an error that says so.
"""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import torch

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory
from megasao.megatron.runtime import Topology
from megasao.training import checkpoint
from megasao.training.batch import Batch
from megasao.training.checkpoint import Pending, Progress
from megasao.training.critic import Critic
from megasao.training.estimator import Estimator
from megasao.training.payload import PayloadUnreachable
from megasao.training.step import StepResult, timed, update_critic
from megasao.training.value_exchange import whole_step
from megasao.training.value_service import ValueService
from megasao.transport.client import ControllerClient
from megasao.transport.messages import Manifest
from megasao.transport.values import Command, CriticLacksPayload, Learned, Leave, Leaving, Save, Saved, Train, Values

POLL_S = 0.05
"""How long the ranks wait together for a command, until they look whether a checkpoint is written."""


class Loader(Protocol):
    """Where this rank's rows of a step come from."""

    def load(self, manifest: Manifest) -> Batch:
        """The rows of this rank; PayloadUnreachable on every rank, if one of them does not get its own."""
        ...

    def close(self) -> None:
        """Let go of whoever was asked."""
        ...


class Nothing(msgspec.Struct, tag=True, frozen=True):
    """What rank 0 tells the others when there is no command."""


@dataclass
class CriticWorld:
    """Everything a rank needs. ``service`` exists on rank 0 only; ``client`` is what ``source`` asks."""

    run: RunDirectory
    config: Config
    """``Config.of_critic``"""
    topology: Topology
    critic: Critic
    estimator: Estimator
    source: Loader
    service: ValueService | None
    lifesign: LifeSign
    client: ControllerClient | None = None
    progress: Progress = field(default_factory=Progress)
    pending: Pending | None = None
    """Its part of a checkpoint that is still being written."""

    def serve(self) -> None:
        """Follow the actor's world, from the latest checkpoint to the end."""
        self.progress = checkpoint.restore_critic(self.run, self.critic, self.topology)
        while True:
            match self.next_command():
                case Train() as command:
                    self.train_step(command)
                case Save() as command:
                    self.begin_saving(command)
                case Leave(step=step):
                    self.say(Leaving(step))
                    return

    def next_command(self) -> Command:
        """What the actor wants next, the same on every rank; meanwhile a checkpoint is written.

        TimeoutError where the actor is silent for longer than any of its own waits can last.
        """
        deadline = time.monotonic() + self.longest_silence_s
        while True:
            self.lifesign.beat()
            sent = None
            if self.service is not None:
                sent = msgspec.msgpack.encode(self.service.next(POLL_S) or Nothing())
            command = msgspec.msgpack.decode(self.topology.broadcast_bytes(sent), type=Command | Nothing)
            self.finish_saving()
            if not isinstance(command, Nothing):
                return command
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"after step {self.progress.step} the actor asked for nothing in {self.longest_silence_s:g} s, "
                    "longer than its own waits can last (critic, batch, checkpoint and evaluations together)"
                )

    @property
    def longest_silence_s(self) -> float:
        """The bounds of the actor's own waits between two commands, together."""
        config = self.config
        batch = 3 * config.loop.batch_timeout_s  # for it, for its payload, and for another one where that is lost
        return config.value_model.timeout_s + batch + config.checkpoint.timeout_s + config.evaluation.timeout_s

    def train_step(self, command: Train) -> None:
        """Values of the step's trajectories to the actor, then the K updates."""
        step = command.step
        if self.refuses(command):
            return
        try:
            batch = self.source.load(Manifest(step, command.entries, {}))
        except PayloadUnreachable as error:
            self.say(CriticLacksPayload(step, command.attempt, str(error)))
            return
        result = StepResult(values=self.critic.values(batch))
        self.send_values(batch, result.values, command)
        metrics: dict[str, float | None] = {}
        with timed(metrics, "seconds"):
            result.advantages = self.estimator.estimate(batch, result.values)
            learned = update_critic(self.critic, batch, result, step)
        self.progress = dataclasses.replace(self.progress, step=step + 1)
        self.say(Learned(step, learned, metrics["seconds"] or 0.0))

    def send_values(self, batch: Batch, values: list[torch.Tensor], command: Train) -> None:
        """Answer the actor with the values of the whole step."""
        everything = whole_step(batch, values, self.topology)
        ids = [entry.trajectory_id for entry in batch.entries]
        answer = Values(command.step, ids, [entry.tokens for entry in batch.entries], command.attempt)
        self.say(answer, everything.numpy().astype(np.dtype("<f4")).tobytes())

    def refuses(self, command: Train | Save) -> bool:
        """Whether the command is not of the state that this critic is in; then the actor is told so."""
        wrong = command.step != self.progress.step
        if wrong and self.service is not None:
            reason = f"this critic has finished {self.progress.step} steps"
            self.service.refuse(command, f"{reason}; both worlds go on from one checkpoint: restart them together")
        return wrong

    def begin_saving(self, command: Save) -> None:
        """Take the state as of now, and start to write it; one checkpoint at a time."""
        if self.refuses(command):
            return
        assert self.pending is None, "the actor's world completes a checkpoint before it begins the next"
        self.pending = checkpoint.begin_critic(
            self.run, self.progress, self.critic, self.topology, format=self.config.checkpoint.format
        )

    def finish_saving(self) -> None:
        """Tell the actor of a checkpoint that every rank has written by now."""
        if self.pending is None or not self.pending.written():
            return
        self.pending.complete_models()
        self.say(Saved(self.pending.progress.step))
        self.pending = None

    def say(self, answer: Values | CriticLacksPayload | Learned | Saved | Leaving, payload: bytes = b"") -> None:
        """Answer the actor, on rank 0."""
        if self.service is not None:
            self.service.say(answer, payload)

    def close(self) -> None:
        """Close this rank's connections."""
        for resource in (self.service, self.source, self.client):
            if resource is not None:
                resource.close()
