"""One SAO training step: values, advantages, K critic updates, one actor update (DESIGN section 4).

Invariants, asserted by the tests:
- the step's numbers and gradients do not depend on the parallel layout or on how trajectories are packed;
- advantages come from the values before the step's updates.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megasao.algorithms.advantages import Advantages, skip_observation_gae
from megasao.config import Config
from megasao.training.actor import Actor
from megasao.training.batch import Batch
from megasao.training.critic import Critic


@dataclass
class StepResult:
    """Metrics of a step, and the per-row tensors that examples are written from."""

    metrics: dict[str, float | None] = field(default_factory=dict)
    values: list[torch.Tensor] = field(default_factory=list)
    advantages: list[Advantages] = field(default_factory=list)


@contextmanager
def timed(metrics: dict[str, float | None], name: str) -> Iterator[None]:
    """Add the seconds of the block to ``metrics[name]``."""
    start = time.perf_counter()
    yield
    metrics[name] = (metrics.get(name) or 0.0) + time.perf_counter() - start


def estimate_advantages(batch: Batch, values: list[torch.Tensor], config: Config) -> list[Advantages]:
    """The estimator, row by row; every sequence lies whole in one row."""
    return [
        skip_observation_gae(row.rewards, value, row.action_mask, row.row.cu_seqlens, config.algorithm.advantages)
        for row, value in zip(batch.rows, values, strict=True)
    ]


def sao_step(actor: Actor, critic: Critic, batch: Batch, *, step: int, config: Config) -> StepResult:
    """Train on ``batch``. Before ``critic.warmup_steps`` only the critic moves."""
    result = StepResult()
    metrics = result.metrics
    with timed(metrics, "time/values"):
        result.values = critic.values(batch)
        result.advantages = estimate_advantages(batch, result.values, config)
    with timed(metrics, "time/critic"):
        returns = [a.returns for a in result.advantages]
        updates = [critic.update(batch, returns, step=step) for _ in range(config.critic.updates_per_actor_update)]
        metrics.update({f"critic/{name}": value for name, value in updates[0].items()})
    if step >= config.critic.warmup_steps:
        with timed(metrics, "time/actor"):
            advantages = [a.advantages for a in result.advantages]
            update = actor.update(batch, advantages, actor_step=step - config.critic.warmup_steps)
            metrics.update({f"actor/{name}": value for name, value in update.items()})
    return result
