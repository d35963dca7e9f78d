"""One training step: values, advantages, K critic updates, one actor update (DESIGN section 4).

Invariants, asserted by the tests:
- the step's numbers and gradients do not depend on the parallel layout or on how trajectories are packed;
- advantages come from the values before the step's updates;
- without a critic (group and running-mean baselines) the same step has neither values nor critic updates;
- with a critic in another world the step is the same; its updates go on beside the actor's.
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
from megasao.training.remote_critic import RemoteCritic


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
            metrics.update(critic_metrics(update_critic(critic, batch, result, step)))
    update_actor(actor, batch, result, step, config)
    return result


def step_beside_critic(
    actor: Actor, critic: RemoteCritic, estimator: Estimator, batch: Batch, *, step: int, config: Config
) -> StepResult:
    """The actor's side of the same step: having given its values the critic is updated in its own world meanwhile.

    :func:`await_critic` is the rest of the step.
    """
    result = StepResult()
    with timed(result.metrics, "time/values"):
        result.values = critic.values(batch, step=step)
        result.advantages = estimator.estimate(batch, result.values)
    update_actor(actor, batch, result, step, config)
    return result


def await_critic(critic: RemoteCritic, *, step: int) -> dict[str, float | None]:
    """Wait until the critic has done its updates of the step; their metrics, with how long they took."""
    metrics: dict[str, float | None] = {}
    with timed(metrics, "time/critic"):
        learned = critic.learned(step=step)
    return {**metrics, **critic_metrics(learned.metrics), "critic/seconds": learned.seconds}


def update_actor(actor: Actor, batch: Batch, result: StepResult, step: int, config: Config) -> None:
    """The actor's update, after the critic's warm-up; its metrics go to ``result``."""
    if step >= config.warmup_steps:
        with timed(result.metrics, "time/actor"):
            advantages = [a.advantages for a in result.advantages]
            update = actor.update(batch, advantages, actor_step=step - config.warmup_steps)
            result.metrics.update({f"actor/{name}": value for name, value in update.items()})


def update_critic(critic: Critic, batch: Batch, result: StepResult, step: int) -> dict[str, float | None]:
    """The K updates of a step, all towards the same targets; metrics of the first."""
    returns = [a.returns for a in result.advantages if a.returns is not None]
    assert len(returns) == len(batch.rows), "the estimator gives the critic no targets"
    count = critic.config.value_model.updates_per_actor_update
    updates = [critic.update(batch, returns, old_values=result.values, step=step) for _ in range(count)]
    return updates[0]


def critic_metrics(metrics: dict[str, float | None]) -> dict[str, float | None]:
    """As the step's line names them."""
    return {f"critic/{name}": value for name, value in metrics.items()}
