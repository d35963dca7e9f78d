"""The shape of every tensor, as config.json gives it, against the models that transformers builds of the same."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from megasao.families import families, family_of
from megasao.families.facts import EXPERT_KEYS, expert_count, indexer_layers, is_moe_layer, rope
from megasao.families.names import carried_names, hf_names, optional_names, shape_problem, shapes
from megasao.families.sizes import dimensions, explanation
from tests.megatron.tiny_families import ROPE, SETTINGS

MODELS = Path(__file__).parents[2] / "configs" / "models"
ODD: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 48,
    "intermediate_size": 58,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "num_hidden_layers": 4,
}
"""No two sizes, nor their usual products, are the same: what is taken for another shows."""
ODD_EXPERTS = {"moe_intermediate_size": 26, "num_experts_per_tok": 2}
ODD_SIGMOID = {**ODD_EXPERTS, "n_routed_experts": 5, "n_shared_experts": 3, "first_k_dense_replace": 2}
ODD_LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 22,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 7,
    "index_head_dim": 20,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 1,
    "head_dim": 8,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in SETTINGS},
    "llama odd": ("llama", {**ODD, "tie_word_embeddings": False}),
    "llama without head_dim": ("llama", {**ODD, "head_dim": None}),
    "llama, a group a head": ("llama", {**ODD, "num_key_value_heads": 6}),
    "llama, one group": ("llama", {**ODD, "num_key_value_heads": 1}),
    "qwen3 odd": ("qwen3", ODD),
    "qwen3 untied": ("qwen3", {**ODD, "tie_word_embeddings": False}),
    "qwen3_moe odd": ("qwen3_moe", {**ODD, **ODD_EXPERTS, "num_experts": 5, "mlp_only_layers": [0, 2]}),
    "qwen3_moe, every second": ("qwen3_moe", {**ODD, **ODD_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": []}),
    "glm4_moe odd": ("glm4_moe", {**ODD, **ODD_SIGMOID}),
    "glm4_moe, no bias, no norms": (
        "glm4_moe",
        {**ODD, **ODD_SIGMOID, "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0},
    ),
    "glm_moe_dsa odd": ("glm_moe_dsa", {**ODD, **ODD_SIGMOID, **ODD_LATENT}),
    "glm_moe_dsa, one shared": (
        "glm_moe_dsa",
        {**ODD, **ODD_SIGMOID, **ODD_LATENT, "n_shared_experts": 1, "num_hidden_layers": 6},
    ),
}


def built(hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint of what transformers builds, whose experts are two tensors a layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: deepcopy(value) for key, value in hf_config.items() if value is not None}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    return dict(each for name, shape in found.items() for each in apart(name, shape))


def apart(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    layer, of_experts, what = name.partition(".experts.")
    if not of_experts:
        yield name, shape
        return
    experts, rows, columns = shape
    for expert in range(experts):
        where = f"{layer}.experts.{expert}."
        if what == "gate_up_proj":
            yield from ((f"{where}{half}_proj.weight", (rows // 2, columns)) for half in ("gate", "up"))
        else:
            yield f"{where}{what}.weight", (rows, columns)


def expected(hf_config: dict[str, Any], names: set[str]) -> dict[str, tuple[int, ...]]:
    return {name: dimensions(shape, hf_config) for name, shape in shapes(hf_config).items() if name in names}


def config_of(case: str) -> dict[str, Any]:
    family, changes = CASES[case]
    return {"model_type": family, **SETTINGS[family], **changes}


@pytest.mark.parametrize("case", CASES)
def test_every_shape_is_what_transformers_builds(case: str) -> None:
    hf_config = config_of(case)
    assert built(hf_config) == expected(hf_config, hf_names(hf_config, "actor"))


def meaning(hf_config: dict[str, Any]) -> dict[str, Any]:
    """All that follows from a config.json."""
    family, layers = family_of(hf_config), range(hf_config["num_hidden_layers"])
    turned = rope(hf_config)
    return {
        **family.megatron(hf_config),
        **{key: hf_config.get(key) for key in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings")},
        "rope": (turned.kind, turned.theta, turned.fraction),
        "layers": [is_moe_layer(hf_config, layer) for layer in layers],
        "indexers": indexer_layers(hf_config) if family.attention == "sparse_latent" else [],
        "shapes": expected(hf_config, hf_names(hf_config, "actor")),
    }


@pytest.mark.parametrize("family", families())
def test_what_is_not_written_means_what_it_means_to_transformers(family: str) -> None:
    """Of every setting, one at a time: as if what transformers takes for it were written, or else it is refused."""
    from transformers import AutoConfig

    own = family_of({"model_type": family})
    written = {**SETTINGS[family], "num_attention_heads": 64, "num_key_value_heads": 64, "hidden_act": "silu"}
    taken = set[str]()
    for key in {*written, *own.defaults} - {"num_experts"}:  # without it a model is dense here, and refused by names
        rest = {name: value for name, value in written.items() if name != key}
        if key == "partial_rotary_factor":
            rest["rope_parameters"] = ROPE
        bare = {"model_type": family, **rest}
        hf_config = own.completed(bare)
        try:
            own.check(hf_config)
        except ValueError as error:
            refusal = f"{key} is missing; expected a whole number above 0"
            assert (refusal if key != "topk_group" else "n_group = 2 and topk_group = 0; expected") in str(error)
            continue
        taken.add(key)
        theirs = AutoConfig.for_model(family, **deepcopy(rest))  # it writes into what it is given
        full = {**hf_config, "rope_parameters": theirs.rope_parameters}
        full |= {key: getattr(theirs, key)} if hasattr(theirs, key) else {}
        assert meaning(hf_config) == meaning(full), key
        if key in own.defaults:
            with pytest.raises((AssertionError, KeyError, ValueError)):  # control: as it is without the default
                own.check(bare)
                assert meaning(bare) == meaning(full)
    assert {"num_key_value_heads", "rms_norm_eps", "hidden_act", *own.defaults} <= taken


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_null_groups_are_one_for_each_head(family: str) -> None:
    from transformers import AutoConfig

    own, written = family_of({"model_type": family}), {**SETTINGS[family], "num_key_value_heads": None}
    hf_config = own.completed({"model_type": family, **written})
    own.check(hf_config)
    assert (
        hf_config["num_key_value_heads"] == AutoConfig.for_model(family, **deepcopy(written)).num_key_value_heads == 4
    )


@pytest.mark.parametrize("model", sorted(path.stem for path in MODELS.glob("*.json")))
def test_published_models_have_the_shapes_that_transformers_builds(model: str) -> None:
    hf_config = json.loads((MODELS / f"{model}.json").read_text())
    assert built(hf_config) == expected(hf_config, hf_names(hf_config, "actor"))


@pytest.mark.parametrize(
    ("model", "own", "carried"),
    [
        ("glm_5_2", 743_377_000_704, 9_952_920_320),
        ("glm_4_7", 352_797_814_784, 3_988_069_632),
        ("qwen3_30b_a3b", 30_532_122_624, 0),
        ("qwen3_4b", 4_022_468_096, 0),
        ("llama_3_2_3b", 3_212_749_824, 0),
    ],
)
def test_published_numbers_of_parameters(model: str, own: int, carried: int) -> None:
    hf_config = json.loads((MODELS / f"{model}.json").read_text())
    # A router's bias is a buffer, and not counted as parameters.
    trained = {name for name in hf_names(hf_config, "actor") if "e_score" not in name}
    prediction = {name for name in carried_names(hf_config) if "e_score" not in name}
    for names, count in ((trained, own), (prediction, carried)):
        assert sum(map(math.prod, expected(hf_config, names).values())) == count


def test_a_layer_of_multi_token_prediction_is_shaped_as_a_decoder_layer() -> None:
    for case in ("glm4_moe odd", "glm_moe_dsa odd"):
        hf_config = config_of(case)
        hidden, layer = hf_config["hidden_size"], f"model.layers.{hf_config['num_hidden_layers']}."
        found = {
            name.removeprefix(layer): shape for name, shape in expected(hf_config, carried_names(hf_config)).items()
        }
        assert found.pop("eh_proj.weight") == (hidden, 2 * hidden)
        assert {found.pop(f"{norm}.weight") for norm in ("enorm", "hnorm", "shared_head.norm")} == {(hidden,)}
        own = built(hf_config)
        for name, shape in found.items():
            same = [own[other] for number in (3, 2) if (other := f"model.layers.{number}.{name}") in own]
            assert same[0] == shape, name
        copies = expected(hf_config, optional_names(hf_config))
        assert len(copies) == 2 and set(copies.values()) == {(hf_config["vocab_size"], hidden)}


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("odd")])
def test_a_dimension_that_is_wrong_in_every_layer_is_refused(case: str) -> None:
    """Each dimension of each tensor, one larger in every layer and expert: so no tensor differs from its like."""
    hf_config = config_of(case)
    right = {name: dimensions(shape, hf_config) for name, shape in shapes(hf_config).items()}
    assert shape_problem(hf_config, right.items()) is None
    alike = defaultdict[str, list[str]](list)
    for name in right:
        alike[re.sub(r"\.\d+\.", ".N.", name)].append(name)
    for names in alike.values():
        for dimension in range(len(right[names[0]])):
            wrong = {name: with_one_more(right[name], dimension) for name in names}
            problem = shape_problem(hf_config, (right | wrong).items())
            assert problem is not None
            assert f"of shape {wrong[names[0]]}; expected {right[names[0]]}" in problem and names[0] in problem
        if len(right[names[0]]) == 2:
            rows, columns = right[names[0]]
            flat = {name: (rows * columns,) for name in names}
            assert shape_problem(hf_config, (right | flat).items())
            assert rows == columns or shape_problem(hf_config, (right | dict.fromkeys(names, (columns, rows))).items())


def with_one_more(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return tuple(size + (place == dimension) for place, size in enumerate(shape))


def test_every_family_is_here_with_every_field_that_shapes_depend_on() -> None:
    """A field that no odd case sets could be taken for another."""
    odd = {case: config_of(case) for case in CASES if case.endswith("odd")}
    assert {config["model_type"] for config in odd.values()} == set(families())
    for hf_config in odd.values():
        fields = {
            atom.text(hf_config) for shape in shapes(hf_config).values() for size in shape for atom in size.atoms()
        }
        assert fields - {"1", "2"} <= hf_config.keys()
        counts = [hf_config[field] for field in fields - {"1", "2", "num_key_value_heads", "head_dim"}]
        assert len(set(counts)) == len(counts), sorted(counts)


def test_the_message_says_what_the_shape_follows_from() -> None:
    hf_config = config_of("qwen3_moe odd")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert shape_problem(hf_config, [(name, (60, 49))]) == (
        f"has {name} of shape (60, 49); expected (60, 48) by its config.json: (num_attention_heads * head_dim, "
        "hidden_size), with num_attention_heads = 6, head_dim = 10, hidden_size = 48"
    )
    derived = {key: value for key, value in config_of("llama odd").items() if key != "head_dim"}
    assert "(num_key_value_heads * (hidden_size // num_attention_heads)" in (
        shape_problem(derived | {"hidden_size": 60}, [("model.layers.0.self_attn.k_proj.weight", (31, 60))]) or ""
    )
    for key in EXPERT_KEYS:
        spelled = {other: value for other, value in hf_config.items() if other not in EXPERT_KEYS} | {key: 5}
        assert expert_count(spelled) == 5
        router = shapes(spelled)["model.layers.1.mlp.gate.weight"]
        assert explanation(router, spelled) == f"({key}, hidden_size), with {key} = 5, hidden_size = 48"
    assert explanation(shapes(hf_config)["value_head.bias"], hf_config) == "the same in every model"
