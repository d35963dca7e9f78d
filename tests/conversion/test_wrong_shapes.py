"""Every tool refuses, before anything is written, weights that are wrong in the same way in every layer.

Checkpoints of zeros that take no place on the disk, with every name, shape and dtype that the family's rules say.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megasao.conversion.blocks import FP8, scale_shape
from megasao.families import families
from megasao.families.names import SCALE, carried_names, fp8_names, hf_names, shapes
from megasao.families.sizes import dimensions
from megasao.storage.header import TensorInfo, make_header, read_header
from megasao.storage.model_parts import write_sum
from tests.conversion.support import convert
from tests.megatron.tiny_families import SETTINGS

WRONG = {
    "llama": "self_attn.k_proj.weight",
    "qwen3": "self_attn.q_norm.weight",
    "qwen3_moe": "mlp.gate.weight",
    "glm4_moe": "self_attn.v_proj.bias",
    "glm_moe_dsa": "self_attn.kv_a_proj_with_mqa.weight",
}
"""What is one row longer in every layer, that of multi-token prediction too."""


def test_every_family_has_a_mistake() -> None:
    assert sorted(WRONG) == families()


def write_zeros(file: Path, infos: list[TensorInfo]) -> None:
    header, _ = make_header(infos)
    file.write_bytes(header)
    with file.open("r+b") as stream:
        stream.truncate(len(header) + sum(info.nbytes for info in infos))


def write(directory: Path, family: str, *, fp8: bool = False, wrong: bool = False) -> Path:
    """A checkpoint of the family in bfloat16, or with its products in FP8."""
    hf_config: dict[str, Any] = {"model_type": family, "hidden_act": "silu", **SETTINGS[family]}
    quantized, infos = fp8_names(hf_config), list[TensorInfo]()
    for name in sorted(hf_names(hf_config, "actor") | carried_names(hf_config)):
        shape = dimensions(shapes(hf_config)[name], hf_config)
        shape = longer(shape) if wrong and name.endswith(WRONG[family]) else shape
        dtype = torch.float32 if "e_score" in name else torch.bfloat16
        if fp8 and name in quantized:
            infos += [TensorInfo(name, FP8, shape), TensorInfo(name + SCALE, torch.float32, scale_shape(shape))]
        else:
            infos.append(TensorInfo(name, dtype, shape))
    directory.mkdir()
    write_zeros(directory / "model.safetensors", infos)
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}} if fp8 else {}
    (directory / "config.json").write_text(json.dumps(hf_config | settings))
    return directory


def longer(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] + 1, *shape[1:])


def spoil_parts(checkpoint: Path, family: str) -> None:
    """Lengthen what is stored in a training checkpoint, with sums that are right."""
    for part in checkpoint.glob("part-*.safetensors"):
        infos = [place.info for place in read_header(part)]
        write_zeros(
            part,
            [
                TensorInfo(i.name, i.dtype, longer(i.shape) if i.name.endswith(WRONG[family]) else i.shape)
                for i in infos
            ],
        )
        write_sum(part)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def check(family: str, *arguments: str | Path) -> None:
        before = sorted(tmp_path.iterdir())
        assert convert(*arguments) == 2, arguments
        error = " ".join(capsys.readouterr().err.split())
        assert f"{WRONG[family]} of shape (" in error and "by its config.json: (" in error, error
        assert sorted(tmp_path.iterdir()) == before, "something was written"

    return check


@pytest.mark.parametrize("family", WRONG)
def test_a_shape_that_is_wrong_in_every_layer_is_refused_by_every_tool(
    family: str, tmp_path: Path, refused: Callable[..., None]
) -> None:
    right, wrong = write(tmp_path / "right", family), write(tmp_path / "wrong", family, wrong=True)
    assert convert("hf-to-megatron", right, tmp_path / "model") == 0
    assert convert("megatron-to-hf", tmp_path / "model", tmp_path / "back") == 0
    assert convert("verify", tmp_path / "back", right) == 0
    assert convert("quantize", right, tmp_path / "fp8") == 0
    assert convert("quantize", tmp_path / "fp8", tmp_path / "plain", "--dequantize") == 0
    scaled = write(tmp_path / "scaled", family, fp8=True, wrong=True)
    out = tmp_path / "out"
    refused(family, "hf-to-megatron", wrong, out)
    refused(family, "hf-to-megatron", scaled, out)
    refused(family, "quantize", wrong, out)
    refused(family, "quantize", scaled, out, "--dequantize")
    refused(family, "megatron-to-hf", tmp_path / "model", out, "--model", wrong)
    refused(family, "verify", wrong, wrong)
    spoil_parts(tmp_path / "model", family)
    refused(family, "megatron-to-hf", tmp_path / "model", out)
    refused(family, "megatron-to-hf", tmp_path / "model", out, "--model", right)
    refused(family, "verify", tmp_path / "model", tmp_path / "model")
    refused(family, "verify", tmp_path / "model", wrong)


def test_shapes_in_which_two_checkpoints_differ_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = write(tmp_path / "right", "llama"), write(tmp_path / "wrong", "llama", wrong=True)
    assert convert("verify", right, wrong) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "model.layers.3.self_attn.k_proj.weight: shape (32, 64), other (33, 64)" in lines
    assert lines[-1].startswith(f"different: {SETTINGS['llama']['num_hidden_layers']} tensors")


def test_models_of_no_family_and_packed_numbers_are_compared_as_they_are(tmp_path: Path) -> None:
    wrong = write(tmp_path / "wrong", "llama", wrong=True)
    (wrong / "config.json").write_text('{"model_type": "gpt2"}')
    assert convert("verify", wrong, wrong) == 0
    packed = write(tmp_path / "packed", "llama")
    infos = [place.info for place in read_header(packed / "model.safetensors")]
    write_zeros(packed / "model.safetensors", [TensorInfo(info.name, torch.uint8, (7, 1)) for info in infos])
    assert convert("verify", packed, packed) == 0
