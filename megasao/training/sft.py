"""Fine-tuning on demonstrations: cross-entropy on the tokens that the model should learn to produce.

Invariants:
- only action tokens carry loss; the denominator is the step's action tokens over all ranks;
- the data and its order are a pure function of the seed, the same for every layout.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from megasao.config import Config
from megasao.config.lifesign import LifeSign
from megasao.config.rundir import RunDirectory
from megasao.config.training import SftConfig
from megasao.environments.demonstrations import Demonstration, demonstration_trajectories
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.registry import make_environment
from megasao.megatron.bridge import save_hf
from megasao.megatron.models import MegatronModel, build_model
from megasao.megatron.optimizer import Optimizer, build_optimizer
from megasao.megatron.options import passed_on
from megasao.megatron.runtime import Topology
from megasao.megatron.step import forward_backward
from megasao.observability.metrics import MetricsWriter
from megasao.training.batch import Batch, pack_trajectories
from megasao.training.schedule import learning_rate
from megasao.training.stats import reduce_stats
from megasao.training.world import trainer_world
from megasao.trajectories.schema import Trajectory

Item = TypeVar("Item")


def cross_entropy(
    logprobs: torch.Tensor, action_mask: torch.Tensor, denominator: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-sum(logprobs over action tokens) / denominator. float32 [T], bool [T]."""
    nll = -torch.where(action_mask, logprobs, torch.zeros_like(logprobs)).sum()
    return nll / denominator, {"nll": nll.detach(), "tokens": action_mask.sum()}


def as_trajectory(demonstration: Demonstration, number: int) -> Trajectory:
    """A demonstration in the form that rows are packed from; it has no rewards and no behaviour log-probabilities."""
    name = f"demonstration-{number}"
    return Trajectory(
        trajectory_id=name,
        prompt_id=name,
        group_id=name,
        task="demonstration",
        tokens=demonstration.tokens,
        action_mask=demonstration.action_mask,
        rewards=[0.0] * len(demonstration.tokens),
        weight_versions=[(0, 0)],
        turn_starts=[],
        finish_reason="done",
    )


def batches(items: Sequence[Item], batch_size: int, seed: int) -> Iterator[list[Item]]:
    """Endless epochs, each in a fresh order; the tail that does not fill a batch opens the next epoch."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < batch_size:
            order.extend(generator.permutation(len(items)).tolist())
        chosen, order = order[:batch_size], order[batch_size:]
        yield [items[i] for i in chosen]


def sft_step(
    model: MegatronModel, optimizer: Optimizer, batch: Batch, topology: Topology, *, lr: float
) -> dict[str, float]:
    """One optimizer step; metrics over the whole step."""

    def loss(index: int, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return cross_entropy(logprobs, batch.rows[index].action_mask, float(batch.action_tokens))

    optimizer.zero_grad()
    stats = forward_backward(model, [r.row for r in batch.rows], loss)
    grad_norm = optimizer.step(lr)
    totals = reduce_stats(stats, topology)
    return {"loss": float(totals["nll"] / totals["tokens"]), "grad_norm": grad_norm, "lr": lr}


def run(run: RunDirectory, config: Config) -> None:
    """Fine-tune ``config.model.path`` into ``run.sft``. One process of the trainer's world."""
    if config.sft is None:
        raise ValueError("this config has no section `sft`: there is nothing to fine-tune")
    with trainer_world(config) as topology:
        writer = MetricsWriter(run, "sft", tensorboard=True) if topology.rank == 0 else None
        fine_tune(run, config, config.sft, topology, writer)
        if writer is not None:
            writer.close()


def fine_tune(
    run: RunDirectory, config: Config, sft: SftConfig, topology: Topology, writer: MetricsWriter | None
) -> None:
    """The loop; ends with a complete Hugging Face checkpoint."""
    codec = TokenizerCodec.from_directory(config.model.path)
    environment = make_environment(config.environment)
    demonstrations = demonstration_trajectories(
        environment, codec, sft.demonstrations, config.run.seed, max_tokens=config.environment.max_tokens
    )
    model = build_model("actor", Path(config.model.path), config)
    optimizer = build_optimizer(model, sft.optimizer, passed_on("optimizer", config))
    trajectories = [as_trajectory(d, number) for number, d in enumerate(demonstrations)]
    source = batches(trajectories, sft.batch_size, config.run.seed)
    lifesign = LifeSign(run.heartbeat(f"sft-{topology.rank}"))
    for step in range(sft.steps):
        lifesign.beat()
        started = time.perf_counter()
        batch = pack_trajectories(
            next(source),
            data_rank=topology.data_rank,
            data_size=topology.data_size,
            token_budget=config.trainer.token_budget,
        )
        metrics = sft_step(model, optimizer, batch, topology, lr=learning_rate(sft.optimizer, step, sft.steps))
        if writer is not None:
            seconds = time.perf_counter() - started
            writer.log(
                step, {**{f"sft/{k}": v for k, v in metrics.items()}, "sft/tokens_per_s": batch.tokens / seconds}
            )
    save_hf(model, Path(config.model.path), run.sft)
