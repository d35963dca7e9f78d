"""The value model: values for the estimator, and K regressions on its targets per step.

Invariants:
- frozen attention moves by exactly nothing;
- the learning-rate schedule counts actor steps: K updates of one step share one rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megasao.algorithms.value_loss import summarize, value_loss
from megasao.config import Config
from megasao.megatron.checkpoint import load_model
from megasao.megatron.models import MegatronModel, build_model
from megasao.megatron.optimizer import Optimizer, build_optimizer
from megasao.megatron.options import passed_on
from megasao.megatron.runtime import Topology
from megasao.megatron.step import forward_backward, forward_only
from megasao.ops.reference import Stats
from megasao.training.batch import Batch
from megasao.training.schedule import learning_rate
from megasao.training.stats import reduce_stats


@dataclass
class Critic:
    """The value model with its optimizer."""

    model: MegatronModel
    optimizer: Optimizer
    topology: Topology
    config: Config

    @classmethod
    def build(cls, path: Path, config: Config, topology: Topology, *, start: Path | None = None) -> "Critic":
        """The policy of ``path`` with its output layer replaced by a value head; with ``start`` that model checkpoint.

        ValueError: ``start`` is incomplete, or of another model or role.
        """
        model = build_model("critic", path, config)
        optimizer = build_optimizer(model, config.value_model.optimizer, passed_on("optimizer", config))
        if start is not None:
            load_model(model, optimizer, start)
            optimizer.reset()
        return cls(model, optimizer, topology, config)

    def values(self, batch: Batch) -> list[torch.Tensor]:
        """float32 [T] per row: V of the tokens before each token."""
        return forward_only(self.model, [r.row for r in batch.rows])

    def update(
        self,
        batch: Batch,
        returns: Sequence[torch.Tensor],
        *,
        old_values: Sequence[torch.Tensor] = (),
        step: int,
    ) -> dict[str, float | None]:
        """One optimizer step on E[(V - R)^2] over action tokens. ``returns``, ``old_values``: float32 [T] per row.

        ``old_values`` are those of before the step's first update: ``critic.value_clip`` counts from them; without it
        they are not read. ``step`` counts actor steps.
        """
        options = self.config.value_model
        rate = learning_rate(options.optimizer, step, self.config.loop.steps)

        def loss(index: int, values: torch.Tensor) -> tuple[torch.Tensor, Stats]:
            return value_loss(
                values,
                returns[index],
                batch.rows[index].action_mask,
                denominator=float(batch.action_tokens),
                clip=None if options.value_clip is None else (old_values[index], options.value_clip),
            )

        self.optimizer.zero_grad()
        stats = forward_backward(self.model, [r.row for r in batch.rows], loss)
        grad_norm = self.optimizer.step(rate)
        metrics = summarize(reduce_stats(stats, self.topology))
        return {**metrics, "loss": metrics["mean_square_error"], "grad_norm": grad_norm, "lr": rate}
