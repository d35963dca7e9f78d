"""Adam on a Megatron model's trainable parameters, through Megatron's own optimizer.

Invariants (tests assert them):

- the gradient norm is that of the whole model (each parameter counted once), whatever the layout;
- frozen parameters have no optimizer state and do not move.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from megasao.config.training import OptimizerConfig
from megasao.megatron.models import MegatronModel

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Optimizer:
    """Megatron's optimizer of one model (two chained ones where experts are spread over ranks)."""

    model: MegatronModel
    megatron: Any

    def zero_grad(self) -> None:
        """Clear the gradient buffers; call before each :func:`megasao.megatron.step.forward_backward`."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, lr: float) -> float:
        """Clip by the global norm and update at learning rate ``lr``; returns the norm before clipping.

        Raises:
            RuntimeError: the gradient norm is not finite; nothing was updated.
        """
        for group in self.megatron.param_groups:
            group["lr"] = lr * group["lr_mult"]
        norm = self._finite_norm()
        updated, _, _ = self.megatron.step()
        assert updated
        return norm

    def _finite_norm(self) -> float:
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not torch.isfinite(torch.tensor(norm)):
            raise RuntimeError(f"the {self.model.role}'s gradient norm is {norm}; no update was made")
        return norm

    def main(self, parameter: torch.Tensor) -> torch.Tensor:
        """What Adam updates for a model parameter: its fp32 copy under bfloat16, else itself."""
        main: torch.Tensor = getattr(parameter, "main_param", parameter)
        return main

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Adam's ``exp_avg`` and ``exp_avg_sq`` of a model parameter; {} before its first update, or if frozen."""
        state = self._inner_of(parameter).state.get(self.main(parameter), {}) if parameter.requires_grad else {}
        return {name: state[name] for name in MOMENTS if name in state}

    def restore(self, parameter: torch.Tensor, moments: dict[str, torch.Tensor], step: int) -> None:
        """Set Adam's state of a trainable parameter."""
        inner, main = self._inner_of(parameter), self.main(parameter)
        inner.state[main] = {name: value.to(main.device, torch.float32) for name, value in moments.items()}
        if isinstance(inner, torch.optim.Adam):
            inner.state[main]["step"] = torch.tensor(float(step))
        else:  # TransformerEngine's and Apex's count per group
            for group in inner.param_groups:
                group["step"] = step

    def reset(self) -> None:
        """Forget the moments and the number of updates, as before the first one."""
        for inner in self._inner_optimizers():
            inner.state.clear()
            for group in inner.param_groups:
                group.pop("step", None)

    def updates(self) -> int:
        """Updates that Adam has made so far: the count that its bias correction uses."""
        inner = self._inner_optimizers()
        counts = {int(state["step"]) for part in inner for state in part.state.values() if "step" in state}
        counts |= {int(group["step"]) for part in inner for group in part.param_groups if "step" in group}
        assert len(counts) <= 1, f"Adam counts differ between parameters: {counts}"
        return counts.pop() if counts else 0

    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in self.megatron.chained_optimizers if part.optimizer is not None]

    def _inner_of(self, parameter: torch.Tensor) -> torch.optim.Optimizer:
        return self._inner_by_id[id(self.main(parameter))]

    @cached_property
    def _inner_by_id(self) -> dict[int, torch.optim.Optimizer]:
        return {
            id(parameter): inner
            for inner in self._inner_optimizers()
            for group in inner.param_groups
            for parameter in group["params"]
        }


def build_optimizer(model: MegatronModel, config: OptimizerConfig) -> Optimizer:
    """Adam for the model's trainable parameters. Collective.

    Biases and vectors are exempt from weight decay, as is Megatron's custom.
    """
    transformer = model.transformer_config
    megatron = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=transformer.bf16,
            params_dtype=transformer.params_dtype,
            use_distributed_optimizer=False,
        ),
        model.chunks,
        use_gloo_process_groups=False,
    )
    for group in megatron.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return Optimizer(model, megatron)
