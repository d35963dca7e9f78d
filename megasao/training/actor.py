"""The policy's update: one optimizer step on the configured objective over all rows of a step.

Invariants:
- the denominator is global and the same on every rank;
- ranks without tokens run the same rows (dummies) and enter every collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megasao.algorithms.kl_penalty import kl_penalties
from megasao.algorithms.objectives import Objective, PolicyInputs, make_objective
from megasao.config import Config
from megasao.megatron.expert_load import ExpertLoad
from megasao.megatron.models import MegatronModel, build_model
from megasao.megatron.optimizer import Optimizer, build_optimizer
from megasao.megatron.options import passed_on
from megasao.megatron.runtime import Topology
from megasao.megatron.step import forward_backward, forward_only
from megasao.ops.reference import Stats
from megasao.training import mismatch
from megasao.training.batch import Batch
from megasao.training.schedule import learning_rate
from megasao.training.stats import reduce_stats


@dataclass
class Actor:
    """The policy with its optimizer."""

    model: MegatronModel
    optimizer: Optimizer
    topology: Topology
    config: Config
    reference: MegatronModel | None = None
    """The policy that the run started from, frozen; where ``algorithm.kl`` is on."""
    expert_load: ExpertLoad = field(init=False)

    def __post_init__(self) -> None:
        self.expert_load = ExpertLoad(self.model)

    @classmethod
    def build(cls, path: Path, config: Config, topology: Topology) -> "Actor":
        """The policy of the Hugging Face checkpoint at ``path``."""
        model = build_model("actor", path, config)
        reference = build_model("actor", path, config, frozen=True) if config.algorithm.kl.coefficient else None
        return cls(
            model,
            build_optimizer(model, config.actor.optimizer, passed_on("optimizer", config)),
            topology,
            config,
            reference,
        )

    def logprobs(self, batch: Batch) -> list[torch.Tensor]:
        """float32 [T] per row: log p of each token given those before it, at its sampling temperature."""
        return forward_only(self.model, [r.row for r in batch.rows])

    def update(self, batch: Batch, advantages: Sequence[torch.Tensor], *, actor_step: int) -> dict[str, float | None]:
        """One optimizer step. ``advantages``: float32 [T] per row; ``actor_step`` counts the updates before this one,
        which is the policy's version. Returns metrics over the whole step."""
        objective = make_objective(self.config.algorithm.objective)
        denominator = self._denominator(batch, advantages, objective)
        total_steps = max(1, self.config.loop.steps - self.config.warmup_steps)
        rate = learning_rate(self.config.actor.optimizer, actor_step, total_steps)
        reference = forward_only(self.reference, [r.row for r in batch.rows]) if self.reference is not None else None

        def loss(index: int, outputs: torch.Tensor) -> tuple[torch.Tensor, Stats]:
            logprobs, *entropies = outputs if self.config.wants_entropy else [outputs]
            value, stats = objective.loss(self._inputs(batch, advantages, index, logprobs), denominator)
            stats["loss"] = value.detach().double()
            if self.config.wants_logprobs:
                stats |= mismatch.row_stats(logprobs, batch.rows[index], version=actor_step)
            if reference is not None:
                penalty = self._penalty(batch, index, logprobs, reference[index])
                stats["penalty"] = penalty.detach().double()
                value = value + self.config.algorithm.kl.coefficient * penalty
            for entropy in entropies:
                mean = self._mean_entropy(batch, index, entropy)
                stats["entropy"] = mean.detach().double()
                if self.config.algorithm.entropy_bonus:
                    value = value - self.config.algorithm.entropy_bonus * mean
            return value, stats

        self.optimizer.zero_grad()
        with self.expert_load.counting():
            stats = forward_backward(self.model, [r.row for r in batch.rows], loss, entropy=self.config.wants_entropy)
        grad_norm = self.optimizer.step(rate)
        totals = reduce_stats(stats, self.topology)
        optional = {"penalty": "kl_reference", "entropy": "entropy"}
        return {
            **objective.summarize(totals),
            **{metric: float(totals[name]) for name, metric in optional.items() if name in totals},
            **(mismatch.summarize(totals) if self.config.wants_logprobs else {}),
            **self.expert_load.summarize(),
            "loss": float(totals["loss"]),
            "grad_norm": grad_norm,
            "lr": rate,
        }

    def _inputs(
        self, batch: Batch, advantages: Sequence[torch.Tensor], index: int, logprobs: torch.Tensor
    ) -> PolicyInputs:
        row = batch.rows[index]
        return PolicyInputs(
            logprobs=logprobs,
            rollout_logprobs=row.rollout_logprobs if self.config.wants_logprobs else None,
            advantages=advantages[index],
            action_mask=row.action_mask,
            cu_seqlens=row.cu_seqlens,
        )

    def _penalty(self, batch: Batch, index: int, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The row's part of the mean KL estimate over the step's action tokens."""
        penalties = kl_penalties(logprobs, reference, batch.rows[index].action_mask, self.config.algorithm.kl.estimator)
        return penalties.sum() / max(batch.action_tokens, 1)

    def _mean_entropy(self, batch: Batch, index: int, entropies: torch.Tensor) -> torch.Tensor:
        """The row's part of the mean entropy over the step's action tokens, nats; ``entropies`` [T]."""
        chosen = torch.where(batch.rows[index].action_mask, entropies, 0.0)
        return chosen.sum() / max(batch.action_tokens, 1)

    def kept(
        self, batch: Batch, advantages: Sequence[torch.Tensor], logprobs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """bool [T] per row: the action tokens that may carry gradient at these ``logprobs``, float32 [T] per row."""
        objective = make_objective(self.config.algorithm.objective)
        return [objective.kept(self._inputs(batch, advantages, index, values)) for index, values in enumerate(logprobs)]

    def pushed(self) -> None:
        """The weights were sent to the engines."""
        if self.config.actor.reset_optimizer:
            self.optimizer.reset()

    def _denominator(self, batch: Batch, advantages: Sequence[torch.Tensor], objective: Objective) -> float:
        """The step's global denominator; ``accepted_tokens`` costs a forward pass to count them."""
        match self.config.algorithm.denominator:
            case "action_tokens":
                return float(batch.action_tokens)
            case "sequences":
                return float(batch.sequences)
            case "accepted_tokens":
                kept = [
                    objective.kept(self._inputs(batch, advantages, index, logprobs)).sum()
                    for index, logprobs in enumerate(self.logprobs(batch))
                ]
                return float(self.topology.all_reduce_data(torch.stack(kept).sum().double()))
