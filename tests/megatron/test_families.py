"""Every model family against transformers, in every layout: logits, gradients, checkpoints in and out."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasao.families import family_of
from tests.megatron.tiny import random_sequences, read
from tests.megatron.tiny_families import SETTINGS, VOCABULARY, write_tiny_family
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

UNUSED = (9, 23)
"""Tokens that no sequence has: what their logits are shows in no log-probability of a sequence."""
ROWS = [
    [[token if token not in UNUSED else 0 for token in sequence] for sequence in row]
    for row in (random_sequences(4, seed=3), [[5], *random_sequences(2, seed=8)])
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1},
    "TP2": {"ranks": 2, "tensor": 2},
    "TP2 SP": {"ranks": 2, "tensor": 2, "sequence": True, "expert_tensor": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
    "PP2 3+1": {"ranks": 2, "pipeline": 2, "pipeline_layers": [3, 1]},
    "PP2 2+6": {"ranks": 2, "pipeline": 2, "pipeline_layers": [2, 6]},
    "PP2 6+2": {"ranks": 2, "pipeline": 2, "pipeline_layers": [6, 2]},
    "EP2": {"ranks": 2, "expert": 2},
    "TP2 SP PP2": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2},
    "TP2 SP PP2 EP2": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2, "expert": 2},
}
LAYOUTS |= {
    "CP2": {"ranks": 2, "context": 2},
    "CP2 EP2 DO": {"ranks": 2, "context": 2, "expert": 2, "distributed_optimizer": True},
    "PP2 VPP2": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    "DP2 PP2 VPP2 DO": {"ranks": 4, "pipeline": 2, "virtual_pipeline": 2, "distributed_optimizer": True},
}
LAYOUTS["TP2 SP CP2"] = {"ranks": 4, "tensor": 2, "sequence": True, "expert_tensor": 2, "context": 2}
LAYOUTS["TP2 SP PP2 EP2 6+2"] = LAYOUTS["TP2 SP PP2 EP2"] | {"pipeline_layers": [6, 2]}
LAYOUTS["TP2 SP PP2 EP2 6+2 DO"] = LAYOUTS["TP2 SP PP2 EP2 6+2"] | {"distributed_optimizer": True}
DENSE = ["one", "TP2", "CP2", "PP2", "PP2 3+1", "PP2 VPP2", "TP2 SP PP2"]
MOE = ["one", "TP2 SP", "CP2", "PP2", "PP2 3+1", "PP2 VPP2", "EP2", "TP2 SP PP2 EP2"]
FAMILIES = {
    "llama": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": MOE,
    "glm4_moe": MOE,
    "glm_moe_dsa": ["one", "TP2 SP", "PP2 2+6", "PP2 6+2", "EP2", "CP2", "TP2 SP PP2 EP2 6+2", "TP2 SP CP2"],
}
SEEDS = {"glm_moe_dsa": 2}
"""Eight layers round: transformers' own float32 is 1e-5 to 5e-6 from float64 over seeds 0 to 7, with this one 5e-6."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_tiny_family(root / family, family, seed=SEEDS.get(family, 0)) for family in FAMILIES}


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")


class Outputs(NamedTuple):
    """What a model says of all rows' tokens: log-probabilities [T], and logits [T, vocabulary]."""

    logprobs: torch.Tensor
    logits: torch.Tensor


def sequence_logprobs(model: Any, sequence: list[int]) -> torch.Tensor:
    """[T] of one sequence alone; 0 at the first token."""
    return sequence_outputs(model, sequence).logprobs


def sequence_outputs(model: Any, sequence: list[int]) -> Outputs:
    """Of one sequence alone; the first token's log-probability is 0."""
    tokens = torch.tensor(sequence)
    logits = model(tokens[None]).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    return Outputs(torch.cat([torch.zeros(1), logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1)]), logits)


@torch.no_grad()
def reference(path: Path) -> Outputs:
    """Transformers' outputs."""
    model = load(path)
    logprobs, logits = zip(*(sequence_outputs(model, sequence) for row in ROWS for sequence in row), strict=True)
    return Outputs(torch.cat(logprobs), torch.cat(logits))


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, Path]) -> dict[str, Outputs]:
    return {family: reference(path) for family, path in checkpoints.items()}


def run(jobs: list[dict[str, Any]]) -> list[tuple[Outputs, list[str]]]:
    """Each job's outputs, and what was wrong with its export; all jobs have equally many ranks."""
    results = run_world(
        jobs[0]["parallel"]["ranks"], "tests.megatron.family_cases:matrix", {"rows": ROWS, "jobs": jobs}
    )
    outputs = [
        Outputs(*(torch.tensor([token for row in rows for token in row]) for rows in kinds))
        for *kinds, _ in results[-1]
    ]
    return list(zip(outputs, [wrong for *_, wrong in results[0]], strict=True))


