"""Training checkpoints in Megatron-Core's format torch_dist: any layout loads them; nothing of them runs code."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megasao.config.load import dump_config
from megasao.storage.model_parts import write_sum
from tests.conversion.support import convert, names_and_bytes
from tests.megatron.tiny import make_config, read, read_torch_dist, write_tiny_checkpoint
from tests.megatron.tiny_families import write_tiny_family
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

SP = {"tensor": 2, "sequence": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 SP PP2 EP2": {"ranks": 4, **SP, "pipeline": 2, "expert": 2},
    "DP2 EP2 split": {"ranks": 2, "expert": 2, "distributed_optimizer": True, "overlap": True},
    "one": {"ranks": 1},
    "PP2 VPP2": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
    "PP2 2+6": {"ranks": 2, "pipeline": 2, "pipeline_layers": [2, 6]},
    "TP2 SP": {"ranks": 2, **SP},
    "TP2 SP ETP2": {"ranks": 2, **SP, "expert_tensor": 2},
}
PART = "__0_0.distcp"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with experts, and one without."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("mixed"), num_hidden_layers=4, mlp_only_layers=[1])


@pytest.fixture(scope="module")
def saved(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The actor's checkpoint after one step in one process, and what it holds."""
    directory = tmp_path_factory.mktemp("saved")
    work(mixed, directory, "save_trained", "one", steps=1)
    return directory


def work(source: Path, root: Path, function: str, layout: str, **payload: Any) -> Path:
    """Save into ``root / "checkpoint"``, or load from there, under a layout; where the results are."""
    out = root / f"{function} {layout}"
    out.mkdir()
    whole = {"path": str(source), "role": "actor", "parallel": LAYOUTS[layout], "steps": 2, "more": 0}
    whole |= {"directory": str(root / "checkpoint"), "out": str(out), "format": "torch_dist", **payload}
    run_world(LAYOUTS[layout]["ranks"], f"tests.megatron.cases:{function}", whole)
    return out


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    ("family", "role", "dtype", "chain"),
    [
        ("mixed", "actor", "float32", ["TP2 SP PP2 EP2", "DP2 EP2 split", "one", "PP2 VPP2"]),
        ("mixed", "critic", "bfloat16", ["DP2 EP2 split", "PP2 VPP2"]),
        ("glm_moe_dsa", "actor", "bfloat16", ["TP2 SP ETP2", "PP2 2+6"]),
        ("llama", "actor", "float32", ["PP2 VPP2", "TP2 SP"]),
    ],
    ids=["four layouts", "critic in bfloat16", "sparse latent attention", "tied embeddings"],
)
def test_resharding_keeps_every_bit(
    mixed: Path, tmp_path: Path, family: str, role: str, dtype: str, chain: list[str]
) -> None:
    """Weights, what Adam updates, and its moments."""
    model = mixed if family == "mixed" else write_tiny_family(tmp_path / "model", family)
    settings = {"role": role, "model": {"dtype": dtype}}
    first = read(work(model, tmp_path, "save_trained", chain[0], **settings), "state")
    assert first["updates"] == 2
    for layout in chain[1:]:
        assert_equal(read(work(model, tmp_path, "resume_trained", layout, **settings), "state"), first)
    if family == "glm_moe_dsa":
        stored = read_torch_dist(tmp_path / "checkpoint")
        assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in stored
        assert "decoder.layers.3.pre_mlp_layernorm.weight" in stored
        assert stored["decoder.layers.3.mlp.router.expert_bias"].dtype == torch.float32
        assert stored["decoder.layers.3.mlp.router.weight"].dtype == torch.bfloat16


def test_names_depend_on_neither_layout_nor_specification(mixed: Path, saved: Path, tmp_path: Path) -> None:
    work(mixed, tmp_path, "save_trained", "TP2 SP PP2 EP2", steps=1)
    one, four = (read_torch_dist(root / "checkpoint") for root in (saved, tmp_path))
    assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in four.items()}
    # TransformerEngine's: a norm is part of the product after it, except before a router.
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in one
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in one
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in one
    assert "decoder.layers.1.pre_mlp_layernorm.weight" not in one
    assert not any("_extra_state" in name for name in one)


def test_megatrons_own_loader_reads_it(mixed: Path, saved: Path) -> None:
    plain = read(work(mixed, saved, "plain_tensors", "one"), "plain")
    state = read(saved / "save_trained one", "state")
    expert = "model.layers.2.mlp.experts.3"
    pairs = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight_w": f"{expert}.gate_proj.weight",
        "decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight_v": f"{expert}.up_proj.weight",
        "decoder.layers.3.mlp.router.weight": "model.layers.3.mlp.gate.weight",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(plain[ours], state[f"weight:{theirs}"]), ours
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(plain[f"optimizer.state.{moment}.{ours}"], state[f"{moment}:{theirs}"]), ours
    assert len(plain) == len(read_torch_dist(saved / "checkpoint"))


