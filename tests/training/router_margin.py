"""Tokens on which two right implementations may differ: a router that can hardly decide which expert comes last."""

from pathlib import Path

import torch
from torch import Tensor


def router_margins(path: Path, tokens: list[int]) -> Tensor:
    """float32 [T]: for each token, the smallest margin of a routing decision that its log-probability depends on.

    The margin of one decision is the gap between the last chosen and the first rejected expert: of router logits, or of
    the biased scores where a sigmoid router has a correction bias. A token's
    log-probability depends on every layer at every earlier position of its sequence.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chosen = model.config.num_experts_per_tok
    gaps: list[Tensor] = []

    def gap(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        scores = inputs[0].reshape(len(tokens), -1) @ module.weight.T  # type: ignore[operator]
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            scores = scores.sigmoid() + bias
        ordered = scores.sort(dim=-1, descending=True).values
        gaps.append(ordered[:, chosen - 1] - ordered[:, chosen])

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):  # some layers of some families are dense
            layer.mlp.gate.register_forward_hook(gap)
    with torch.no_grad():
        model(torch.tensor([tokens]))
    so_far = torch.stack(gaps).min(dim=0).values.cummin(dim=0).values
    return torch.cat([torch.full((1,), torch.inf), so_far[:-1]])
