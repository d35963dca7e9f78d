"""How Hugging Face and Megatron names correspond: a rule is one line, and the lines that several families share.

``{L}`` stands for the global layer number, ``{E}`` for the global expert number, both from 0.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megasao.families.sizes import (
    EXPERT,
    FEED_FORWARD,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    SHARED_EXPERTS,
    VOCABULARY,
    Shape,
    Size,
    constant,
)
from megasao.families.sizes import EXPERTS as EXPERT_COUNT

Kind = Literal["direct", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """One tensor of the Megatron model and the Hugging Face tensors it is made of.

    Attributes:
        megatron: Megatron's name (local specification), layers and experts numbered globally.
        hf: Hugging Face names, in merging order.
        shapes: the shape of each of those tensors.
        kind: how they are merged: ``direct`` is one tensor as it is, ``qkv`` interleaves per query group,
            ``gate_up`` concatenates.
        shard: dimension that tensor parallelism cuts, the same in each HF tensor; None is replicated.
        expert: the cut is expert-tensor parallel, and the owner is an expert-parallel rank.
        float32: kept in float32 whatever the model's dtype.
        vocabulary: rows are tokens: Megatron's tensor is padded until tensor parallelism divides it.
        copy: a second place of the same tensor; it is read there too and never exported from there.
        fp8: a checkpoint in FP8 has the HF tensors in blocks, each with a tensor of scales.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    kind: Kind = "direct"
    shard: int | None = None
    expert: bool = False
    float32: bool = False
    vocabulary: bool = False
    copy: bool = False
    fp8: bool = False

    def numbered(self, **numbers: int) -> "Rule":
        """Fill in ``{L}`` and ``{E}``."""
        return replace(self, megatron=_fill(self.megatron, numbers), hf=tuple(_fill(name, numbers) for name in self.hf))

    def inside(self, megatron: str) -> "Rule":
        """The same rule in another layer of Megatron's: the prefix of decoder layers becomes ``megatron``."""
        return replace(self, megatron=self.megatron.replace(M, megatron))


def _fill(template: str, numbers: dict[str, int]) -> str:
    for key, number in numbers.items():
        template = template.replace("{" + key + "}", str(number))
    return template


M, H = "decoder.layers.{L}.", "model.layers.{L}."

_NORM, _TOKENS = ((HIDDEN,),), ((VOCABULARY, HIDDEN),)
EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), _TOKENS, shard=0, vocabulary=True)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), _NORM)
LM_HEAD = Rule("output_layer.weight", ("lm_head.weight",), _TOKENS, shard=0, vocabulary=True)
TIED_HEAD = replace(LM_HEAD, hf=EMBEDDING.hf, copy=True)
VALUE_HEAD = (
    Rule("output_layer.weight", ("value_head.weight",), ((constant(1), HIDDEN),)),
    Rule("output_layer.bias", ("value_head.bias",), ((constant(1),),)),
)
LAYER_NORMS = (
    Rule(M + "input_layernorm.weight", (H + "input_layernorm.weight",), _NORM),
    Rule(M + "pre_mlp_layernorm.weight", (H + "post_attention_layernorm.weight",), _NORM),
)


def _qkv(what: str, *columns: Size) -> Rule:
    names = tuple(f"{H}self_attn.{part}_proj.{what}" for part in "qkv")
    shapes = tuple((rows, *columns) for rows in (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD))
    return Rule(f"{M}self_attention.linear_qkv.{what}", names, shapes, kind="qkv", shard=0, fp8=what == "weight")


def _feed_forward(megatron: str, hf: str, width: Size, *, expert: bool = False) -> tuple[Rule, ...]:
    both, up, down = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"), (width, HIDDEN), (HIDDEN, width)
    fc1, fc2 = f"{megatron}linear_fc1.weight", f"{megatron}linear_fc2.weight"
    return (
        Rule(fc1, both, (up, up), kind="gate_up", shard=0, expert=expert, fp8=True),
        Rule(fc2, (f"{hf}down_proj.weight",), (down,), shard=1, expert=expert, fp8=True),
    )


GROUPED_ATTENTION = (
    _qkv("weight", HIDDEN),
    Rule(
        M + "self_attention.linear_proj.weight",
        (H + "self_attn.o_proj.weight",),
        ((HIDDEN, HEADS * HEAD),),
        shard=1,
        fp8=True,
    ),
)
QKV_BIAS = (_qkv("bias"),)
QK_NORMS = (
    Rule(M + "self_attention.q_layernorm.weight", (H + "self_attn.q_norm.weight",), ((HEAD,),)),
    Rule(M + "self_attention.k_layernorm.weight", (H + "self_attn.k_norm.weight",), ((HEAD,),)),
)
DENSE = _feed_forward(M + "mlp.", H + "mlp.", FEED_FORWARD)
EXPERTS = (
    Rule(M + "mlp.router.weight", (H + "mlp.gate.weight",), ((EXPERT_COUNT, HIDDEN),)),
    *_feed_forward(M + "mlp.experts.local_experts.{E}.", H + "mlp.experts.{E}.", EXPERT, expert=True),
)
ROUTER_BIAS = (
    Rule(M + "mlp.router.expert_bias", (H + "mlp.gate.e_score_correction_bias",), ((EXPERT_COUNT,),), float32=True),
)
SHARED_EXPERT = _feed_forward(M + "mlp.shared_experts.", H + "mlp.shared_experts.", SHARED_EXPERTS * EXPERT)


def mtp_layer(number: int, layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A multi-token-prediction layer: two norms, a product that halves them, a decoder layer, and a final norm."""
    megatron = f"mtp.layers.{number}."
    return (
        Rule(megatron + "enorm.weight", (H + "enorm.weight",), _NORM),
        Rule(megatron + "hnorm.weight", (H + "hnorm.weight",), _NORM),
        Rule(megatron + "eh_proj.weight", (H + "eh_proj.weight",), ((HIDDEN, constant(2) * HIDDEN),), shard=0),
        Rule(megatron + "final_layernorm.weight", (H + "shared_head.norm.weight",), _NORM),
        *(rule.inside(megatron + "transformer_layer.") for rule in layer),
    )
