"""The experts that an SGLang server says its tokens went to, as this project keeps them (routing replay, "R3").

A server answers with int32 [n, layers, K], dense layers included, of the tokens from ``routed_experts_start_len`` to
the last but one. Invariants (tests assert them):
- rows are exactly those of the tokens that were asked for, of the layers with experts, one or two bytes an id;
- anything else, ids that the model does not have among it, is an error and no sample.
"""

from pathlib import Path

import numpy as np

from megasao.config.architecture import read_served_config
from megasao.families.facts import is_moe_layer
from megasao.families.routing import Routing
from megasao.rollout.engines.base import EngineError, GenerateRequest


class ExpertRows:
    """Reads the answers of servers of one model."""

    def __init__(self, routing: Routing, moe_layers: list[int], layers: int) -> None:
        self._routing, self._moe_layers, self._layers = routing, moe_layers, layers

    @classmethod
    def of(cls, checkpoint: Path) -> "ExpertRows | None":
        """Those of a checkpoint; None for a dense model."""
        config = read_served_config(checkpoint)
        routing = Routing.of(config)
        if routing is None:
            return None
        layers = int(config["num_hidden_layers"])
        return cls(routing, [layer for layer in range(layers) if is_moe_layer(config, layer)], layers)

    def read(self, data: bytes, request: GenerateRequest, output_tokens: int, where: str) -> np.ndarray:
        """[n, M, K] from ``routed_experts_from`` to the last token but one. EngineError names ``where`` it is wrong."""
        rows = len(request.input_ids) + output_tokens - 1 - request.sampling.routed_experts_from
        shape = (rows, self._layers, self._routing.top_k)
        expected = 4 * rows * self._layers * self._routing.top_k
        if len(data) != expected:
            raise EngineError(f"{where}: {len(data)} bytes of routed experts, not {expected}, int32 {list(shape)}")
        ids = np.frombuffer(data, "<i4").reshape(shape)[:, self._moe_layers]
        if ids.size and not 0 <= ids.min() <= ids.max() < self._routing.experts:
            raise EngineError(f"{where}: routed experts {ids.min()}..{ids.max()}, not 0..{self._routing.experts - 1}")
        return ids.astype(self._routing.dtype)
