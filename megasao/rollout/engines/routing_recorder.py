"""Which experts the tokens of a forward pass went to, read off a transformers model (routing replay).

Invariant, asserted by the tests: the ids are those that the model's own routers give for each sequence alone.
"""

from typing import Any

import numpy as np
import torch

from megasao.families.routing import Routing


class RoutingRecorder:
    """Listens to the experts of every layer; ``recording`` says whether the next pass is to be kept."""

    def __init__(self, model: torch.nn.Module, hf_config: dict[str, Any]) -> None:
        """ValueError if the model's experts are not where the families of this project have them."""
        self.routing = Routing.of(hf_config)
        self.recording = False
        self._layers: list[torch.Tensor] = []
        experts = [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]
        if len(experts) != (self.routing.layers if self.routing else 0):
            raise ValueError(f"expected experts in {self.routing.layers if self.routing else 0} layers: {len(experts)}")
        for module in experts:
            module.register_forward_pre_hook(self._take)

    def taken(self) -> np.ndarray | None:
        """[N, M, K] of the pass of N tokens that has just run, if it was recorded; and stop recording."""
        layers, self._layers, self.recording = self._layers, [], False
        if not layers:
            return None
        assert self.routing is not None
        return torch.stack(layers, 1).numpy().astype(self.routing.dtype)

    def _take(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.recording:
            self._layers.append(arguments[1].cpu())
