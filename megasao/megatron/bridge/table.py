"""How Hugging Face and Megatron names of qwen3 / qwen3_moe correspond: one table for load, export and checkpoints.

``{L}`` stands for the global layer number, ``{E}`` for the global expert number, both from 0.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from megasao.config.architecture import expert_count, is_moe_layer

Kind = Literal["direct", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """One line of the table: a Megatron parameter and the Hugging Face tensors it is made of.

    Attributes:
        megatron: Megatron's name (local specification), layers and experts numbered globally.
        hf: Hugging Face names, in merging order.
        kind: how they are merged: ``direct`` is one tensor as it is, ``qkv`` interleaves per query group,
            ``gate_up`` concatenates.
        shard: dimension that tensor parallelism cuts, the same in each HF tensor; None is replicated.
        expert: the cut is expert-tensor parallel, and the owner is an expert-parallel rank.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind = "direct"
    shard: int | None = None
    expert: bool = False

    def numbered(self, **numbers: int) -> "Rule":
        """Fill in ``{L}`` and ``{E}``."""
        return replace(self, megatron=_fill(self.megatron, numbers), hf=tuple(_fill(name, numbers) for name in self.hf))


_M, _H = "decoder.layers.{L}.", "model.layers.{L}."
_ME, _HE = _M + "mlp.experts.local_experts.{E}.", _H + "mlp.experts.{E}."

EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard=0)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
LM_HEAD = Rule("output_layer.weight", ("lm_head.weight",), shard=0)
VALUE_HEAD = (
    Rule("output_layer.weight", ("value_head.weight",)),
    Rule("output_layer.bias", ("value_head.bias",)),
)
LAYER = (
    Rule(_M + "input_layernorm.weight", (_H + "input_layernorm.weight",)),
    Rule(
        _M + "self_attention.linear_qkv.weight",
        (_H + "self_attn.q_proj.weight", _H + "self_attn.k_proj.weight", _H + "self_attn.v_proj.weight"),
        kind="qkv",
        shard=0,
    ),
    Rule(_M + "self_attention.q_layernorm.weight", (_H + "self_attn.q_norm.weight",)),
    Rule(_M + "self_attention.k_layernorm.weight", (_H + "self_attn.k_norm.weight",)),
    Rule(_M + "self_attention.linear_proj.weight", (_H + "self_attn.o_proj.weight",), shard=1),
    Rule(_M + "pre_mlp_layernorm.weight", (_H + "post_attention_layernorm.weight",)),
)
DENSE = (
    Rule(
        _M + "mlp.linear_fc1.weight",
        (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight"),
        kind="gate_up",
        shard=0,
    ),
    Rule(_M + "mlp.linear_fc2.weight", (_H + "mlp.down_proj.weight",), shard=1),
)
ROUTER = Rule(_M + "mlp.router.weight", (_H + "mlp.gate.weight",))
EXPERT = (
    Rule(
        _ME + "linear_fc1.weight",
        (_HE + "gate_proj.weight", _HE + "up_proj.weight"),
        kind="gate_up",
        shard=0,
        expert=True,
    ),
    Rule(_ME + "linear_fc2.weight", (_HE + "down_proj.weight",), shard=1, expert=True),
)

# TransformerEngine fuses these norms into the linear layer that follows.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def rules(hf_config: dict[str, Any], role: Literal["actor", "critic"]) -> dict[str, Rule]:
    """Every parameter of the whole model, by its global Megatron name."""
    return {rule.megatron: rule for rule in _expand(hf_config, role)}


def _expand(hf_config: dict[str, Any], role: Literal["actor", "critic"]) -> Iterator[Rule]:
    yield EMBEDDING
    for layer in range(hf_config["num_hidden_layers"]):
        yield from (rule.numbered(L=layer) for rule in LAYER)
        if not is_moe_layer(hf_config, layer):
            yield from (rule.numbered(L=layer) for rule in DENSE)
            continue
        yield ROUTER.numbered(L=layer)
        for expert in range(expert_count(hf_config)):
            yield from (rule.numbered(L=layer, E=expert) for rule in EXPERT)
    yield FINAL_NORM
    if role == "critic":
        yield from VALUE_HEAD
    elif not hf_config.get("tie_word_embeddings", False):
        yield LM_HEAD


def global_name(local: str, *, layer_offset: int, expert_offset: int) -> str:
    """A parameter's name in the whole model, from its name on this rank (either specification)."""
    name = re.sub(r"^decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) + layer_offset}", local)
    name = re.sub(r"local_experts\.(\d+)", lambda match: f"local_experts.{int(match[1]) + expert_offset}", name)
    for fused, norm in _FUSED_NORMS.items():
        name = name.replace(fused, norm)
    return name


def _fill(template: str, numbers: dict[str, int]) -> str:
    for key, number in numbers.items():
        template = template.replace("{" + key + "}", str(number))
    return template
