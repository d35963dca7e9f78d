"""One training step: values, advantages, K critic updates, one actor update (DESIGN section 4).

Invariants, asserted by the tests:
- the step's numbers and gradients do not depend on the parallel layout or on how trajectories are packed;
- advantages come from the values before the step's updates;
- without a critic (group and running-mean baselines) the same step has neither values nor critic updates.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megasao.algorithms.advantages import Advantages
from megasao.config import Config
from megasao.training.actor import Actor
from megasao.training.batch import Batch
from megasao.training.critic import Critic
from megasao.training.estimator import Estimator


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


def sao_step(
    actor: Actor, critic: Critic | None, estimator: Estimator, batch: Batch, *, step: int, config: Config
) -> StepResult:
    """Train on ``batch``. Before ``critic.warmup_steps`` only the critic moves."""
    result = StepResult()
    metrics = result.metrics
    with timed(metrics, "time/values"):
        result.values = critic.values(batch) if critic is not None else []
        result.advantages = estimator.estimate(batch, result.values)
    if critic is not None:
        with timed(metrics, "time/critic"):
            updates = _update_critic(critic, batch, result, step)
            metrics.update({f"critic/{name}": value for name, value in updates[0].items()})
    if step >= config.warmup_steps:
        with timed(metrics, "time/actor"):
            advantages = [a.advantages for a in result.advantages]
            update = actor.update(batch, advantages, actor_step=step - config.warmup_steps)
            metrics.update({f"actor/{name}": value for name, value in update.items()})
    return result


def _update_critic(critic: Critic, batch: Batch, result: StepResult, step: int) -> list[dict[str, float | None]]:
    """The K updates of a step, all towards the same targets; metrics of each."""
    returns = [a.returns for a in result.advantages if a.returns is not None]
    assert len(returns) == len(batch.rows), "the estimator gives the critic no targets"
    count = critic.config.value_model.updates_per_actor_update
    return [critic.update(batch, returns, old_values=result.values, step=step) for _ in range(count)]