def off(found: Outputs, expected: Outputs) -> tuple[float, float]:
    """The largest difference of a log-probability, and of a logit."""
    assert found.logits.shape == expected.logits.shape
    logprobs, logits = ((mine - other).abs().max() for mine, other in zip(found, expected, strict=True))
    return logprobs.item(), logits.item()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_equal_transformers_and_round_trips_are_bit_exact(
    checkpoints: dict[str, Path], references: dict[str, Outputs], ranks: int
) -> None:
    names = [(f, layout) for f, layouts in FAMILIES.items() for layout in layouts if LAYOUTS[layout]["ranks"] == ranks]
    jobs = [{"path": str(checkpoints[family]), "parallel": LAYOUTS[layout]} for family, layout in names]
    for (family, layout), (outputs, wrong) in zip(names, run(jobs), strict=True):
        assert references[family].logprobs.std() > 1.0
        found = off(outputs, references[family])
        print(f"{family:<12} {layout:<20} log-probs within {found[0]:.1e}, logits {found[1]:.1e}")
        assert max(found) < 1e-5, (family, layout)
        assert wrong == [], (family, layout)


UNWRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"num_key_value_heads": 4}, {"rms_norm_eps": 0.1}),
    "qwen3": ({"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}, {"rms_norm_eps": 0.1}),
    "qwen3_moe": ({"num_key_value_heads": 4}, {"rms_norm_eps": 0.1}),
    "glm4_moe": ({"num_attention_heads": 8, "num_key_value_heads": 8}, {"partial_rotary_factor": 1.0}),
    "glm_moe_dsa": ({}, {"routed_scaling_factor": 1.0}),
}
"""Sizes that are what transformers takes where none is written; and, as a control, a setting that is not."""
KEPT = {"glm_moe_dsa": {"q_lora_rank", "num_key_value_heads", "rms_norm_eps"}}
"""Of a size of the large model's; and see the tiny one's settings."""


def without_settings(path: Path, family: str) -> None:
    """Leave out of config.json what it may leave out."""
    hf_config = json.loads((path / "config.json").read_text())
    out = {"hidden_act", *family_of(hf_config).defaults} - KEPT.get(family, set())
    hf_config["rope_parameters"].pop("partial_rotary_factor", None)
    left = {key: value for key, value in hf_config.items() if key not in out}
    (path / "config.json").write_text(json.dumps(left))


def test_settings_that_are_not_written_are_those_of_transformers(tmp_path: Path) -> None:
    jobs, expected = list[dict[str, Any]](), list[Outputs]()
    for family, (sizes, other) in UNWRITTEN.items():
        path = write_tiny_family(tmp_path / family, family, seed=SEEDS.get(family, 0), **sizes)
        without_settings(path, family)
        wrong = shutil.copytree(path, tmp_path / f"{family} wrong")
        hf_config = json.loads((path / "config.json").read_text())
        (wrong / "config.json").write_text(json.dumps(hf_config | other))
        jobs += [{"path": str(each), "parallel": LAYOUTS["one"]} for each in (path, wrong)]
        expected.append(reference(path))
    found = run(jobs)
    for family, theirs, (ours, _), (wrong_ours, _) in zip(UNWRITTEN, expected, found[::2], found[1::2], strict=True):
        print(
            f"{family:<12} within {max(off(ours, theirs)):.1e}, with another setting {min(off(wrong_ours, theirs)):.1e}"
        )
        assert max(off(ours, theirs)) < 1e-5, family
        assert min(off(wrong_ours, theirs)) > 1e-2, family


@pytest.mark.parametrize(("family", "layout"), [("qwen3_moe", "one"), ("glm4_moe", "TP2 SP"), ("llama", "PP2")])
def test_exchanged_rows_of_unused_tokens_show_in_logits_alone(
    checkpoints: dict[str, Path], references: dict[str, Outputs], tmp_path: Path, family: str, layout: str
) -> None:
    """Of the head, which a llama's embedding is too."""
    path = shutil.copytree(checkpoints[family], tmp_path / "exchanged")
    tensors = load_file(path / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    head[list(UNUSED)] = head[list(UNUSED[::-1])]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    ((outputs, _),) = run([{"path": str(path), "parallel": LAYOUTS[layout]}])
    logprobs, logits = off(outputs, references[family])
    assert logprobs < 1e-5 and logits > 1.0


def test_mistakes_in_sparse_attention_are_rejected(
    checkpoints: dict[str, Path], references: dict[str, Outputs]
) -> None:
    for layout, mistakes in (("one", ["dense", "halves"]), ("CP2", ["own_keys", "straight"])):
        job = {"path": str(checkpoints["glm_moe_dsa"]), "parallel": LAYOUTS[layout]}
        for outputs, _ in run([job | {"mistake": mistake} for mistake in mistakes]):
            assert min(off(outputs, references["glm_moe_dsa"])) > 0.1


def test_ranks_exchange_latents_and_the_indexers_keys(checkpoints: dict[str, Path]) -> None:
    """Never keys or values of heads, which are 4 x 24 and 4 x 12 numbers a token."""
    payload = {"path": str(checkpoints["glm_moe_dsa"]), "parallel": LAYOUTS["CP2"]}
    sizes = SETTINGS["glm_moe_dsa"]
    expected = sorted(sizes[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim"))
    assert run_world(2, "tests.megatron.family_cases:gathered_widths", payload) == [expected] * 2


def test_the_indexers_norm_is_not_flagged_sequence_parallel(checkpoints: dict[str, Path]) -> None:
    """It sees whole rows on every rank: with the flag its gradient would count once a rank."""
    payload = {"path": str(checkpoints["glm_moe_dsa"]), "parallel": LAYOUTS["TP2 SP"]}
    for flags in run_world(2, "tests.megatron.family_cases:sequence_parallel_flags", payload):
        indexer = [flag for name, flag in flags.items() if "indexer.k_norm" in name]
        assert indexer and not any(indexer)
        assert all(flag for name, flag in flags.items() if name.endswith("input_layernorm.weight"))


TRAINED = [
    ("llama", "PP2"),
    ("llama", "DP2 PP2 VPP2 DO"),
    ("glm4_moe", "TP2 SP"),
    ("glm4_moe", "CP2 EP2 DO"),
    ("glm_moe_dsa", "TP2 SP PP2 EP2 6+2 DO"),
]


@pytest.mark.parametrize(("family", "trained"), TRAINED)
def test_training_is_the_same_in_a_layout(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, trained: str
) -> None:
    """Actor and critic: losses, gradients and weights; what must not move does not; tied weights stay one."""
    reports = {}
    for layout in ("one", trained):
        jobs = [
            {"path": str(checkpoints[family]), "parallel": LAYOUTS[layout], "role": role, "steps": 2}
            | {"out": str(tmp_path / layout / role)}
            for role in ("actor", "critic")
        ]
        results = run_world(LAYOUTS[layout]["ranks"], "tests.megatron.family_cases:train_all", {"jobs": jobs})
        assert all(result == results[0] for result in results), "ranks disagree on losses or gradient norms"
        reports[layout] = results[0]
    initial = load_file(checkpoints[family] / "model.safetensors")
    for index, role in enumerate(("actor", "critic")):
        for ours, theirs in zip(reports[trained][index], reports["one"][index], strict=True):
            assert abs(ours[0] - theirs[0]) < 2e-6 and abs(ours[1] / theirs[1] - 1) < 2e-6
        ours, theirs = (tmp_path / layout / role for layout in (trained, "one"))
        gradients, expected = read(ours, "gradients"), read(theirs, "gradients")
        largest = max(tensor.abs().max().item() for tensor in expected.values())
        assert gradients.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (gradients[name] - tensor).abs().max() < 3e-6 * largest, name
        weights, expected = read(ours, "weights"), read(theirs, "weights")
        for name, tensor in expected.items():
            assert (weights[name] - tensor).abs().max() < 1e-6, name
            if name in initial and ".experts." not in name:  # an expert that got no token does not move either
                assert torch.equal(tensor, initial[name]) != trains(name, role), name


def trains(name: str, role: str) -> bool:
    """The indexer and the router's bias never do; of a critic, only what is inside the feed-forward layers."""
    return ".indexer." not in name and "correction_bias" not in name and (role == "actor" or ".mlp." in name)


def test_gradients_of_sparse_attention_equal_transformers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """With shared selections, and nothing into the indexer."""
    path = checkpoints["glm_moe_dsa"]
    sequences = random_sequences(4, seed=6)
    payload = {"path": str(path), "parallel": LAYOUTS["one"], "out": str(tmp_path), "sequences": sequences}
    run_world(1, "tests.megatron.cases:split_gradients", payload | {"sequences_per_row": 3, "temperature": 1.0})
    gradients, model = read(tmp_path, "gradients"), load(path)
    (-sum(sequence_logprobs(model, sequence).sum() for sequence in sequences) / 100.0).backward()
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    compared = {name for name, parameter in model.named_parameters() if name in gradients}
    assert {name.split(".", 3)[3] for name in compared if ".7." in name} >= {
        f"self_attn.{part}.weight" for part in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    }
    for name in compared:
        theirs = model.get_parameter(name).grad
        torch.testing.assert_close(gradients[name], theirs, rtol=0, atol=5e-6 * largest, msg=name)
    assert not any(".indexer." in name for name in gradients)


def test_a_vocabulary_that_tensor_parallelism_does_not_divide(tmp_path: Path) -> None:
    path = write_tiny_family(tmp_path / "model", "llama", vocab_size=VOCABULARY + 1)
    tied = write_tiny_family(tmp_path / "untied", "qwen3", vocab_size=VOCABULARY + 1, tie_word_embeddings=False)
    jobs = [{"path": str(each), "parallel": LAYOUTS[layout]} for each in (path, tied) for layout in ("TP2", "PP2")]
    for job, (outputs, wrong) in zip(jobs, run(jobs), strict=True):
        assert max(off(outputs, reference(Path(job["path"])))) < 1e-5
        assert wrong == []


def test_the_routers_bias_stays_float32_beside_bfloat16(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(checkpoints["glm4_moe"] / "model.safetensors")
    half = {n: t if n.endswith("correction_bias") else t.bfloat16() for n, t in tensors.items()}
    shutil.copytree(checkpoints["glm4_moe"], tmp_path / "half")
    save_file(half, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    job = {"path": str(tmp_path / "half"), "model": {"dtype": "bfloat16"}}
    ((_, wrong),) = run([job | {"parallel": LAYOUTS["TP2 SP"]}])
    assert wrong == []


def test_a_checkpoint_moves_between_layouts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The router's bias is in it too, and a vocabulary's filling is not."""
    states = []
    payload = {"path": str(checkpoints["glm4_moe"]), "role": "actor", "steps": 1, "more": 0}
    payload["directory"] = str(tmp_path / "checkpoint")
    for case, layout in (("save_trained", "CP2 EP2 DO"), ("resume_trained", "TP2 SP"), ("resume_trained", "PP2 VPP2")):
        out = tmp_path / layout
        out.mkdir()
        run_world(2, f"tests.megatron.cases:{case}", payload | {"parallel": LAYOUTS[layout], "out": str(out)})
        states.append(read(out, "state"))
    biases = [name for name in states[0] if name.startswith("weight:") and name.endswith("correction_bias")]
    assert len(biases) == 3
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())


def test_multi_token_prediction_is_carried(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Into the saved checkpoint, bit for bit; half a layer is refused."""
    for family in ("glm4_moe", "glm_moe_dsa"):
        payload = {"path": str(checkpoints[family]), "directory": str(tmp_path / family)}
        assert run_world(1, "tests.megatron.cases:save_directory", payload) == [True]
        ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / family, checkpoints[family]))
        assert ours.keys() == theirs.keys()
        assert all(ours[name].dtype == t.dtype and torch.equal(ours[name], t) for name, t in theirs.items())
    absent = f"model.layers.{SETTINGS['glm_moe_dsa']['num_hidden_layers']}.eh_proj.weight"
    shutil.copytree(checkpoints["glm_moe_dsa"], tmp_path / "half")
    theirs.pop(absent)
    save_file(theirs, tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    payload = {"path": str(checkpoints["glm_moe_dsa"]), "paths": [str(tmp_path / "half")]}
    [[message]] = run_world(1, "tests.megatron.cases:load_errors", payload)
    assert f"lacks 1 tensor(s), first {absent}" in message


def test_a_stage_that_starts_on_a_sharing_layer_is_refused(checkpoints: dict[str, Path]) -> None:
    payload = {"path": str(checkpoints["glm_moe_dsa"]), "parallel": {"ranks": 2, "pipeline": 2}}
    messages = run_world(2, "tests.megatron.cases:layout_errors", payload)
    assert messages[0] == ""
    assert "starts on layer 4 (from 0)" in messages[1] and "such as 2 or 6" in messages[1]


def test_a_config_of_transformers_defaults_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Spellings of the same model: layer kinds as lists, or as the numbers they come from."""
    path = write_tiny_family(tmp_path / "model", "glm_moe_dsa", mtp=False)
    hf_config = json.loads((path / "config.json").read_text())
    job = {"path": str(path), "parallel": LAYOUTS["one"]}
    ((listed, _),) = run([job])
    for key in ("mlp_layer_types", "indexer_types", "layer_types"):
        del hf_config[key]
    (path / "config.json").write_text(json.dumps(hf_config))
    ((counted, _),) = run([job])
    assert all(map(torch.equal, listed, counted))
