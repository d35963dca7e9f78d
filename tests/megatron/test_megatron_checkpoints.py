"""Hugging Face checkpoints in and out, and training checkpoints, under several layouts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasao.storage.hf_directory import checkpoint_files
from megasao.storage.model_parts import write_sum
from tests.megatron.tiny import read, write_tiny_checkpoint
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1},
    "EP2": {"ranks": 2, "expert": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
    "TP2 SP": {"ranks": 2, "tensor": 2, "sequence": True, "expert_tensor": 2},
    "TP2 SP EP2": {"ranks": 2, "tensor": 2, "sequence": True, "expert": 2},
    "DP2 split": {"ranks": 2, "distributed_optimizer": True},
    "CP2 EP2 split": {"ranks": 2, "context": 2, "expert": 2, "distributed_optimizer": True, "overlap": True},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_round_trip_is_bit_exact(checkpoint: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    payload = {"path": str(checkpoint), "parallel": layout, "role": "actor", "out": str(tmp_path)}
    counts = run_world(layout["ranks"], "tests.megatron.cases:round_trip", payload)
    original = load_file(checkpoint / "model.safetensors")
    assert counts == [len(original)] + [0] * (layout["ranks"] - 1)
    assert_equal(read(tmp_path, "weights"), original)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def test_uneven_mixture_of_layers_round_trips_over_stages(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", num_hidden_layers=4, mlp_only_layers=[0, 2])
    payload = {"path": str(path), "parallel": LAYOUTS["PP2"], "role": "actor", "out": str(tmp_path)}
    run_world(2, "tests.megatron.cases:round_trip", payload)
    assert_equal(read(tmp_path, "weights"), load_file(path / "model.safetensors"))


@pytest.mark.parametrize("layout", [LAYOUTS["one"], LAYOUTS["PP2"]], ids=["one", "PP2"])
def test_critic_lacks_exactly_the_value_head(checkpoint: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    critic = {"head_bias": 0.5}
    payload = {"path": str(checkpoint), "parallel": layout, "role": "critic", "out": str(tmp_path), "critic": critic}
    run_world(layout["ranks"], "tests.megatron.cases:round_trip", payload)
    ours, policy = read(tmp_path, "weights"), load_file(checkpoint / "model.safetensors")
    assert ours.pop("value_head.weight").abs().max() == 0
    assert ours.pop("value_head.bias").tolist() == [0.5]
    del policy["lm_head.weight"]
    assert_equal(ours, policy)


def test_initial_values_are_the_bias_at_any_temperature(checkpoint: Path) -> None:
    sequences, temperatures = [[1, 2, 3], [4, 5]], [0.5, 1.0]
    payload = {"path": str(checkpoint), "role": "critic", "critic": {"head_bias": 0.5}}
    [[values]] = run_world(
        1, "tests.megatron.cases:outputs", payload | {"sequences": sequences, "temperatures": temperatures}
    )
    assert values == [0.0, 0.5, 0.5, 0.0, 0.5]


def other_groups(tensors: dict[str, torch.Tensor]) -> None:
    """One group with six queries for two with two, in every layer: merged, it has the shape that the model has."""
    rows = {"q": 96, "k": 16, "v": 16}
    for name in tensors:
        if (part := name.removesuffix("_proj.weight")[-1]) in rows and "self_attn" in name:
            tensors[name] = torch.ones(rows[part], 64)


def test_bad_checkpoints_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    def variant(name: str, change: Any) -> str:
        directory = tmp_path / name
        shutil.copytree(checkpoint, directory)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return str(directory)

    norm, gate = "model.layers.1.self_attn.q_norm.weight", "model.layers.0.mlp.experts.3.gate_proj.weight"
    paths = [
        variant("missing", lambda tensors: tensors.pop(norm)),
        variant("renamed", lambda tensors: tensors.update({norm + "s": tensors.pop(norm)})),
        variant("extra", lambda tensors: tensors.update({gate.replace("3", "8"): tensors[gate].clone()})),
        variant("shape", lambda tensors: tensors.update({gate: tensors[gate][:, 1:].contiguous()})),
        variant("groups", other_groups),
    ]
    (tmp_path / "empty").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "empty")
    paths += [str(tmp_path / "empty"), str(tmp_path)]
    scaled = tmp_path / "scaled"
    shutil.copytree(checkpoint, scaled)
    config = json.loads((scaled / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    (scaled / "config.json").write_text(json.dumps(config))
    paths.append(str(scaled))
    shutil.copytree(checkpoint, tmp_path / "deep")
    config["rope_parameters"], config["num_nextn_predict_layers"] = {"rope_type": "default", "rope_theta": 1e4}, 10_000
    (tmp_path / "deep" / "config.json").write_text(json.dumps(config))
    paths.append(str(tmp_path / "deep"))
    payload = {"path": str(checkpoint), "paths": paths}
    [messages] = run_world(1, "tests.megatron.cases:load_errors", payload)
    missing, renamed, extra, shape, groups, empty, absent, rope, deep = messages
    assert norm in missing
    assert f"{norm} (nearest: {norm}s)" in renamed
    assert "experts.8.gate_proj.weight (nearest: " in extra
    assert f"{gate} of shape (48, 63); expected (48, 64) by its config.json: (moe_intermediate_size, " in shape
    assert "layers.0.self_attn.k_proj.weight of shape (16, 64); expected (32, 64) by its config.json" in groups
    assert "model.safetensors is missing" in empty
    assert "no config.json" in absent
    assert "yarn" in rope
    assert "num_nextn_predict_layers = 10000 are 1000" in deep and "expected up to 1000" in deep


SAVED = ("one", "EP2", "TP2 SP", "PP2")


@torch.no_grad()
@pytest.mark.parametrize("layout", [LAYOUTS[name] for name in SAVED], ids=SAVED)
def test_saved_directory_is_an_ordinary_checkpoint(checkpoint: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    directory = tmp_path / "saved"
    payload = {"path": str(checkpoint), "parallel": layout, "directory": str(directory)}
    assert all(run_world(layout["ranks"], "tests.megatron.cases:save_directory", payload))
    assert (directory / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"], "temporary directories were left behind"
    tokens = torch.arange(20)[None]
    ours, original = (AutoModelForCausalLM.from_pretrained(path) for path in (directory, checkpoint))
    assert torch.equal(ours(tokens).logits, original(tokens).logits)
    files = checkpoint_files(directory)
    assert len(files) == layout["ranks"], "each rank has written its share"
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert sum(len(load_file(file)) for file in files) == len(saved), "every tensor once"
    assert_equal(saved, load_file(checkpoint / "model.safetensors"))


def test_a_rank_that_cannot_write_ends_the_saving_on_all(checkpoint: Path, tmp_path: Path) -> None:
    """What was there before is still there."""
    directory = tmp_path / "saved"
    directory.mkdir()
    (directory / "COMPLETE").touch()
    payload = {"path": str(checkpoint), "parallel": LAYOUTS["EP2"], "directory": str(directory)}
    first, second = run_world(2, "tests.megatron.cases:save_in_vain", payload)
    assert all("rank 1 could not write weights" in said and "its own message says why" in said for said in first)
    assert "no space left" in second[0] and "elsewhere is not a complete Hugging Face checkpoint" in second[1]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"] and (directory / "COMPLETE").is_file()


@pytest.mark.parametrize(
    ("role", "dtype"), [("actor", "float32"), ("critic", "float32"), ("critic", "bfloat16")], ids=lambda value: value
)
def test_resume_is_bit_exact_and_resharding_keeps_every_bit(
    checkpoint: Path, tmp_path: Path, role: str, dtype: str
) -> None:
    def run(name: str, function: str, layout: dict[str, Any], more: int) -> Path:
        out = tmp_path / name
        out.mkdir()
        payload = {"path": str(checkpoint), "role": role, "parallel": layout, "steps": 2, "more": more}
        payload["model"] = {"dtype": dtype}
        files = {"directory": str(tmp_path / "saved"), "out": str(out)}
        run_world(layout["ranks"], f"tests.megatron.cases:{function}", payload | files)
        return out

    first = run("first", "save_trained", LAYOUTS["EP2"], 2)
    resumed = run("resumed", "resume_trained", LAYOUTS["EP2"], 2)
    assert_equal(read(resumed, "state"), read(first, "state"))
    assert_equal(read(resumed, "weights"), read(first, "weights"))
    assert read(first, "state")["updates"].item() == 2
    for name in ("one", "PP2", "TP2 SP", "DP2 split", "CP2 EP2 split"):
        other = run(f"as {name}", "resume_trained", LAYOUTS[name], 0)
        assert_equal(read(other, "state"), read(first, "state"))
    # Control: without the Adam state the next steps differ.
    assert not torch.equal(
        read(run("fresh", "save_trained", LAYOUTS["EP2"], 1), "weights")["model.layers.0.mlp.gate.weight"],
        read(resumed, "weights")["model.layers.0.mlp.gate.weight"],
    )


def test_incomplete_training_checkpoints_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    payload = {"path": str(checkpoint), "role": "critic", "directory": str(saved), "steps": 1, "more": 0}
    run_world(1, "tests.megatron.cases:save_trained", payload)
    names = ("unfinished", "partial", "foreign", "groups", "moment")
    for name in names:
        shutil.copytree(saved, tmp_path / name)
    (tmp_path / "unfinished" / "manifest.json").unlink()
    (tmp_path / "partial" / "part-00000.safetensors").unlink()
    manifest = json.loads((saved / "manifest.json").read_text())
    (tmp_path / "foreign" / "manifest.json").write_text(json.dumps(manifest | {"role": "actor"}))
    tensors, gate = load_file(saved / "part-00000.safetensors"), "model.layers.0.mlp.experts.3.gate_proj.weight"
    narrow = {f"exp_avg_sq:{gate}": tensors[f"exp_avg_sq:{gate}"][:, 1:].contiguous()}
    other_groups(tensors)
    for name, changed in (("groups", tensors), ("moment", load_file(saved / "part-00000.safetensors") | narrow)):
        save_file(changed, tmp_path / name / "part-00000.safetensors")
        write_sum(tmp_path / name / "part-00000.safetensors")
    payload = {"path": str(checkpoint), "role": "critic", "directories": [str(tmp_path / name) for name in names]}
    [messages] = run_world(1, "tests.megatron.cases:load_checkpoint_errors", payload)
    unfinished, partial, foreign, groups, moment = messages
    assert "no manifest.json" in unfinished
    assert "part-00000.safetensors is missing" in partial
    assert "checkpoint of the actor, not of the critic" in foreign
    assert "layers.0.self_attn.k_proj.weight of shape (16, 64); expected (32, 64) by its config.json" in groups
    assert f"{gate} of shape (48, 63); expected (48, 64) by its config.json" in moment
