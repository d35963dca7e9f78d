"""What two test worlds run together: the actor's ranks and those of a separate critic. JSON in, JSON out.

Both take the batch of a step from its number, as both would ask the controller for the same trajectories.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory
from megasao.megatron import runtime
from megasao.megatron.bridge import export_hf
from megasao.megatron.runtime import Topology
from megasao.rollout.payload import PayloadService
from megasao.training import checkpoint, critic_world
from megasao.training.actor import Actor
from megasao.training.batch import Batch, pack_trajectories
from megasao.training.critic import Critic
from megasao.training.critic_world import CriticWorld
from megasao.training.estimator import Estimator
from megasao.training.payload import PayloadReader, PayloadUnreachable
from megasao.training.remote_critic import RemoteCritic, connect
from megasao.training.source import BatchSource
from megasao.training.step import await_critic, step_beside_critic
from megasao.training.value_service import ValueService
from megasao.trajectories.hosted import PayloadJournal
from megasao.trajectories.schema import Trajectory, to_batch
from megasao.transport.client import ControllerClient
from megasao.transport.messages import Manifest
from tests.training.cases import Payload, sao_config, trajectories

PATIENCE_S = 60.0


def actor_side(payload: Payload) -> Any:
    """The actor's side of ``steps`` steps from the run's latest checkpoint; metrics of each, weights to files.

    ``save_at``: take a checkpoint after so many steps.
    """
    config = sao_config(payload)
    topology = runtime.set_layout(config.parallel, seed=1)
    run = RunDirectory(Path(payload["run"]))
    actor = Actor.build(Path(payload["path"]), config, topology)
    estimator = Estimator(config.algorithm, topology.all_reduce_data)
    remote = remote_critic(payload, topology)
    progress = checkpoint.restore(run, actor, None, estimator, topology, critic_elsewhere=True)
    metrics = []
    for step in range(progress.step, payload["steps"]):
        batch = batch_of(step, payload["token_budget"], topology)
        result = step_beside_critic(actor, remote, estimator, batch, step=step, config=config)
        line = {**result.metrics, **await_critic(remote, step=step)}
        metrics.append({name: value for name, value in line.items() if not is_time(name)})
        progress = replace(progress, step=step + 1)
        if payload.get("save_at") == step + 1:
            state = {"step": step + 1} if topology.rank == 0 else None
            form = config.checkpoint.format
            pending = checkpoint.begin(
                run, progress, actor, None, estimator, topology, controller_state=state, format=form
            )
            remote.save(step=step + 1)
            while not (pending.written() and remote.saved(step=step + 1)):
                time.sleep(0.01)
            pending.complete(keep=2)
    remote.leave(step=progress.step)
    remote.close()
    write(payload, "actor-weights", export_hf(actor.model))
    return metrics


def critic_side(payload: Payload) -> Any:
    """A separate critic until the actor leaves; its weights to a file.

    ``mutation``: "row_order" sends values in the order in which this rank packed them.
    """
    config = sao_config(payload).of_critic
    topology = runtime.set_layout(config.parallel, seed=1)
    run = RunDirectory(Path(payload["run"]))
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    critic = Critic.build(Path(payload["path"]), config, topology)
    service = ValueService(payload["address"], high_water_mark=16) if topology.rank == 0 else None
    budget = config.critic.token_budget or payload["token_budget"]  # type: ignore[union-attr]
    world = CriticWorld(
        run=run,
        config=config,
        topology=topology,
        critic=critic,
        estimator=Estimator(config.algorithm, topology.all_reduce_data),
        source=hosted_source(run, config, topology)
        if payload.get("hosted")
        else Loader(topology, budget, Path(payload["hold"]) if "hold" in payload else None),
        service=service,
        lifesign=LifeSign(run.heartbeat(f"critic-{topology.rank}")),
    )
    Path(payload["run"], "critic.pid").write_text(str(os.getpid()))
    with mistake(payload.get("mutation")):
        world.serve()
    world.close()
    write(payload, "critic-weights", export_hf(critic.model))
    return world.progress.step


def neither_waits(payload: Payload) -> Any:
    """Two steps in which one side is held up while the other goes on; the errors of waiting for a held-up critic.

    In the first the actor is not updated before the critic has done its updates. In the second the critic is stopped
    as soon as it has sent its values, and goes on only after the actor's update. In the third it is held up before.
    """
    config = sao_config(payload)
    topology = runtime.set_layout(config.parallel, seed=1)
    actor = Actor.build(Path(payload["path"]), config, topology)
    remote = remote_critic(payload, topology)
    errors = []

    def update(step: int) -> float:
        batch = batch_of(step, 4096, topology)
        ones = [torch.where(row.action_mask, 1.0, 0.0) for row in batch.rows]
        return float(actor.update(batch, ones, actor_step=step)["loss"] or 0.0)

    remote.values(batch_of(0, 4096, topology), step=0)
    losses = [remote.learned(step=0).metrics["loss"]]
    update(0)

    remote.values(batch_of(1, 4096, topology), step=1)
    critic = int(Path(payload["run"], "critic.pid").read_text())
    os.kill(critic, signal.SIGSTOP)
    try:
        update(1)
        errors.append(error_within(1.0, remote, lambda: remote.learned(step=1)))
    finally:
        os.kill(critic, signal.SIGCONT)
    losses.append(remote.learned(step=1).metrics["loss"])

    third = batch_of(2, 4096, topology)
    Path(payload["hold"]).touch()
    errors.append(error_within(1.0, remote, lambda: remote.values(third, step=2)))
    Path(payload["hold"]).unlink()
    remote.values(third, step=2)
    losses.append(remote.learned(step=2).metrics["loss"])

    try:
        remote.values(third, step=5)
    except RuntimeError as error:
        errors.append(str(error))
    remote.leave(step=6)
    remote.close()
    return {"errors": errors, "losses": losses}


def payload_is_elsewhere(payload: Payload) -> Any:
    """One step whose payload the critic cannot have at first: its host is gone, then it has other trajectories.

    What the actor is told each time, and how far the values that it gets are from those of a critic of its own.
    """
    config = sao_config(payload)
    topology = runtime.set_layout(config.parallel, seed=1)
    critic = Critic.build(Path(payload["path"]), config.of_critic, topology)
    remote = remote_critic(payload, topology)
    told = []
    with PayloadHost(Path(payload["out"]) / "host", named(1)) as host:
        attempts = [(0, payload["nowhere"]), (0, host.address), (1, host.address)]
        for which, address in attempts:
            batch = pack_trajectories(named(which), data_rank=0, data_size=1, token_budget=4096)
            entries = tuple(msgspec.structs.replace(entry, payload=address, nbytes=1) for entry in batch.entries)
            batch = replace(batch, entries=entries)
            values, reason = values_or_reason(remote, batch)
            while address == host.address and "did not answer" in reason:  # on a busy machine
                values, reason = values_or_reason(remote, batch)
            told.append(reason)
        expected = critic.values(batch)
        loss = remote.learned(step=0).metrics["loss"]
    remote.leave(step=1)
    remote.close()
    pairs = zip(batch.rows, values, expected, strict=True)
    difference = max(
        float((got - want)[: sum(len(t.tokens) for t in row.trajectories)].abs().max()) for row, got, want in pairs
    )
    return {"told": told, "difference": difference, "loss": loss}


def values_or_reason(remote: RemoteCritic, batch: Batch) -> tuple[list[torch.Tensor], str]:
    """The values, or why the critic cannot give them now."""
    try:
        return remote.values(batch, step=0), ""
    except PayloadUnreachable as error:
        return [], str(error)


def named(step: int) -> list[Trajectory]:
    """The step's trajectories, with names of their own."""
    return [replace(each, trajectory_id=f"{step}-{each.trajectory_id}") for each in trajectories(step)]


