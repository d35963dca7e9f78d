"""Policy objectives, chosen by configuration: typed tensors in, (loss, statistics) out. No process groups here."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megasao.config.algorithm import DisObjective
from megasao.ops import dis
from megasao.ops.reference import Stats


@dataclass(frozen=True)
class PolicyInputs:
    """One packed row, all [T] on one device: ``logprobs`` (with gradient), ``rollout_logprobs`` and ``advantages``
    of one float dtype, ``action_mask`` bool."""

    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    action_mask: Tensor


class Objective(Protocol):
    """What the trainer needs of a policy objective."""

    def loss(self, inputs: PolicyInputs, denominator: Tensor | float) -> tuple[Tensor, Stats]:
        """The row's part of the loss, 0-d (parts add up over rows and ranks), and statistics that add up."""
        ...

    def kept(self, inputs: PolicyInputs) -> Tensor:
        """bool [T]: the action tokens that contribute to the loss."""
        ...

    def summarize(self, stats: Stats) -> dict[str, float | None]:
        """Metrics of the whole step from its combined statistics."""
        ...


@dataclass(frozen=True)
class Dis:
    """Direct double-sided importance sampling; see ``megasao.ops.dis``."""

    config: DisObjective

    def loss(self, inputs: PolicyInputs, denominator: Tensor | float) -> tuple[Tensor, Stats]:
        """See ``megasao.ops.dis_loss``."""
        return dis.dis_loss(
            inputs.logprobs,
            inputs.rollout_logprobs,
            inputs.advantages,
            inputs.action_mask,
            eps_low=self.config.eps_low,
            eps_high=self.config.eps_high,
            denominator=denominator,
        )

    def kept(self, inputs: PolicyInputs) -> Tensor:
        """The action tokens inside the band."""
        return dis.accepted_tokens(
            inputs.logprobs,
            inputs.rollout_logprobs,
            inputs.action_mask,
            eps_low=self.config.eps_low,
            eps_high=self.config.eps_high,
        )

    def summarize(self, stats: Stats) -> dict[str, float | None]:
        """See ``megasao.ops.dis.summarize``."""
        return dis.summarize(stats)


_OBJECTIVES = {"dis": Dis}


def make_objective(config: DisObjective) -> Objective:
    """The objective that ``algorithm.objective`` names."""
    return _OBJECTIVES[config.name](config)


def local_denominator(
    kind: Literal["action_tokens", "accepted_tokens", "sequences"],
    objective: Objective,
    inputs: PolicyInputs,
    trajectories: int,
) -> Tensor:
    """A row's part of the loss denominator (``algorithm.denominator``), float64 0-d; add over all rows and ranks.

    ``trajectories`` is the number of trajectories in the row (0 for a row that only keeps ranks in step).
    """
    if kind == "action_tokens":
        count = inputs.action_mask.sum(dtype=torch.float64)
    elif kind == "accepted_tokens":
        count = objective.kept(inputs).sum(dtype=torch.float64)
    else:
        count = torch.tensor(float(trajectories), dtype=torch.float64, device=inputs.action_mask.device)
    return count
