"""One run of a study: the trainer's own step on the embedded engine's own rollouts, in one process and without a clock.

Everything that has numbers is the code that `megasao train` runs: Megatron, packing, estimator, ``sao_step``, engine,
environment. What is left out is what makes a run depend on time: processes, sockets, queues.

Invariant: the records of a run are a function of its config alone, bit for bit on one machine.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.families.routing import Routing
from megasao.launch.ports import free_ports
from megasao.megatron.bridge import export_hf
from megasao.megatron.runtime import Topology
from megasao.ops.backend import configure
from megasao.studies.play import Player
from megasao.studies.staleness import BoundedStaleness, Weights
from megasao.studies.tiny_model import write_model, write_tokenizer
from megasao.training.actor import Actor
from megasao.training.batch import pack_trajectories
from megasao.training.critic import Critic
from megasao.training.estimator import Estimator
from megasao.training.metrics import trajectory_metrics
from megasao.training.sft import fine_tune
from megasao.training.step import sao_step
from megasao.training.world import trainer_world
from megasao.trajectories.schema import Trajectory

Record = dict[str, float | None]
"""The numbers of one training step."""


class Rollouts(Protocol):
    """Where a step's trajectories come from."""

    def published(self, version: int, weights: Weights) -> None:
        """A version is new."""

    def next_batch(self, version: int) -> list[Trajectory]:
        """The rollouts of the step that moves the weights on from ``version``."""

    def notes(self) -> Record:
        """What else there is to record of the newest batch."""


MakeRollouts = Callable[[Config, Player], Rollouts]


@contextmanager
def one_process_world(config: Config) -> Iterator[Topology]:
    """A trainer world of this process alone, on one thread."""
    torch.set_num_threads(1)
    address = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    os.environ.update(address)
    configure(config.ops)
    with trainer_world(config) as topology:
        yield topology


def prepare_policy(config: Config, model: dict[str, int], directory: Path) -> None:
    """Write a random model into ``directory/model``, and fine-tune it into ``directory/sft`` where the config does."""
    path = Path(config.model.path)
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path)
    write_model(path, seed=config.run.seed, **model)
    if config.sft is not None:
        with one_process_world(config) as topology:
            fine_tune(RunDirectory(directory), config, config.sft, topology, None)


def run_steps(config: Config, path: Path, make_rollouts: MakeRollouts = BoundedStaleness) -> Iterator[Record]:
    """Train from the checkpoint at ``path``; the record of each step, with an evaluation where one is due.

    The last record also has ``final/greedy`` and ``final/sampled``: success on the held-out problems at the end.
    """
    with one_process_world(config) as topology, Player(path, config) as player:
        actor = Actor.build(path, config, topology)
        critic = Critic.build(path, config, topology) if config.critic is not None else None
        estimator = Estimator(config.algorithm, topology.all_reduce_data)
        rollouts = make_rollouts(config, player)
        routing = Routing.of(actor.model.hf_config) if config.actor.router_replay else None
        version, weights = 0, export_hf(actor.model)
        rollouts.published(version, weights)
        for step in range(config.loop.steps):
            record: Record = {"step": float(step), "version": float(version)}
            if config.evaluation.every and step % config.evaluation.every == 0:
                record["evaluation/sampled"] = success(player, version, weights, temperature=1.0)
            trajectories = rollouts.next_batch(version)
            batch = pack_trajectories(
                trajectories,
                data_rank=0,
                data_size=1,
                token_budget=config.trainer.token_budget,
                routing=routing,
            )
            record |= trajectory_metrics(batch.entries, version) | behaviour_metrics(trajectories) | rollouts.notes()
            result = sao_step(actor, critic, estimator, batch, step=step, config=config)
            record |= {name: value for name, value in result.metrics.items() if not name.startswith("time/")}
            if step >= config.warmup_steps:
                version, weights = version + 1, export_hf(actor.model)
                rollouts.published(version, weights)
                actor.pushed()
            if step == config.loop.steps - 1:
                record["final/sampled"] = success(player, version, weights, temperature=1.0)
                record["final/greedy"] = success(player, version, weights, temperature=0.0)
            yield record


def success(player: Player, version: int, weights: dict[str, Any], *, temperature: float) -> float:
    """Share of the held-out problems that these weights solve."""
    played = player.play(player.evaluation_leases(temperature), version, weights)
    return fmean(sum(trajectory.rewards) > 0.5 for trajectory in played)


def behaviour_metrics(trajectories: list[Trajectory]) -> Record:
    """Of the policy that sampled them: ``behaviour/entropy``, nats a token (the mean of -log p of what was sampled),
    and the means of what the environment counted."""
    sampled = [
        -logprob
        for trajectory in trajectories
        for logprob, action in zip(trajectory.rollout_logprobs or [], trajectory.action_mask, strict=False)
        if action
    ]
    names = {name for trajectory in trajectories for name in trajectory.metrics}
    means = {f"episode/{name}": fmean(t.metrics.get(name, 0.0) for t in trajectories) for name in sorted(names)}
    return {"behaviour/entropy": fmean(sampled) if sampled else None, **means}