class Evil:
    """Unpickling it makes a directory."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.victim),)


def test_what_cannot_be_trusted_is_refused_by_name_on_every_rank(mixed: Path, saved: Path, tmp_path: Path) -> None:
    names = ("tensors", "metadata", "evil", "common", "unfinished", "partial", "foreign", "newer")
    bad = {name: tmp_path / name for name in names}
    for directory in bad.values():
        shutil.copytree(saved / "checkpoint", directory)
    for file in (bad["tensors"] / PART, bad["metadata"] / ".metadata"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    victims = [tmp_path / "victim 1", tmp_path / "victim 2"]
    (bad["evil"] / ".metadata").write_bytes(pickle.dumps(Evil(victims[0])))
    write_sum(bad["evil"] / ".metadata")
    torch.save({"step": Evil(victims[1])}, bad["common"] / "common.pt")
    write_sum(bad["common"] / "common.pt")
    (bad["unfinished"] / "manifest.json").unlink()
    (bad["partial"] / ".metadata").unlink()
    for name, change in (("foreign", {"role": "critic"}), ("newer", {"format": "megasao-torch-dist-9"})):
        manifest = json.loads((bad[name] / "manifest.json").read_text())
        (bad[name] / "manifest.json").write_text(json.dumps(manifest | change))
    payload = {"path": str(mixed), "role": "actor", "parallel": LAYOUTS["DP2 EP2 split"]}
    payload["directories"] = [str(directory) for directory in bad.values()]
    for messages in run_world(2, "tests.megatron.cases:load_checkpoint_errors", payload):
        found = dict(zip(names, messages, strict=True))
        assert f"{bad['tensors'] / PART} is damaged" in found["tensors"]
        assert f"{bad['metadata'] / '.metadata'} is damaged" in found["metadata"]
        assert f"{bad['evil'] / '.metadata'} is refused: it names posix.mkdir" in found["evil"]
        assert f"{bad['common'] / 'common.pt'} is refused" in found["common"]
        assert "no manifest.json" in found["unfinished"]
        assert ".metadata is missing" in found["partial"]
        assert "checkpoint of the critic, not of the actor" in found["foreign"]
        assert "'megasao-torch-dist-9' is not supported" in found["newer"]
    assert not any(victim.exists() for victim in victims)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_hidden_layers": 5}, "lacks the tensor decoder.layers.4"), ({"moe_intermediate_size": 32}, "has shape")],
    ids=["more layers", "narrower experts"],
)
def test_a_checkpoint_of_another_model_is_refused(
    saved: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    settings = {"num_hidden_layers": 4, "mlp_only_layers": [1], **changes}
    model = write_tiny_checkpoint(tmp_path / "model", **settings)
    payload = {"path": str(model), "role": "actor", "parallel": {"ranks": 1}}
    payload["directories"] = [str(saved / "checkpoint")]
    [[found]] = run_world(1, "tests.megatron.cases:load_checkpoint_errors", payload)
    assert message in found and "another model" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5}, "lacks the tensor decoder.layers.4"),
        ({"moe_intermediate_size": 32}, "_w has the shape (48, 64); expected (32, 64) for model.layers."),
        ({"vocab_size": 33}, "embedding.word_embeddings.weight has the shape (32, 64); expected (33, 64)"),
        (
            {"num_key_value_heads": 1},
            "linear_qkv.weight has the shape (128, 64); expected (96, 64) for model.layers.0.",
        ),
    ],
    ids=["more layers", "narrower experts", "more tokens", "one group"],
)
def test_the_tools_refuse_a_checkpoint_of_another_model(
    saved: Path, tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"num_hidden_layers": 4, "mlp_only_layers": [1], **changes}
    model = write_tiny_checkpoint(tmp_path / "model", **settings)
    assert convert("megatron-to-hf", saved / "checkpoint", tmp_path / "out", "--model", model) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "layers.4" in error or "by config.json: (" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("family", "role", "dtype"),
    [("mixed", "actor", "float32"), ("llama", "actor", "bfloat16"), ("qwen3_moe", "critic", "float32")],
)
def test_it_becomes_a_hugging_face_directory(mixed: Path, tmp_path: Path, family: str, role: str, dtype: str) -> None:
    """The same as a checkpoint in safetensors does, which holds the same."""
    model = mixed if family == "mixed" else write_tiny_family(tmp_path / "model", family)
    settings = {"role": role, "model": {"dtype": dtype}, "steps": 1}
    outputs = []
    for form in ("safetensors", "torch_dist"):
        (tmp_path / form).mkdir()
        work(model, tmp_path / form, "save_trained", "one", **settings, format=form)
        assert convert("megatron-to-hf", tmp_path / form / "checkpoint", tmp_path / f"hf {form}", "--model", model) == 0
        outputs.append(names_and_bytes(tmp_path / f"hf {form}"))
    assert outputs[0] == outputs[1]
    ours, theirs = (tmp_path / form / "checkpoint" for form in ("torch_dist", "safetensors"))
    assert convert("megatron-to-hf", ours, tmp_path / "nowhere") == 2, "in no run, and no --model"
    (ours.parent / "config.yaml").write_text(dump_config(make_config(model)))
    assert convert("verify", ours, theirs) == 0, "moments too"
