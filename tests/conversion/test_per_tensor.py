"""FP8 with one scale a tensor, by nvidia-modelopt; without it, what the command says."""

import json
import sys
from pathlib import Path

import pytest
import torch

from megasao.conversion.blocks import FP8
from megasao.families import families
from megasao.families.names import carried_names, fp8_names
from tests.conversion.quantizers import convert_each, needs_quantizers
from tests.conversion.support import convert, tensors_of, write_family


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts"
    path.write_text("\n".join(f"{number}+{number * 7}={number * 8}" for number in range(40)))
    return path


@pytest.fixture(scope="module")
def quantised(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each family, with ``hf`` and what was made of it, ``out``."""
    root = tmp_path_factory.mktemp("per-tensor")
    options = ["--format", "fp8_tensor", "--calibration", str(texts)]
    commands = []
    for family in families():
        source = write_family(root / family / "hf", family, "bfloat16", num_hidden_layers=4)
        commands.append(["quantize", str(source), str(root / family / "out"), *options])
    codes, complaints = convert_each(*commands)
    assert codes == [0] * len(families()), complaints
    return root


@needs_quantizers
@pytest.mark.parametrize("family", families())
def test_what_is_quantised_comes_back_and_all_else_is_kept(family: str, quantised: Path) -> None:
    source, out = quantised / family / "hf", quantised / family / "out"
    original, found = tensors_of(source), tensors_of(out)
    hf_config = json.loads((source / "config.json").read_text())
    names = (fp8_names(hf_config) & original.keys()) - carried_names(hf_config)
    scales = {f"{name.removesuffix('weight')}{kind}" for name in names for kind in ("weight_scale", "input_scale")}
    assert found.keys() == original.keys() | scales
    for name, tensor in original.items():
        if name not in names:
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
            continue
        scale, weight = found[f"{name}_scale"].float(), tensor.float()
        assert found[name].dtype == FP8 and scale.numel() == 1
        bound = torch.maximum(weight.abs() / 16, weight.abs().max() / 448 / 1024) * 1.01
        assert (found[name].float() * scale - weight).abs().le(bound).all(), name
        assert not (found[name].float() * scale * 1.1 - weight).abs().le(bound).all(), name
        assert 0 < found[f"{name.removesuffix('weight')}input_scale"].float().item() < 1
    config = json.loads((out / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == hf_config and settings["quant_algo"] == "FP8"
    kept = {name.removesuffix(".weight") for name, tensor in original.items() if tensor.ndim == 2 and name not in names}
    assert kept <= set(settings["ignore"])
    assert {path.name for path in out.parent.iterdir()} == {"hf", "out"}


def test_wrong_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_family(tmp_path / "hf", "qwen3")
    (tmp_path / "empty").write_text("\n")
    for file, message in ((tmp_path / "empty", "has no texts"), (tmp_path / "absent", "cannot be read")):
        assert convert("quantize", source, tmp_path / "out", "--format", "fp8_tensor", "--calibration", file) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_options_that_do_not_go_together(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--format", "fp8_tensor"], "--calibration FILE goes with --format fp8_tensor"),
        (["--calibration", texts], "--calibration FILE goes with --format fp8_tensor"),
        (["--format", "fp8_tensor", "--calibration", texts, "--dequantize"], "--dequantize reads fp8_block"),
    ):
        assert convert("quantize", tmp_path, tmp_path / "out", *options) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_without_modelopt_the_extra_is_named(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)  # as where it is not installed
    source = write_family(tmp_path / "hf", "qwen3")
    assert convert("quantize", source, tmp_path / "out", "--format", "fp8_tensor", "--calibration", texts) == 2
    assert "pip install 'megasao[modelopt]'" in capsys.readouterr().err.replace("\n", " ")
