"""What config.json means, the published numbers of tensors, and small twins; no torch."""

import json
import math
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from megasao.config.load import load_config
from megasao.families import families, family_of
from megasao.families.facts import (
    EXPERT_KEYS,
    expert_count,
    expert_key,
    indexer_layers,
    is_moe_layer,
    rope,
    stage_problem,
)
from megasao.families.names import fp8_names
from megasao.families.shrink import shrink
from megasao.families.sizes import dimensions

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = sorted(path.stem for path in (CONFIGS / "models").glob("*.json"))
RUNS = {
    "glm_5_2_750b": "glm_5_2",
    "glm_4_7_355b": "glm_4_7",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
    "qwen3_4b": "qwen3_4b",
    "llama_3_2_3b": "llama_3_2_3b",
}


def architecture(name: str, directory: str = "models") -> dict[str, Any]:
    hf_config: dict[str, Any] = json.loads((CONFIGS / directory / f"{name}.json").read_text())
    return hf_config


def names(hf_config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Tensors of the model and of multi-token prediction, each as often as a rule has it."""
    family = family_of(hf_config)
    own = [name for rule in family.rules(hf_config, "actor") if not rule.copy for name in rule.hf]
    return own, [name for rule in family.mtp_rules(hf_config) for name in rule.hf]


def test_glm_5_2_has_the_published_tensors() -> None:
    own, carried = names(architecture("glm_5_2"))
    assert len(own) == len(set(own)) == 58_794
    assert len(carried) == len(set(carried)) == 791
    assert not set(own) & set(carried)


def test_glm_5_2_has_the_published_tensors_in_fp8() -> None:
    hf_config = architecture("glm_5_2")
    own, carried = names(hf_config)
    quantized = fp8_names(hf_config)
    assert quantized <= {*own, *carried}
    assert len(own) + len(carried) + len(quantized) == 118_629
    for part in ("kv_a_proj_with_mqa", "indexer.wk.", "shared_experts"):
        assert any(part in name for name in quantized)
    assert not any("weights_proj" in name or "eh_proj" in name for name in quantized)


def test_glm_5_2_selects_where_it_should() -> None:
    hf_config = architecture("glm_5_2")
    indexers = indexer_layers(hf_config)
    assert [layer + 1 for layer in indexers] == [1, 2, 3, *range(7, 76, 4)]
    assert (len(indexers), 78 - len(indexers)) == (21, 57)
    assert [layer for layer in range(78) if not is_moe_layer(hf_config, layer)] == [0, 1, 2]
    for start, good in ((14, True), (22, True), (13, False), (10, True), (39, False)):
        assert (stage_problem(hf_config, range(start, start + 4)) is None) == good, start


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"]}, [0, 2]),
        ({"index_topk_pattern": "FSFS"}, [0, 2]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2]),
        ({"index_topk_freq": 2}, [0, 1, 3]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_spellings_of_the_sharing_pattern(spelling: dict[str, Any], expected: list[int]) -> None:
    assert indexer_layers({"num_hidden_layers": 4, **spelling}) == expected


def test_rotary_settings_are_found_in_every_spelling() -> None:
    nested = rope({"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}})
    flat = rope({"rope_theta": 5.0, "partial_rotary_factor": 0.5})
    scaled = rope({"rope_theta": 5.0, "rope_scaling": {"type": "llama3", "factor": 8.0}})
    assert (nested.theta, nested.fraction) == (flat.theta, flat.fraction) == (5.0, 0.5)
    assert (scaled.kind, scaled.theta, nested.kind) == ("llama3", 5.0, "default")


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("glm_4_7", {"model_type": "gpt2"}, "'gpt2' is not supported; expected 'glm4_moe'"),
        ("glm_4_7", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("glm_4_7", {"n_shared_experts": None}, "n_shared_experts = None"),
        ("glm_4_7", {"n_shared_experts": 0}, "n_shared_experts = 0; .* a model without is not supported"),
        ("glm_5_2", {"q_lora_rank": None}, "q_lora_rank = None; expected a whole .* a model without is not supported"),
        ("glm_5_2", {"attention_bias": True}, "attention_bias = True"),
        ("glm_5_2", {"indexer_types": ["shared"] * 78}, "first layer must have an indexer"),
        ("glm_5_2", {"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ("llama_3_2_3b", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama_3_2_3b", {"num_hidden_layers": True}, "num_hidden_layers = True; expected a whole number above 0"),
        ("llama_3_2_3b", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; expected a whole"),
        ("llama_3_2_3b", {"num_key_value_heads": 7}, "num_attention_heads = 24 is not a multiple of num_key_value_h"),
        ("llama_3_2_3b", {"head_dim": None, "hidden_size": 3073}, "is not a multiple of num_attention_heads = 24, and"),
        ("llama_3_2_3b", {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'; expected true or false"),
        ("llama_3_2_3b", {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5'; expected a number above 0"),
        ("qwen3_4b", {"rope_theta": float("inf"), "rope_parameters": None}, "rope_theta = inf and"),
        ("glm_4_7", {"partial_rotary_factor": 2, "rope_parameters": None}, "partial_rotary_factor = 2.0; expected"),
        ("qwen3_30b_a3b", {"num_experts": 10**9}, "num_experts = 1000000000; expected a whole number up to"),
        ("qwen3_30b_a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok = 129, of 128 experts"),
        ("glm_4_7", {"n_group": 3, "topk_group": 1}, "n_group = 3 and topk_group = 1; expected groups of equal size"),
        ("glm_4_7", {"n_group": 4, "topk_group": 5}, "n_group = 4 and topk_group = 5"),
        ("glm_4_7", {"n_group": 4, "topk_group": None}, "n_group = 4 and topk_group = 0"),
        ("glm_4_7", {"n_group": "2"}, "n_group = '2'; expected a whole number"),
        ("glm_4_7", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 with norm_topk_prob = true"),
        ("glm_5_2", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 with norm_topk_prob = true"),
        ("qwen3_30b_a3b", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 with norm_topk_prob = true"),
        ("glm_4_7", {"n_group": 8, "topk_group": 8}, "num_experts_per_tok = 8 and topk_group = 8 of n_group = 8"),
        ("glm_4_7", {"n_group": 8, "topk_group": 2}, "num_experts_per_tok = 8 and topk_group = 2 of n_group = 8"),
        ("glm_4_7", {"n_group": 80, "topk_group": 3}, "num_experts_per_tok = 8 and topk_group = 3 of n_group = 80"),
        ("glm_4_7", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers = 1000000000"),
        ("qwen3_4b", {"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
    ],
)
def test_what_a_family_does_not_support_is_refused(model: str, change: dict[str, Any], message: str) -> None:
    hf_config = architecture(model)
    family_of(hf_config).check(hf_config)
    with pytest.raises(ValueError, match=message):
        family_of(hf_config | change).check(hf_config | change)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("glm_4_7", {"n_group": 8, "topk_group": 4}),
        ("glm_4_7", {"n_group": 40, "topk_group": 3}),
        ("qwen3_30b_a3b", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ],
)
def test_a_router_that_megatron_has_too_is_accepted(model: str, change: dict[str, Any]) -> None:
    hf_config = architecture(model) | change
    family_of(hf_config).check(hf_config)


@pytest.mark.parametrize("model", MODELS)
def test_an_absurd_count_is_refused_before_anything_is_counted(model: str) -> None:
    """Of every field that is a whole number; what is let through has as many tensors, of sizes that torch can have."""
    hf_config = shrink(architecture(model))
    integers = [key for key, value in hf_config.items() if type(value) is int and key != "rope_theta"]
    let_through = set[str]()
    for key in (*integers, *EXPERT_KEYS, "num_mtp_layers"):
        for value in (10**5, 10**6, 10**9, 10**18):
            absurd = hf_config | {key: value}
            try:
                family_of(absurd).check(absurd)
            except ValueError as error:
                assert f"{key} = {value}" in str(error) and "expected" in str(error), error
            else:
                let_through.add(key)
                assert countable(absurd, 1000), (key, value)
    assert let_through <= {
        key
        for key in integers
        if key.endswith(("_size", "_dim", "_rank", "_embeddings", "_topk", "heads", "n_shared_experts"))
    }
    without_end = "num_hidden_layers" if family_of(hf_config).mtp is None else "num_nextn_predict_layers"
    assert not countable(hf_config | {without_end: 10**9}, 1000), "negative control: what is refused goes on for hours"


def countable(hf_config: dict[str, Any], most: int) -> bool:
    """Whether it has so many rules of tensors, each with a number of elements that torch can have."""
    family = family_of(hf_config)
    rules = list(islice(chain(family.rules(hf_config, "actor"), family.mtp_rules(hf_config)), most + 1))
    shapes = {shape for rule in rules for shape in rule.shapes}
    return len(rules) <= most and all(math.prod(dimensions(shape, hf_config)) < 2**63 for shape in shapes)


@pytest.mark.parametrize("model", MODELS)
def test_bounds_hold_for_all_fields_together(model: str) -> None:
    """Every size as large as it may be; then one layer, expert or number more."""
    hf_config = shrink(architecture(model))
    sizes = {key for key in hf_config if key.endswith(("_size", "_rank", "_heads", "_dim"))} - {"head_dim"}
    largest = hf_config | dict.fromkeys(sizes, 10**6) | {"head_dim": 10_000}
    family_of(largest).check(largest)
    assert countable(largest, 1000)
    experts = expert_count(hf_config)
    deep = {"mlp_layer_types": None, "indexer_types": None, "num_nextn_predict_layers": 0}
    deep |= {"num_hidden_layers": 1000, **({expert_key(hf_config): 100} if experts else {})}
    family_of(hf_config).check(hf_config | deep)
    more: list[dict[str, Any]] = [
        {"num_hidden_layers": 1001},
        {"num_nextn_predict_layers": 1},
        {"hidden_size": 10**6 + 1},
    ]
    for change in (*more, *([{expert_key(hf_config): 101}] if experts else [])):
        [(key, value)] = change.items()
        with pytest.raises(ValueError, match=f"{key} = {value}.*expected"):
            family_of(hf_config).check(hf_config | deep | change)


def test_every_family_has_a_model_and_every_model_a_twin() -> None:
    assert {architecture(model)["model_type"] for model in MODELS} == set(families())
    for model in MODELS:
        twin = shrink(architecture(model))
        assert architecture(model, "integration") == twin, (
            f"make it again: tools/shrink_config.py configs/models/{model}.json"
        )
        family_of(twin).check(twin)


@pytest.mark.parametrize("model", MODELS)
def test_a_twin_keeps_the_structure(model: str) -> None:
    large, small = architecture(model), shrink(architecture(model))
    for key in (
        "model_type",
        "tie_word_embeddings",
        "attention_bias",
        "use_qk_norm",
        "first_k_dense_replace",
        "n_group",
    ):
        assert large.get(key) == small.get(key), key

    def steps(hf_config: dict[str, Any]) -> set[Any]:
        indexers = indexer_layers(hf_config) if "index_topk" in hf_config else []
        kinds = [(is_moe_layer(hf_config, n), n in indexers) for n in range(hf_config["num_hidden_layers"])]
        return set(pairwise(kinds))

    def rule_kinds(hf_config: dict[str, Any]) -> set[str]:
        rules = [*family_of(hf_config).rules(hf_config, "actor"), *family_of(hf_config).mtp_rules(hf_config)]
        return {".".join(part for part in rule.megatron.split(".") if not part.isdigit()) for rule in rules}

    assert steps(large) == steps(small)
    assert rule_kinds(large) == rule_kinds(small)
    ratio = large["num_attention_heads"] / large["num_key_value_heads"]
    assert small["num_attention_heads"] / small["num_key_value_heads"] == ratio
    assert small["num_hidden_layers"] <= 8 and small["hidden_size"] <= 64


@pytest.mark.parametrize("run", RUNS)
def test_shipped_configs_load(run: str) -> None:
    for path, directory in (
        (CONFIGS / f"{run}.yaml", "models"),
        (CONFIGS / "integration" / f"{run}.yaml", "integration"),
    ):
        config = load_config(path)
        assert config.model.architecture == f"configs/{directory}/{RUNS[run]}.json"
    assert {path.stem for path in (CONFIGS / "integration").glob("*.yaml")} == RUNS.keys()
