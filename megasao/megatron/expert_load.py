"""How evenly a model's routers spread the tokens of a step over the experts.

Invariant (tests assert it): the numbers are those of all tokens of the step, whatever the layout; tokens that pad a row
count too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, distributed

from megasao.megatron.models import MegatronModel
from megasao.megatron.runtime import compute_device


class ExpertLoad:
    """Counts where the tokens go that pass through ``model`` inside :meth:`counting`."""

    def __init__(self, model: MegatronModel) -> None:
        config = model.transformer_config
        self._tokens = torch.zeros(config.num_layers, config.num_moe_experts or 0, dtype=torch.int64)
        self._counting = False
        for layer in (each for gpt in model.modules for each in gpt.modules() if isinstance(each, TransformerLayer)):
            if isinstance(layer.mlp, MoELayer):
                layer.mlp.router.register_forward_hook(partial(self._add, layer.layer_number - 1))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count anew inside the block."""
        self._tokens.zero_()
        self._counting = True
        yield
        self._counting = False

    def _add(
        self, layer: int, router: torch.nn.Module, arguments: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        """Forward hook of a router: its map is bool [tokens, experts]."""
        if self._counting:
            self._tokens[layer] += output[1].sum(0).cpu()

    def summarize(self) -> dict[str, float]:
        """Collective over the world. {} for a dense model; else, as means over the layers with experts:

        ``expert_load_max``: tokens of the busiest expert over those of an average one (1: even; experts: all to one);
        ``experts_unused``: share of the experts that no token went to.
        """
        if not self._tokens.numel():
            return {}
        tokens = self._tokens.to(compute_device())
        distributed.all_reduce(tokens)
        counts = tokens[tokens.sum(1) > 0].double()
        return {
            "expert_load_max": float((counts.amax(1) / counts.mean(1)).mean()),
            "experts_unused": float((counts == 0).double().mean()),
        }
