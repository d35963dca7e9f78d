"""Experts of the actor chosen as the engine chose them (routing replay, "R3").

A router's own scores weigh the experts and get the gradient; only which experts is taken over. The ids travel with the
packed row that every layer is given, so a layer always uses those of the row that it works on: in any order of a
pipeline's micro-batches, and when a layer is computed again for the backward pass.

Invariants (tests assert them):
- replaying a router's own choices changes no output and no gradient;
- the result does not depend on the layout (TP with SP, PP, VPP, EP, CP) or on recomputation;
- a row without ids is routed as if nothing had been installed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayedChoice:
    """Stands where Megatron's router looks for its ``RouterReplay``; ``chosen`` int64 [tokens, K], or None."""

    def __init__(self) -> None:
        self.chosen: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: TopK
    ) -> tuple[Tensor, Tensor]:
        """(scores of the chosen, the chosen), both [tokens, K]; called by the router in place of its top-k."""
        if self.chosen is None:
            return compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert self.chosen.shape == (len(scores), topk), (self.chosen.shape, scores.shape, topk)
        return scores.gather(1, self.chosen), self.chosen


def install(gpt: GPTModel) -> None:
    """Let the routers of this model chunk follow ``PackedRow.routed_experts``."""
    moe_layers = gpt.config.moe_layer_freq
    for layer in (each for each in gpt.modules() if isinstance(each, TransformerLayer)):
        if isinstance(layer.mlp, MoELayer):
            replay = layer.mlp.router.router_replay = ReplayedChoice()
            number = sum(moe_layers[: layer.layer_number - 1])
            layer.register_forward_pre_hook(partial(_choose, replay, number), with_kwargs=True)


def _choose(
    replay: ReplayedChoice, number: int, layer: TransformerLayer, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Before a layer runs: give its router the ids of the tokens that this rank has of the row."""
    chosen = options["packed_seq_params"].routed_experts
    if chosen is not None:
        chosen = (own_tokens(chosen) if layer.config.sequence_parallel else chosen)[:, number]
    replay.chosen = chosen


def own_tokens(whole: Tensor) -> Tensor:
    """This tensor-parallel rank's part of the tokens, as sequence parallelism splits them."""
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(ranks)[rank]
