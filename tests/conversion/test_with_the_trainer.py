"""The tools and the trainer read and write each other's checkpoints, under several layouts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megasao.config.load import dump_config
from megasao.families import families
from megasao.families.names import carried_names
from tests.conversion.support import convert, tensors_of, write_family
from tests.megatron.tiny import make_config, read
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

TP2: dict[str, Any] = {"ranks": 2, "tensor": 2, "sequence": True, "expert_tensor": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": TP2,
    "qwen3": {"ranks": 2, "pipeline": 2},
    "qwen3_moe": TP2,
    "glm4_moe": {"ranks": 2, "tensor": 2, "sequence": True, "expert": 2},
    "glm_moe_dsa": {"ranks": 2, "expert": 2},
}


def test_every_family_has_a_layout() -> None:
    assert sorted(LAYOUTS) == families()


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_trainer_loads_what_was_converted(family: str, tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", family)
    assert convert("hf-to-megatron", source, tmp_path / "model", "--shard-gb", "0.0003") == 0
    payload = {"path": str(source), "role": "actor", "parallel": LAYOUTS[family], "steps": 0, "more": 0}
    payload |= {"directory": str(tmp_path / "model"), "out": str(tmp_path)}
    run_world(2, "tests.megatron.cases:resume_trained", payload)
    hf_config = json.loads((source / "config.json").read_text())
    expected = {name: tensor for name, tensor in tensors_of(source).items() if name not in carried_names(hf_config)}
    found = read(tmp_path, "weights")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("role", "family"), [("actor", "glm4_moe"), ("critic", "qwen3_moe")])
def test_what_was_trained_is_exported_bit_for_bit(role: str, family: str, tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", family, "bfloat16")
    run = tmp_path / "run"
    directory = run / "checkpoints" / "step_000001" / role
    payload = {"path": str(source), "role": role, "parallel": LAYOUTS[family], "steps": 1, "more": 0}
    payload |= {"directory": str(directory), "out": str(tmp_path), "model": {"dtype": "bfloat16"}}
    run_world(2, "tests.megatron.cases:save_trained", payload)
    assert convert("megatron-to-hf", directory, tmp_path / "early") == 2, "a run's checkpoint without COMPLETE"
    (directory.parent / "COMPLETE").touch()
    (run / "checkpoints" / "latest").write_text("step_000001")
    (run / "config.yaml").write_text(dump_config(make_config(source)))
    checkpoint = run if role == "actor" else directory
    assert convert("megatron-to-hf", checkpoint, tmp_path / "out", "--shard-gb", "0.0003") == 0
    found, expected = tensors_of(tmp_path / "out"), read(tmp_path, "weights")
    hf_config = json.loads((source / "config.json").read_text())
    if role == "actor":
        original = tensors_of(source)
        expected |= {name: original[name] for name in carried_names(hf_config)}
        assert convert("verify", source, tmp_path / "out") == 1, "training changes weights"
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == (torch.float32 if "value_head" in name else tensor.dtype), name
        assert torch.equal(found[name].to(tensor.dtype), tensor), name
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == hf_config
    assert convert("hf-to-megatron", tmp_path / "out", tmp_path / "again") == 0
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["role"] == role
    out = tmp_path / "loaded"
    out.mkdir()
    payload |= {"steps": 0, "directory": str(tmp_path / "again"), "out": str(out), "parallel": {"ranks": 2}}
    run_world(2, "tests.megatron.cases:resume_trained", payload)
    for name, tensor in read(out, "weights").items():
        assert torch.equal(tensor, found[name].to(tensor.dtype)), name


@pytest.mark.parametrize("layout", [TP2, LAYOUTS["qwen3"], {"ranks": 2, "expert": 2}], ids=["TP2", "PP2", "EP2"])
def test_a_rank_reads_its_own_slices_and_no_more(layout: dict[str, Any], tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 128, "mlp_only_layers": [], "vocab_size": 512}
    source = write_family(tmp_path / "hf", "qwen3_moe", **wide)
    file = source / "model.safetensors"
    with file.open("rb") as stream:
        header = 8 + int.from_bytes(stream.read(8), "little")
    results = run_world(2, "tests.megatron.cases:bytes_read", {"path": str(source), "parallel": layout})
    for found, own in results:
        assert own <= found <= own + header + 2000
        assert found < 0.7 * file.stat().st_size
