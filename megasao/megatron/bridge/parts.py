"""Merging Hugging Face tensors into one Megatron tensor, and taking it apart again; bit-exact both ways.

Both directions work on a whole tensor or on one tensor-parallel shard: each HF tensor is cut evenly along the rule's
dimension, and the shard of the merged tensor is the merge of the shards.
"""

from typing import Any

import torch
from torch import Tensor

from megasao.families import Rule
from megasao.families.facts import head_dim


def merge(rule: Rule, parts: list[Tensor], hf_config: dict[str, Any]) -> Tensor:
    """One Megatron tensor from the rule's HF tensors (whole, or all of one shard).

    Raises:
        ValueError: the shapes do not fit together; the message names the tensors.
    """
    if rule.kind == "direct":
        return parts[0]
    try:
        if rule.kind == "gate_up":
            return torch.cat(parts)
        groups = parts[1].shape[0] // head_dim(hf_config)
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in zip(rule.hf, parts, strict=True))
        raise ValueError(f"{shapes} do not fit together as {rule.kind}; the checkpoint is not of this model") from error


def split(rule: Rule, tensor: Tensor, hf_config: dict[str, Any]) -> list[Tensor]:
    """The rule's HF tensors from one Megatron tensor (whole, or one shard): the inverse of :func:`merge`."""
    parts = split_views(rule, tensor, hf_config)
    return [part.flatten(0, 1) for part in parts] if rule.kind == "qkv" else parts


def split_views(rule: Rule, tensor: Tensor, hf_config: dict[str, Any]) -> list[Tensor]:
    """As :func:`split`, without a copy; of qkv, whose rows are interleaved, as [groups, rows of a group, ...]."""
    if rule.kind == "direct":
        return [tensor]
    if rule.kind == "gate_up":
        return list(tensor.chunk(2))
    width = head_dim(hf_config)
    queries = hf_config["num_attention_heads"] // hf_config["num_key_value_heads"]
    groups = tensor.shape[0] // ((queries + 2) * width)
    return list(tensor.unflatten(0, (groups, -1)).split([queries * width, width, width], dim=1))


def part_rows(rule: Rule, rows: int, hf_config: dict[str, Any]) -> list[int]:
    """Rows of each of the rule's HF tensors, of a Megatron tensor (whole, or one shard) of ``rows``."""
    return [len(part) for part in split(rule, torch.arange(rows), hf_config)]
