"""The table of a checkpoint: every tensor of the Megatron model by its global name, from the family's rules."""

import re

from megasao.families import Rule
from megasao.families.names import carried_names, hf_names, optional_names, rules
from megasao.families.rules import LM_HEAD, VALUE_HEAD

__all__ = ["LM_HEAD", "VALUE_HEAD", "Rule", "carried_names", "global_name", "hf_names", "optional_names", "rules"]

# TransformerEngine fuses these norms into the linear layer that follows.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# With grouped products all experts of a rank are weights of one layer.
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)$")


def global_name(local: str, *, layer_offset: int, expert_offset: int) -> str:
    """A parameter's name in the whole model, from its name on this rank (either specification)."""
    name = re.sub(r"^decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) + layer_offset}", local)
    name = _GROUPED.sub(r"experts.local_experts.\2.\1.weight", name)
    name = re.sub(r"local_experts\.(\d+)", lambda match: f"local_experts.{int(match[1]) + expert_offset}", name)
    for fused, norm in _FUSED_NORMS.items():
        name = name.replace(fused, norm)
    return name
