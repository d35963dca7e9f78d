"""The training loop of one trainer rank; every rank runs it and enters every collective.

Invariants:
- the loaded version is published before the first batch is asked for;
- a step's line is written before its checkpoint: a line may come twice after a crash, and none is missing;
- a step's batch is fixed by the controller's ledger, so a repeated step after a crash repeats its numbers;
- version = number of actor updates; the critic's warm-up leaves it at 0;
- asked to leave, every rank stops before the same step, and the latest checkpoint is of that step;
- with a critic in a world of its own a checkpoint is complete when both worlds have written their parts;
- a step whose log-probs differ from the engine's beyond the limits says so in its line and in the log.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import torch

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.environments.encoding import TokenizerCodec
from megasao.megatron.bridge import save_hf
from megasao.megatron.runtime import Topology
from megasao.observability.examples import write_examples
from megasao.observability.metrics import MetricsWriter
from megasao.training import checkpoint
from megasao.training.actor import Actor
from megasao.training.batch import Batch
from megasao.training.checkpoint import Pending, Progress
from megasao.training.critic import Critic
from megasao.training.estimator import Estimator
from megasao.training.examples import example_rows
from megasao.training.metrics import batch_metrics, throughput_metrics
from megasao.training.mismatch import alarms
from megasao.training.publishing import Publishing
from megasao.training.remote_critic import RemoteCritic
from megasao.training.source import BatchSource, ask
from megasao.training.step import StepResult, await_critic, sao_step, step_beside_critic, timed
from megasao.transport.client import ControllerClient
from megasao.transport.messages import (
    CheckpointSaved,
    EvaluateRequest,
    FinishRequest,
    Manifest,
    State,
    StateRequest,
    Status,
    StatusRequest,
)

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Everything a rank needs to train. ``writer`` exists on rank 0 only."""

    run: RunDirectory
    config: Config
    topology: Topology
    actor: Actor
    critic: Critic | None
    """None where the estimator needs no values, or the critic is in a world of its own."""
    estimator: Estimator
    source: BatchSource
    client: ControllerClient
    codec: TokenizerCodec
    publishing: Publishing
    writer: MetricsWriter | None
    remote: RemoteCritic | None = None
    """The critic in a world of its own."""
    progress: Progress = field(default_factory=Progress)
    last_checkpoint: dict[str, float | None] = field(default_factory=dict)
    """Time of the checkpoint before this step, for the step's line."""
    pending: Pending | None = None
    """A checkpoint that is still being written."""

    def train(self) -> None:
        """Run the configured steps from the latest checkpoint to the end, or until the run is asked to leave."""
        self.progress = checkpoint.restore(
            self.run,
            self.actor,
            self.critic,
            self.estimator,
            self.topology,
            critic_elsewhere=self.remote is not None,
        )
        self.publish()
        self.evaluate_when_due(first=self.progress.step == 0)
        while self.progress.step < self.config.loop.steps:
            if not self.train_step():
                self.leave()
                return
        self.finish()

    def train_step(self) -> bool:
        """One step: batch, update, publication, evaluation, checkpoint. False, and nothing done, if asked to leave."""
        started = time.perf_counter()
        step, version = self.progress.step, self.progress.version
        metrics: dict[str, float | None] = {}
        show = step % self.config.observability.examples_every == 0
        learned = self.source.until_payload_is_had(step, lambda: self.learn_next(step, version, metrics, show=show))
        if learned is None:
            return False
        manifest, batch, logprobs, result = learned
        metrics.update(result.metrics)
        actor_moved = step >= self.config.warmup_steps
        self.progress = dataclasses.replace(
            self.progress,
            step=step + 1,
            version=version + int(actor_moved),
            trained_trajectories=self.progress.trained_trajectories + len(batch.entries),
        )
        with timed(metrics, "time/publish"):
            if actor_moved:
                self.publish()
        if actor_moved:
            self.evaluate_when_due()
        if self.remote is not None:
            metrics.update(await_critic(self.remote, step=step))
        if show and self.topology.rank == 0:
            self.write_examples(batch, logprobs, result, step=step, version=version)
        seconds = time.perf_counter() - started
        self.progress = dataclasses.replace(self.progress, seconds=self.progress.seconds + seconds)
        metrics.update(batch_metrics(batch.entries, manifest.rollout, version))
        metrics.update(throughput_metrics(metrics, batch.tokens, seconds))
        publisher = self.publishing.publisher
        if publisher is not None and publisher.last_result is not None:
            metrics["time/transfer"] = publisher.last_result.seconds
        found = alarms(metrics, self.config.observability.mismatch)
        metrics["alarms"] = float(len(found))
        if self.writer is not None:
            for alarm in found:
                logger.warning("step %d: %s", step, alarm)
            self.writer.log(step, {"weight_version": self.progress.version, **metrics, **self.last_checkpoint})
        self.last_checkpoint = {}
        with timed(self.last_checkpoint, "time/checkpoint"):
            self.checkpoint_when_due()
        return True

    def learn_next(
        self, step: int, version: int, metrics: dict[str, float | None], *, show: bool
    ) -> tuple[Manifest, Batch, list[torch.Tensor], StepResult] | None:
        """The step's trajectories, with ``show`` their log-probs before, and what came of the step; None if asked to
        leave.

        PayloadUnreachable, on every rank and before anything has changed: payload cannot be had, here or by a critic
        elsewhere.
        """
        with timed(metrics, "time/wait"):
            manifest = self.source.next_manifest(step, version)
        if manifest is None:
            return None
        with timed(metrics, "time/fetch"):
            batch = self.source.load(manifest)
        logprobs = self.actor.logprobs(batch) if show else []
        return manifest, batch, logprobs, self.learn(batch, step)

    def learn(self, batch: Batch, step: int) -> StepResult:
        """The step itself, with the critic here, elsewhere (where its updates may go on) or nowhere."""
        if self.remote is not None:
            return step_beside_critic(self.actor, self.remote, self.estimator, batch, step=step, config=self.config)
        return sao_step(self.actor, self.critic, self.estimator, batch, step=step, config=self.config)

    def write_examples(
        self, batch: Batch, logprobs: list[torch.Tensor], result: StepResult, *, step: int, version: int
    ) -> None:
        """Save a few of this rank's trajectories for the report."""
        kept = self.actor.kept(batch, [a.advantages for a in result.advantages], logprobs)
        rows = example_rows(
            batch, logprobs, kept, result, self.codec, count=self.config.observability.examples_per_step
        )
        write_examples(self.run, step, version, rows)

    def publish(self) -> None:
        """Hand the actor's weights to the engines; generation goes on meanwhile."""
        self.publishing.publish(self.progress.version, self.actor.model)
        self.actor.pushed()

    def evaluate_when_due(self, *, first: bool = False, final: bool = False) -> None:
        """Ask for a background evaluation at version 0, at every multiple of ``every``, and at the end."""
        every = self.config.evaluation.every
        due = first or final or (every > 0 and self.progress.version > 0 and self.progress.version % every == 0)
        if due and self.topology.rank == 0:
            request = EvaluateRequest(step=self.progress.step, version=self.progress.version)
            ask(self.client, request, Status)

    def checkpoint_when_due(self, *, final: bool = False) -> None:
        """Save at every multiple of ``every`` steps, and at the end; complete what was begun before."""
        every = self.config.checkpoint.every
        due = final or (every > 0 and self.progress.step % every == 0)
        if self.pending is not None and (due or not self.unwritten(self.pending)):
            self.complete_checkpoint()
        if not due:
            return
        state = None
        if self.topology.rank == 0:
            state = ask(self.client, StateRequest(step=self.progress.step), State).state
        self.pending = checkpoint.begin(
            self.run,
            self.progress,
            self.actor,
            self.critic,
            self.estimator,
            self.topology,
            controller_state=state,
            format=self.config.checkpoint.format,
        )
        if self.remote is not None:
            self.remote.save(step=self.progress.step)
        if final or not self.config.checkpoint.asynchronous:
            self.complete_checkpoint()

    def unwritten(self, pending: Pending) -> str:
        """Which part of a checkpoint is not written yet, on every rank; empty where all is."""
        if not pending.written():
            return str(pending.directory)
        if self.remote is not None and not self.remote.saved(step=pending.progress.step):
            return f"{pending.directory / 'critic'} of the critic at {self.remote.address}"
        return ""

    def complete_checkpoint(self) -> None:
        """Wait until the pending checkpoint is written, at most ``checkpoint.timeout_s``, and make it the latest.

        The ranks wait together, question by question, as for evaluations. TimeoutError names the directory.
        """
        pending = self.pending
        assert pending is not None
        self.wait_for(lambda: self.unwritten(pending), "checkpoint.timeout_s")
        pending.complete(self.config.checkpoint.keep)
        if self.topology.rank == 0:
            ask(self.client, CheckpointSaved(step=pending.progress.step), Status)
        self.pending = None

    def leave(self) -> None:
        """Save the state as of now and stop the run, which goes on from here when it is started again."""
        self.save_what_is_not_saved()
        self.end_critic()
        if self.topology.rank == 0:
            ask(self.client, FinishRequest(reason=f"left before step {self.progress.step}, with a checkpoint"), Status)

    def save_what_is_not_saved(self) -> None:
        """The latest checkpoint is of this state when this returns."""
        if self.pending is not None:
            self.complete_checkpoint()
        if checkpoint_missing(self.run, self.progress):
            self.checkpoint_when_due(final=True)

    def finish(self) -> None:
        """Last checkpoint, last evaluation, the policy as a Hugging Face checkpoint; then stop the run."""
        self.save_what_is_not_saved()
        self.evaluate_when_due(final=True)
        save_hf(self.actor.model, self.run.policy_path(self.config), self.run.final_policy)
        self.wait_for_evaluations()
        self.end_critic()
        if self.topology.rank == 0:
            ask(self.client, FinishRequest(reason="all steps are done"), Status)

    def end_critic(self) -> None:
        """A critic in a world of its own ends with this one."""
        if self.remote is not None:
            self.remote.leave(step=self.progress.step)

    def wait_for_evaluations(self) -> None:
        """Wait until every evaluation has ended, at most ``evaluation.timeout_s``; TimeoutError names the open ones."""
        self.wait_for(self.open_evaluations, "evaluation.timeout_s")

    def wait_for(self, missing: Callable[[], str], setting: str) -> None:
        """Wait until nothing is missing, at most the seconds of the config's ``setting``; TimeoutError names what is.

        The ranks wait together, question by question: one collective over the whole wait could exceed its own bound.
        """
        seconds: float = attrgetter(setting)(self.config)
        deadline = time.monotonic() + seconds
        while names := missing():
            self.source.lifesign.beat()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited for {names} longer than {setting} = {seconds:g} s")
            time.sleep(0.1)

    def open_evaluations(self) -> str:
        """Which evaluations have not ended, on every rank; empty where all have."""
        names = None
        if self.topology.rank == 0:
            names = ", ".join(ask(self.client, StatusRequest(), Status).open_evaluations).encode()
        open_ones = self.topology.broadcast_bytes(names).decode()
        return f"evaluations {open_ones}" if open_ones else ""

    def close(self) -> None:
        """Close this rank's connections and files."""
        for resource in (self.writer, self.publishing, self.remote, self.source, self.client):
            if resource is not None:
                resource.close()


def checkpoint_missing(run: RunDirectory, progress: Progress) -> bool:
    """Whether the state at ``progress`` is not saved yet."""
    latest: Path | None = checkpoint.latest_checkpoint(run)
    return latest is None or latest.name != f"step_{progress.step:06d}"
