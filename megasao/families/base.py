"""What a family is made of."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megasao.families.checks import check_counts, check_experts, check_heads, check_kinds, check_layers, check_rope
from megasao.families.facts import HfConfig, expert_count, indexer_layers, is_moe_layer, mtp_layers
from megasao.families.rules import EMBEDDING, FINAL_NORM, LM_HEAD, TIED_HEAD, VALUE_HEAD, Rule


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        megatron: fields of Megatron's TransformerConfig that are the family's own, from config.json; plain values.
        layer: the rules of one decoder layer (from 0).
        attention: ``grouped`` is queries, keys and values from one product; ``sparse_latent`` is multi-head latent
            attention on the keys that an indexer selects.
        allowed: supported values of settings in config.json; None stands for a setting that is not written.
        sizes: further whole numbers above 0 that config.json must have.
        defaults: what transformers takes for a setting that is not written, where that is not what is meant here by
            its absence.
        nulls: settings that may be null, and the one whose value they have then.
        rope_types: supported kinds of rotary embedding.
        mtp: the rules of one multi-token-prediction layer, whose number counts on after the decoder's; None is a
            family without. Such tensors are carried from checkpoint to checkpoint and not trained.
        mtp_copies: tensors of an MTP layer that some checkpoints repeat from the model, and the rule of what they
            repeat; ``{L}`` is the layer.
    """

    megatron: Callable[[HfConfig], dict[str, Any]]
    layer: Callable[[HfConfig, int], tuple[Rule, ...]]
    attention: Literal["grouped", "sparse_latent"] = "grouped"
    allowed: Mapping[str, tuple[Any, ...]] | None = None
    sizes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nulls: Mapping[str, str] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default",)
    mtp: Callable[[HfConfig, int], tuple[Rule, ...]] | None = None
    mtp_copies: Mapping[str, Rule] = field(default_factory=dict)

    def completed(self, hf_config: HfConfig) -> HfConfig:
        """config.json with the settings that it leaves out and transformers has a default for."""
        full = {"hidden_act": "silu", **self.defaults, **hf_config}
        return full | {key: full.get(other) for key, other in self.nulls.items() if full.get(key) is None}

    def check(self, hf_config: HfConfig) -> None:
        """ValueError if config.json asks for something that is not supported, or lacks a size."""
        allowed = {"hidden_act": ("silu",), **(self.allowed or {})}
        for key, values in allowed.items():
            if hf_config.get(key) not in values:
                expected = " or ".join(map(repr, values))
                raise ValueError(f"{key} = {hf_config.get(key)!r} is not supported; expected {expected}")
        check_rope(hf_config, self.rope_types)
        check_kinds(hf_config)
        check_counts(hf_config, self.sizes)
        check_experts(hf_config)
        check_heads(hf_config, derived=self.attention == "grouped" and not hf_config.get("head_dim"))
        check_layers(hf_config)
        if self.attention == "sparse_latent" and 0 not in indexer_layers(hf_config):
            raise ValueError("the first layer must have an indexer of its own: there is none before it to share")

    def rules(self, hf_config: HfConfig, role: Literal["actor", "critic"]) -> Iterator[Rule]:
        """Every tensor of the whole Megatron model; a critic has a value head for the language-model head."""
        yield EMBEDDING
        for layer in range(hf_config["num_hidden_layers"]):
            yield from expand(self.layer(hf_config, layer), layer, expert_count(hf_config))
        yield FINAL_NORM
        if role == "critic":
            yield from VALUE_HEAD
        else:
            yield TIED_HEAD if hf_config.get("tie_word_embeddings", False) else LM_HEAD

    def mtp_rules(self, hf_config: HfConfig) -> Iterator[Rule]:
        """Every tensor of the multi-token-prediction layers that config.json announces."""
        for number in range(mtp_layers(hf_config) if self.mtp is not None else 0):
            assert self.mtp is not None
            layer = hf_config["num_hidden_layers"] + number
            yield from expand(self.mtp(hf_config, number), layer, expert_count(hf_config))


def expand(templates: tuple[Rule, ...], layer: int, experts: int) -> Iterator[Rule]:
    """Rules of one layer with their numbers filled in; an expert's rule once for each expert."""
    for template in templates:
        if template.expert:
            yield from (template.numbered(L=layer, E=expert) for expert in range(experts))
        else:
            yield template.numbered(L=layer)


def feed_forward_kind(hf_config: HfConfig, layer: int) -> Literal["dense", "moe"]:
    """What ``layer`` (from 0) has after its attention."""
    return "moe" if is_moe_layer(hf_config, layer) else "dense"
