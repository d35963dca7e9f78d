"""How Hugging Face and Megatron names correspond: a rule is one line, and the lines that several families share.

``{L}`` stands for the global layer number, ``{E}`` for the global expert number, both from 0.
"""

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["direct", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """One tensor of the Megatron model and the Hugging Face tensors it is made of.

    Attributes:
        megatron: Megatron's name (local specification), layers and experts numbered globally.
        hf: Hugging Face names, in merging order.
        kind: how they are merged: ``direct`` is one tensor as it is, ``qkv`` interleaves per query group,
            ``gate_up`` concatenates.
        shard: dimension that tensor parallelism cuts, the same in each HF tensor; None is replicated.
        expert: the cut is expert-tensor parallel, and the owner is an expert-parallel rank.
        float32: kept in float32 whatever the model's dtype.
        vocabulary: rows are tokens: Megatron's tensor is padded until tensor parallelism divides it.
        copy: a second place of the same tensor; it is read there too and never exported from there.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind = "direct"
    shard: int | None = None
    expert: bool = False
    float32: bool = False
    vocabulary: bool = False
    copy: bool = False

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

EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), shard=0, vocabulary=True)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
LM_HEAD = Rule("output_layer.weight", ("lm_head.weight",), shard=0, vocabulary=True)
TIED_HEAD = replace(LM_HEAD, hf=EMBEDDING.hf, copy=True)
VALUE_HEAD = (
    Rule("output_layer.weight", ("value_head.weight",)),
    Rule("output_layer.bias", ("value_head.bias",)),
)
LAYER_NORMS = (
    Rule(M + "input_layernorm.weight", (H + "input_layernorm.weight",)),
    Rule(M + "pre_mlp_layernorm.weight", (H + "post_attention_layernorm.weight",)),
)


def _qkv(what: str) -> Rule:
    names = tuple(f"{H}self_attn.{part}_proj.{what}" for part in "qkv")
    return Rule(f"{M}self_attention.linear_qkv.{what}", names, kind="qkv", shard=0)


def _gate_up(megatron: str, hf: str, *, expert: bool = False) -> Rule:
    names = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
    return Rule(f"{megatron}linear_fc1.weight", names, kind="gate_up", shard=0, expert=expert)


def _down(megatron: str, hf: str, *, expert: bool = False) -> Rule:
    return Rule(f"{megatron}linear_fc2.weight", (f"{hf}down_proj.weight",), shard=1, expert=expert)


GROUPED_ATTENTION = (
    _qkv("weight"),
    Rule(M + "self_attention.linear_proj.weight", (H + "self_attn.o_proj.weight",), shard=1),
)
QKV_BIAS = (_qkv("bias"),)
QK_NORMS = (
    Rule(M + "self_attention.q_layernorm.weight", (H + "self_attn.q_norm.weight",)),
    Rule(M + "self_attention.k_layernorm.weight", (H + "self_attn.k_norm.weight",)),
)
DENSE = (_gate_up(M + "mlp.", H + "mlp."), _down(M + "mlp.", H + "mlp."))
_ME, _HE = M + "mlp.experts.local_experts.{E}.", H + "mlp.experts.{E}."
EXPERTS = (
    Rule(M + "mlp.router.weight", (H + "mlp.gate.weight",)),
    _gate_up(_ME, _HE, expert=True),
    _down(_ME, _HE, expert=True),
)
ROUTER_BIAS = (Rule(M + "mlp.router.expert_bias", (H + "mlp.gate.e_score_correction_bias",), float32=True),)
SHARED_EXPERT = (
    _gate_up(M + "mlp.shared_experts.", H + "mlp.shared_experts."),
    _down(M + "mlp.shared_experts.", H + "mlp.shared_experts."),
)


def mtp_layer(number: int, layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A multi-token-prediction layer: two norms, a product that halves them, a decoder layer, and a final norm."""
    megatron = f"mtp.layers.{number}."
    return (
        Rule(megatron + "enorm.weight", (H + "enorm.weight",)),
        Rule(megatron + "hnorm.weight", (H + "hnorm.weight",)),
        Rule(megatron + "eh_proj.weight", (H + "eh_proj.weight",), shard=0),
        Rule(megatron + "final_layernorm.weight", (H + "shared_head.norm.weight",)),
        *(rule.inside(megatron + "transformer_layer.") for rule in layer),
    )
