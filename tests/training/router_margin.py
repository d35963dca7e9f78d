"""Tokens on which two right implementations may differ: a router that can hardly decide which expert comes last, or an
indexer of sparse attention which key does."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def router_margins(path: Path, tokens: list[int]) -> Tensor:
    """float32 [T]: for each token, the smallest margin of a routing decision that its log-probability depends on.

    The margin of one decision is the gap between the last chosen and the first rejected expert: of router logits, or of
    the biased scores where a sigmoid router has a correction bias. A token's
    log-probability depends on every layer at every earlier position of its sequence. So it is with the keys that an
    indexer chooses and rejects, by their scores.
    """
    model = _load(path)
    chosen = model.config.num_experts_per_tok
    gaps: list[Tensor] = []
    hooks = []

    def gap(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        scores = inputs[0].reshape(len(tokens), -1) @ module.weight.T  # type: ignore[operator]
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            scores = scores.sigmoid() + bias
        ordered = scores.sort(dim=-1, descending=True).values
        gaps.append(ordered[:, chosen - 1] - ordered[:, chosen])

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):  # some layers of some families are dense
            hooks.append(layer.mlp.gate.register_forward_hook(gap))
        indexer = getattr(layer.self_attn, "indexer", None)
        if indexer is not None:
            take = lambda module, inputs, _: gaps.append(_key_gaps(module, *inputs[:3]))  # noqa: E731
            hooks.append(indexer.register_forward_hook(take))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    so_far = torch.stack(gaps).min(dim=0).values.cummin(dim=0).values
    return torch.cat([torch.full((1,), torch.inf), so_far[:-1]])


@lru_cache(maxsize=2)
def _load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _key_gaps(indexer: Any, hidden: Tensor, query_latent: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """[T]: between the last chosen and the first rejected key of each token's; infinite where all are chosen."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

    length, width = hidden.shape[1], indexer.qk_rope_head_dim
    queries = indexer.wq_b(query_latent).view(1, length, indexer.n_heads, -1)
    keys = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    turned = apply_rotary_pos_emb_interleave(queries[..., :width], keys[..., :width], *angles, unsqueeze_dim=2)
    queries, keys = (
        torch.cat([part, each[..., width:]], -1)[0] for part, each in zip(turned, (queries, keys), strict=True)
    )
    scores = torch.relu(torch.einsum("qhd,kd->qkh", queries, keys[:, 0])) * indexer.softmax_scale
    total = torch.einsum("qkh,qh->qk", scores, indexer.weights_proj(hidden)[0]) * indexer.n_heads**-0.5
    later = torch.ones_like(total, dtype=torch.bool).triu(1)
    ordered = total.masked_fill(later, -torch.inf).sort(dim=-1, descending=True).values
    last, most = torch.arange(length), indexer.index_topk
    gaps = torch.full((length,), torch.inf)
    if length > most:
        gaps[most:] = (ordered[:, most - 1] - ordered[:, most])[last >= most]
    return gaps
