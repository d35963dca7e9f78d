"""Adam on a Megatron model's trainable parameters, through Megatron's own optimizer.

Invariants (tests assert them):

- the gradient norm is that of the whole model (each parameter counted once), whatever the layout;
- frozen parameters have no optimizer state and do not move;
- with a distributed optimizer (this rank's Adam has a slice of each parameter) state is read and written whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import distributed

from megasao.config.training import OptimizerConfig
from megasao.megatron.models import MegatronModel
from megasao.megatron.runtime import compute_device

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
        """What Adam updates for a model parameter, whole: its fp32 copy under bfloat16, else itself. Read only.

        Of a buffer and of what is frozen, that is the tensor itself.
        Collective over data-parallel ranks with a distributed optimizer, as :meth:`moment` and :meth:`gradient` are.
        """
        place = self._places.get(parameter)
        if place is None or not self.model.transformer_config.bf16:
            return parameter
        return place.whole(parameter, place.main)

    def moment(self, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
        """Adam's ``exp_avg`` or ``exp_avg_sq`` of a parameter; None before its first update, or if frozen."""
        place = self._places.get(parameter)
        if place is None:
            return None
        part = None if place.main is None else place.inner.state.get(place.main, {}).get(name)
        return place.whole(parameter, part) if place.anywhere(part is not None) else None

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The reduced fp32 gradient of a model parameter, whole; None if it is frozen. Collective as :meth:`main`."""
        place = self._places.get(parameter)
        if place is None:
            return None
        gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return place.whole(parameter, None if place.main is None else place.cut(gradient))

    def restore(
        self, parameter: torch.Tensor, value: torch.Tensor, moments: dict[str, torch.Tensor], step: int
    ) -> None:
        """Set a model parameter, the copy of it that Adam updates, and Adam's state of it ({}: leave that)."""
        with torch.no_grad():
            parameter.copy_(value)
        place = self._places.get(parameter)
        if place is None or place.main is None:
            return
        with torch.no_grad():
            place.main.copy_(place.cut(value))
        if not moments:
            return
        place.inner.state[place.main] = {
            name: place.cut(moment).to(place.main.device, torch.float32).clone() for name, moment in moments.items()
        }
        if isinstance(place.inner, torch.optim.Adam):
            place.inner.state[place.main]["step"] = torch.tensor(float(step))
        else:  # TransformerEngine's and Apex's count per group
            for group in place.inner.param_groups:
                group["step"] = step

    def reset(self) -> None:
        """Forget the moments and the number of updates, as before the first one."""
        for inner in self._inner_optimizers():
            inner.state.clear()
            for group in inner.param_groups:
                group.pop("step", None)

    def updates(self) -> int:
        """Updates that Adam has made so far: the count that its bias correction uses. 0 on a rank without state."""
        inner = self._inner_optimizers()
        counts = {int(state["step"]) for part in inner for state in part.state.values() if "step" in state}
        counts |= {int(group["step"]) for part in inner for group in part.param_groups if "step" in group}
        assert len(counts) <= 1, f"Adam counts differ between parameters: {counts}"
        return counts.pop() if counts else 0

    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in self._parts() if part.optimizer is not None]

    def _parts(self) -> list[Any]:
        return list(getattr(self.megatron, "chained_optimizers", [self.megatron]))

    @cached_property
    def _places(self) -> dict[torch.Tensor, "_Place"]:
        """Every trainable parameter of this rank."""
        return {parameter: place for part in self._parts() for parameter, place in _places_of(part, self.model)}


@dataclass(frozen=True)
class _Place:
    """Where the Adam state of a parameter is.

    Attributes:
        inner: the torch optimizer.
        main: the tensor that it updates: the parameter, its fp32 copy, or a slice of either; None: nothing of it here.
        slice: which part of the flattened parameter that is; None: nothing of it.
        group: ranks that hold the other slices; None where it is whole.
    """

    inner: torch.optim.Optimizer
    main: torch.Tensor | None
    slice: slice | None
    group: distributed.ProcessGroup | None

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the parameter's shape."""
        return whole if self.group is None else whole.flatten()[self.slice]

    def whole(self, parameter: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
        """fp32, in the parameter's shape, from the parts of all ranks; bit for bit."""
        if self.group is None:
            assert part is not None
            return part
        bits = torch.zeros(parameter.numel(), dtype=torch.int32, device=parameter.device)
        if part is not None:
            bits[self.slice] = part.detach().contiguous().view(torch.int32)
        distributed.all_reduce(bits, group=self.group)
        return bits.view(torch.float32).view(parameter.shape)

    def anywhere(self, here: bool) -> bool:
        """Whether ``here`` is true on any rank that holds a part."""
        if self.group is None:
            return here
        count = torch.tensor([int(here)], device=compute_device())
        distributed.all_reduce(count, group=self.group)
        return bool(count)


def _places_of(part: Any, model: MegatronModel) -> Iterator[tuple[torch.nn.Parameter, _Place]]:
    """The parameters that one of Megatron's chained optimizers updates, on any rank."""
    if part.optimizer is None:
        return
    if isinstance(part, DistributedOptimizer):
        for buffer in part.buffers:
            for parameter in buffer.params:
                yield parameter, _sliced_place(part, parameter)
        return
    mains = {id(main) for group in part.optimizer.param_groups for main in group["params"]}
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            main = getattr(parameter, "main_param", parameter)
            if id(main) in mains:
                yield parameter, _Place(part.optimizer, main, slice(None), None)


def _sliced_place(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> _Place:
    if parameter not in part.model_param_group_index_map:
        return _Place(part.optimizer, None, None, part.data_parallel_group)
    group, number = part.model_param_group_index_map[parameter]
    own = part._get_model_param_range_map(parameter)["param"]
    main = part.optimizer.param_groups[group]["params"][number]
    return _Place(part.optimizer, main, slice(own.start, own.end), part.data_parallel_group)


def build_optimizer(model: MegatronModel, config: OptimizerConfig, options: dict[str, Any] | None = None) -> Optimizer:
    """Adam for the model's trainable parameters; ``options`` go on to Megatron. Collective.

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
            use_distributed_optimizer=model.chunks[0].ddp_config.use_distributed_optimizer,
            overlap_param_gather=model.chunks[0].ddp_config.overlap_param_gather,
            **(options or {}),
        ),
        model.chunks,
        use_gloo_process_groups=False,
    )
    for group in megatron.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return Optimizer(model, megatron)
