"""The names and shapes that the tensors of a checkpoint of a model have, from its family's rules."""

import difflib
import re
from collections.abc import Iterable
from typing import Any, Literal

from megasao.families import Rule, family_of
from megasao.families.facts import expert_count
from megasao.families.rules import LM_HEAD, VALUE_HEAD
from megasao.families.sizes import Shape, dimensions, explanation

Role = Literal["actor", "critic"]
SCALE = "_scale_inv"
"""What follows the name of a weight in blocks of FP8, for the tensor of its scales."""


def rules(hf_config: dict[str, Any], role: Role) -> dict[str, Rule]:
    """Every tensor of the whole model, by its global Megatron name."""
    return {rule.megatron: rule for rule in family_of(hf_config).rules(hf_config, role)}


def hf_names(hf_config: dict[str, Any], role: Role) -> set[str]:
    """Every tensor that an export of the model has."""
    return {name for rule in rules(hf_config, role).values() for name in rule.hf}


def carried_names(hf_config: dict[str, Any]) -> set[str]:
    """Tensors of the multi-token-prediction layers: carried from checkpoint to checkpoint, not part of the model."""
    return {name for rule in family_of(hf_config).mtp_rules(hf_config) for name in rule.hf}


def optional_names(hf_config: dict[str, Any]) -> set[str]:
    """Tensors that some checkpoints repeat inside those layers."""
    return set(_copies(hf_config))


def _copies(hf_config: dict[str, Any]) -> dict[str, Rule]:
    templates, first = family_of(hf_config).mtp_copies, hf_config["num_hidden_layers"]
    layers = {
        int(match[1]) for name in carried_names(hf_config) if (match := re.match(r"model\.layers\.(\d+)\.", name))
    }
    assert all(layer >= first for layer in layers)
    return {template.replace("{L}", str(layer)): rule for template, rule in templates.items() for layer in layers}


def value_head_names() -> set[str]:
    """What a critic has for a language-model head."""
    return {name for rule in VALUE_HEAD for name in rule.hf}


def fp8_names(hf_config: dict[str, Any]) -> set[str]:
    """Weights that a checkpoint in FP8 has in blocks, those of multi-token prediction too."""
    family = family_of(hf_config)
    every = (*family.rules(hf_config, "actor"), *family.mtp_rules(hf_config))
    return {name for rule in every if rule.fp8 for name in rule.hf}


def published_names(hf_config: dict[str, Any], role: Role, *, fp8: bool) -> set[str]:
    """Every tensor of a version of the weights; with ``fp8`` the products are in blocks, and have scales."""
    names = hf_names(hf_config, role)
    return names | {name + SCALE for name in names & fp8_names(hf_config)} if fp8 else names


def name_problem(hf_config: dict[str, Any], role: Role, found: set[str]) -> str | None:
    """Why a checkpoint with the tensors ``found`` is not one of the model; None if it is.

    A critic ignores ``lm_head``, and may have its value head or not. Layers of multi-token prediction are whole or
    absent.
    """
    layers, experts = hf_config["num_hidden_layers"], expert_count(hf_config)
    if max(layers, experts) > len(found):
        return f"has {len(found)} tensors, and num_hidden_layers = {layers} with {experts} experts each need more"
    expected, carried = hf_names(hf_config, role), carried_names(hf_config)
    if role == "critic":
        expected -= value_head_names()
    if carried & found:
        expected |= carried
    tolerated = optional_names(hf_config) | (value_head_names() if role == "critic" else set())
    if role == "critic" or hf_config.get("tie_word_embeddings"):
        tolerated |= set(LM_HEAD.hf)
    missing, extra = sorted(expected - found), sorted(found - expected - tolerated)
    if missing:
        return f"lacks {len(missing)} tensor(s), first {missing[0]}{_nearest(missing[0], extra or found)}"
    if extra:
        return f"has {len(extra)} unknown tensor(s), first {extra[0]}{_nearest(extra[0], expected)}"
    return None


def shapes(hf_config: dict[str, Any]) -> dict[str, Shape]:
    """The shape of every tensor that a checkpoint of the model may have, an actor's or a critic's, without scales."""
    family = family_of(hf_config)
    every = (*family.rules(hf_config, "actor"), LM_HEAD, *VALUE_HEAD, *family.mtp_rules(hf_config))
    found = {name: shape for rule in every for name, shape in zip(rule.hf, rule.shapes, strict=True)}
    return found | {name: rule.shapes[0] for name, rule in _copies(hf_config).items()}


def shape_problem(hf_config: dict[str, Any], found: Iterable[tuple[str, tuple[int, ...]]]) -> str | None:
    """The first tensor of ``found`` (a name may come again) whose shape is not what config.json says; None if all are.

    Names that the model does not have are left out.
    """
    expected = shapes(hf_config)
    for name, shape in found:
        if name in expected and shape != (right := dimensions(expected[name], hf_config)):
            why = explanation(expected[name], hf_config)
            return f"has {name} of shape {shape}; expected {right} by its config.json: {why}"
    return None


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (nearest: {close[0]})" if close else ""