class PayloadHost:
    """A rollout host that keeps ``rows``."""

    def __init__(self, directory: Path, rows: list[Trajectory]) -> None:
        journal = PayloadJournal(directory)
        journal.keep(to_batch(rows))
        self._service = PayloadService(journal, "127.0.0.1")
        self.address = self._service.address

    def __enter__(self) -> "PayloadHost":
        return self

    def __exit__(self, *exception: object) -> None:
        self._service.close()


def hosted_source(run: RunDirectory, config: Config, topology: Topology) -> BatchSource:
    """As in a run; nobody asks the controller."""
    client = ControllerClient("tcp://127.0.0.1:1")
    reader = PayloadReader(client, identity=f"critic-{topology.rank}", keys=None, timeout_s=5.0)
    return BatchSource(client, topology, config, LifeSign(run.heartbeat("critic")), reader)


def error_within(seconds: float, remote: RemoteCritic, ask: Any) -> str:
    """The message of the TimeoutError."""
    remote.timeout_s = seconds
    try:
        ask()
    except TimeoutError as error:
        return str(error)
    finally:
        remote.timeout_s = PATIENCE_S
    return ""


@dataclass
class Loader:
    """The rows of a rank; waits as long as ``hold`` exists."""

    topology: Topology
    token_budget: int
    hold: Path | None

    def load(self, manifest: Manifest) -> Batch:
        deadline = time.monotonic() + PATIENCE_S
        while self.hold is not None and self.hold.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        batch = batch_of(manifest.step, self.token_budget, self.topology)
        assert list(batch.entries) == manifest.entries
        return batch

    def close(self) -> None:
        """Nobody was asked."""


@contextmanager
def mistake(name: str | None) -> Iterator[None]:
    """Do something wrong, on purpose, inside the block."""
    whole = critic_world.whole_step
    if name == "row_order":
        critic_world.whole_step = lambda batch, values, topology: torch.cat(list(values))
    yield
    critic_world.whole_step = whole


def remote_critic(payload: Payload, topology: Topology) -> RemoteCritic:
    client = connect(payload["address"], high_water_mark=16, keys=None) if topology.rank == 0 else None
    lifesign = LifeSign(RunDirectory(Path(payload["run"])).heartbeat(f"trainer-{topology.rank}"))
    return RemoteCritic(payload["address"], client, topology, PATIENCE_S, lifesign)


def batch_of(step: int, token_budget: int, topology: Topology) -> Batch:
    return pack_trajectories(
        trajectories(step), data_rank=topology.data_rank, data_size=topology.data_size, token_budget=token_budget
    )


def is_time(name: str) -> bool:
    return name.startswith("time/") or name == "critic/seconds"


def write(payload: Payload, name: str, tensors: dict[str, torch.Tensor]) -> None:
    if torch.distributed.get_rank() == 0:
        save_file(tensors, Path(payload["out"]) / f"{name}.safetensors")
