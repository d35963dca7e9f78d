"""Every family through every tool, on checkpoints that transformers wrote."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasao.conversion.blocks import BLOCK, FP8, scale_shape
from megasao.families import families
from megasao.families.names import SCALE, fp8_names
from megasao.storage.hf_directory import INDEX
from megasao.storage.model_parts import is_whole
from tests.conversion.quantizers import needs_quantizers, run_beside
from tests.conversion.support import convert, names_and_bytes, tensors_of, write_family


@pytest.fixture(scope="module", params=families())
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bfloat16 with float32 among it, wide enough for more than one block."""
    path: Path = tmp_path_factory.mktemp(request.param) / "hf"
    wide: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 4}
    return write_family(path, request.param, "bfloat16", **wide)


def test_there_and_back_is_bit_exact(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("hf-to-megatron", source, tmp_path / "model", "--shard-gb", "0.0002", "--parallel", "2") == 0
    parts = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(parts) > 1 and all(map(is_whole, parts))
    assert convert("megatron-to-hf", tmp_path / "model", tmp_path / "back") == 0
    assert names_and_bytes(tmp_path / "back") == names_and_bytes(source)
    assert convert("verify", source, tmp_path / "back") == 0
    assert convert("verify", source, tmp_path / "model") == 0
    told = capsys.readouterr()
    assert told.out.count("equal: ") == 2
    assert told.err.count("100 %") == 4 and "GB/s" in told.err and "left 0:00:00" in told.err
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        expected, found = (json.loads((path / name).read_text()) for path in (source, tmp_path / "back"))
        assert found == expected, name
    assert {path.name for path in tmp_path.iterdir()} == {"model", "back"}


def test_block_fp8_and_back(source: Path, tmp_path: Path) -> None:
    assert convert("quantize", source, tmp_path / "fp8", "--format", "fp8_block", "--shard-gb", "0.0002") == 0
    original, quantized = tensors_of(source), tensors_of(tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    names = fp8_names(config) & original.keys()
    assert quantized.keys() == original.keys() | {name + SCALE for name in names}
    for name, tensor in original.items():
        if name in names:
            assert quantized[name].dtype == FP8 and quantized[name].shape == tensor.shape
            assert quantized[name + SCALE].shape == scale_shape(tuple(tensor.shape))
            assert quantized[name + SCALE].dtype == torch.float32
        else:
            assert quantized[name].dtype == tensor.dtype and torch.equal(quantized[name], tensor), name
    settings = config.pop("quantization_config")
    assert (settings["quant_method"], settings["fmt"], settings["weight_block_size"]) == ("fp8", "e4m3", list(BLOCK))
    assert config == json.loads((source / "config.json").read_text())
    matrices = {name for name, tensor in original.items() if tensor.ndim == 2}
    assert {f"{module}.weight" for module in settings["modules_to_not_convert"]} == matrices - names
    index = json.loads((tmp_path / "fp8" / INDEX).read_text())
    assert index["weight_map"].keys() == quantized.keys()
    assert all(path.stat().st_size <= 200_000 for path in (tmp_path / "fp8").glob("*.safetensors"))

    assert convert("quantize", tmp_path / "fp8", tmp_path / "plain", "--dequantize") == 0
    plain = tensors_of(tmp_path / "plain")
    assert plain.keys() == original.keys()
    for name, tensor in original.items():
        assert plain[name].dtype == tensor.dtype and plain[name].shape == tensor.shape
        error = (plain[name].float() - tensor.float()).norm() / tensor.float().norm()
        assert 0.005 < error < 0.04 if name in names else error == 0, name
    # FP8 as a source of training is the same as what --dequantize makes of it.
    assert convert("hf-to-megatron", tmp_path / "fp8", tmp_path / "model") == 0
    assert convert("verify", tmp_path / "plain", tmp_path / "model") == 0
    assert "quantization_config" not in json.loads((tmp_path / "model" / "hf" / "config.json").read_text())


READ = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
for plain, fp8 in json.loads(sys.argv[1]):
    ours, theirs = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.bfloat16).state_dict() for p in (plain, fp8))
    wrong = ours.keys() ^ theirs.keys() or {name for name in ours if not torch.equal(ours[name], theirs[name])}
    print("DIFFERENT", json.dumps(sorted(wrong)))
"""


@needs_quantizers
def test_transformers_reads_the_same_from_our_fp8(tmp_path: Path) -> None:
    """It guesses the block from the number of scales, which is right only where blocks fill the matrix."""
    full = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4}
    pairs = []
    for family in families():
        root = tmp_path / family
        source = write_family(root / "hf", family, "bfloat16", **full)
        assert convert("quantize", source, root / "fp8") == 0
        assert convert("quantize", root / "fp8", root / "plain", "--dequantize") == 0
        pairs.append([str(root / "plain"), str(root / "fp8")])
    changed = shutil.copytree(root / "fp8", tmp_path / "changed") / "model.safetensors"
    tensors = load_file(changed)
    tensors[f"model.layers.2.self_attn.o_proj.weight{SCALE}"] *= 2
    save_file(tensors, changed, metadata={"format": "pt"})
    pairs.append([str(root / "plain"), str(changed.parent)])
    lines = [line for line in run_beside(READ, json.dumps(pairs)).stdout.splitlines() if line.startswith("DIFFERENT")]
    assert lines == ["DIFFERENT []"] * len(families()) + ['DIFFERENT ["model.layers.2.self_attn.o_proj.weight"]']


def test_the_table_says_what_is_in_fp8(source: Path) -> None:
    hf_config = json.loads((source / "config.json").read_text())
    names, found = fp8_names(hf_config), tensors_of(source)
    kept = {name for name in found if name not in names}
    assert all(found[name].ndim == 2 for name in names)
    assert not any("norm" in name or "embed" in name or "lm_head" in name or "eh_proj" in name for name in names)
    assert not any(name.endswith((".mlp.gate.weight", "weights_proj.weight", "bias")) for name in names)
    every_projection = {name for name in found if name.endswith("_proj.weight") and "indexer" not in name}
    assert every_projection - names == {name for name in kept if name.endswith("eh_proj.weight")}
