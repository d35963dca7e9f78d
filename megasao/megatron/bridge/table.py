"""The table of a checkpoint: every tensor of the Megatron model by its global name, from the family's rules."""

import re
from typing import Any, Literal

from megasao.families import Rule, family_of
from megasao.families.rules import LM_HEAD, VALUE_HEAD

__all__ = ["LM_HEAD", "VALUE_HEAD", "Rule", "carried_names", "global_name", "hf_names", "optional_names", "rules"]

# TransformerEngine fuses these norms into the linear layer that follows.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def rules(hf_config: dict[str, Any], role: Literal["actor", "critic"]) -> dict[str, Rule]:
    """Every tensor of the whole model, by its global Megatron name."""
    return {rule.megatron: rule for rule in family_of(hf_config).rules(hf_config, role)}


def hf_names(hf_config: dict[str, Any], role: Literal["actor", "critic"]) -> set[str]:
    """Every tensor that an export of the model has."""
    return family_of(hf_config).hf_names(hf_config, role)


def carried_names(hf_config: dict[str, Any]) -> set[str]:
    """Tensors of the multi-token-prediction layers: carried from checkpoint to checkpoint, not part of the model."""
    return {name for rule in family_of(hf_config).mtp_rules(hf_config) for name in rule.hf}


def optional_names(hf_config: dict[str, Any]) -> set[str]:
    """Tensors that some checkpoints repeat inside those layers."""
    templates, first = family_of(hf_config).mtp_copies, hf_config["num_hidden_layers"]
    layers = {
        int(match[1]) for name in carried_names(hf_config) if (match := re.match(r"model\.layers\.(\d+)\.", name))
    }
    assert all(layer >= first for layer in layers)
    return {template.replace("{L}", str(layer)) for template in templates for layer in layers}


def global_name(local: str, *, layer_offset: int, expert_offset: int) -> str:
    """A parameter's name in the whole model, from its name on this rank (either specification)."""
    name = re.sub(r"^decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) + layer_offset}", local)
    name = re.sub(r"local_experts\.(\d+)", lambda match: f"local_experts.{int(match[1]) + expert_offset}", name)
    for fused, norm in _FUSED_NORMS.items():
        name = name.replace(fused, norm)
    return name
