"""What is wrong is told before work begins, with exit code 2, and nothing is left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasao.storage.hf_directory import INDEX
from tests.conversion.support import convert, write_family


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In FP8, over several files with an index."""
    directory = tmp_path_factory.mktemp("refusals")
    assert (
        convert("quantize", write_family(directory / "hf", "qwen3_moe"), directory / "fp8", "--shard-gb", "0.0002") == 0
    )
    return directory / "fp8"


def first_file(path: Path) -> Path:
    return sorted(path.glob("model-*.safetensors"))[0]


def truncate(path: Path) -> None:
    file = first_file(path)
    file.write_bytes(file.read_bytes()[:-10])


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def change_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None], *, index: bool = True) -> None:
    """Change the tensors of the first file, and the index with them."""
    file = first_file(path)
    tensors = load_file(file)
    before = set(tensors)
    change(tensors)
    save_file(tensors, file)
    if index:
        content = json.loads((path / INDEX).read_text())
        places = {name: where for name, where in content["weight_map"].items() if name not in before - set(tensors)}
        content["weight_map"] = places | dict.fromkeys(tensors, file.name)
        (path / INDEX).write_text(json.dumps(content))


def some(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


def without(ending: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[some(tensors, ending)]

    return drop


def with_another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["new"] = torch.zeros(1)


def transpose_a_scale(tensors: dict[str, torch.Tensor]) -> None:
    name = some(tensors, "_scale_inv")
    tensors[name] = torch.ones(2, 1)


def cut_a_norm(tensors: dict[str, torch.Tensor]) -> None:
    name = some(tensors, "layernorm.weight")
    tensors[name] = tensors[name][1:].contiguous()


def flatten_a_weight(tensors: dict[str, torch.Tensor]) -> None:
    name = some(tensors, "k_proj.weight")
    tensors[name] = tensors[name].reshape(-1)


def whole_numbers(ending: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def convert_one(tensors: dict[str, torch.Tensor]) -> None:
        name = some(tensors, ending)
        tensors[name] = tensors[name].to(torch.int8)

    return convert_one


def spoil_a_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[some(tensors, "_scale_inv")].view(-1)[0] = torch.nan


def exchange_in_the_index(path: Path) -> None:
    content = json.loads((path / INDEX).read_text())
    first, *others = sorted(set(content["weight_map"].values()))
    name = next(name for name, file in content["weight_map"].items() if file == first)
    content["weight_map"][name] = others[0]
    (path / INDEX).write_text(json.dumps(content))


def move_away(path: Path, place: str) -> None:
    content = json.loads((path / INDEX).read_text())
    first = first_file(path).name
    content["weight_map"] = {name: place if file == first else file for name, file in content["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(content))


def repeat_a_tensor(path: Path) -> None:
    first, second = sorted(path.glob("model-*.safetensors"))[:2]
    save_file({**load_file(second), "lm_head.weight": load_file(first)["lm_head.weight"]}, second)


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated file": (truncate, "is truncated: it has"),
    "missing shard": (lambda path: first_file(path).unlink(), "is not a complete Hugging Face checkpoint: model-00001"),
    "index is no JSON": (lambda path: (path / INDEX).write_text("{"), f"{INDEX} is not valid JSON: "),
    "index with a byte order mark": (
        lambda path: (path / INDEX).write_bytes(b"\xef\xbb\xbf" + (path / INDEX).read_bytes()),
        f"{INDEX} begins with a byte order mark",
    ),
    "index of a file elsewhere": (lambda path: move_away(path, "../elsewhere.safetensors"), "outside of its directory"),
    "index of a place of this machine": (lambda path: move_away(path, "/elsewhere.safetensors"), "outside of its dir"),
    "tensor in two files": (repeat_a_tensor, "lm_head.weight is in two files, "),
    "file is a directory": (
        lambda path: (first_file(path).unlink(), (path / "model-00001-of-00003.safetensors").mkdir())[1],
        "is not a complete Hugging Face checkpoint: model-00001",
    ),
    "fewer tensors than layers": (lambda path: change_config(path, num_hidden_layers=999), "each need more"),
    "blocks are flags": (
        lambda path: change_config(
            path, quantization_config={"quant_method": "fp8", "weight_block_size": [True, True]}
        ),
        "weight_block_size = [True, True]; expected",
    ),
    "pointer": (
        lambda path: first_file(path).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is only a pointer of Git LFS; fetch the file itself with `git lfs pull`",
    ),
    "index of other files": (exchange_in_the_index, f"as {INDEX} says"),
    "index without a name": (
        lambda path: (path / INDEX).write_text('{"weight_map": {"a": null}}'),
        f"{INDEX} says None for a; expected the name of a file",
    ),
    "no index": (lambda path: (path / INDEX).unlink(), f"model.safetensors is missing, and so is {INDEX}"),
    "index without files": (lambda path: (path / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
    "no config": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "unknown family": (lambda path: change_config(path, model_type="gpt2"), "'gpt2' is not supported"),
    "another family": (
        lambda path: change_config(path, model_type="llama", num_experts=0),
        "lacks 9 tensor(s), first model.layers.0.mlp.down_proj.weight (nearest: ",
    ),
    "another size": (
        lambda path: change_config(path, vocab_size=33),
        "lm_head.weight of shape (32, 64); expected (33, 64)",
    ),
    "more layers": (lambda path: change_config(path, num_hidden_layers=5), "lacks"),
    "another quantisation": (lambda path: change_config(path, quantization_config={"quant_method": "awq"}), "'awq'"),
    "quantisation is a word": (lambda path: change_config(path, quantization_config="fp8"), "quant_method = None"),
    "blocks are a number": (
        lambda path: change_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": 128}),
        "weight_block_size = 128; expected 'fp8' in blocks such as [128, 128]",
    ),
    "dense layers are a word": (lambda path: change_config(path, mlp_only_layers="1"), "a list of whole numbers"),
    "kinds of fewer layers": (
        lambda path: change_config(path, mlp_layer_types=["sparse"]),
        "one entry for each of num_hidden_layers = 4",
    ),
    "a count is a word": (lambda path: change_config(path, decoder_sparse_step="1"), "expected a whole number"),
    "layers that no model has": (
        lambda path: change_config(path, num_nextn_predict_layers=10_000),
        "num_hidden_layers = 4 and num_nextn_predict_layers = 10000 are 10004 layers; expected up to 1000",
    ),
    "rotation is a word": (
        lambda path: change_config(path, rope_parameters="default"),
        "rotary embedding's settings are 'default'; expected an object",
    ),
    "no quantisation": (
        lambda path: change_config(path, quantization_config=None),
        "but config.json has no quantization",
    ),
    "tensor gone": (
        lambda path: change_tensors(path, without("layernorm.weight")),
        "lacks 1 tensor(s), first model.layers.",
    ),
    "index stale": (
        lambda path: change_tensors(path, without("weight"), index=False),
        f"which {INDEX} has in model-00001",
    ),
    "not in the index": (
        lambda path: change_tensors(path, with_another, index=False),
        f"has the tensor new, which {INDEX} does not list",
    ),
    "tensor extra": (
        lambda path: change_tensors(path, lambda tensors: tensors.update(new=torch.zeros(1))),
        "1 unknown",
    ),
    "scale gone": (
        lambda path: change_tensors(path, without("_scale_inv")),
        "in FP8 without its",
    ),
    "scale transposed": (lambda path: change_tensors(path, transpose_a_scale), "blocks of (128, 128) needs (1, 1)"),
    "tokenizer elsewhere": (
        lambda path: ((path / "tokenizer.json").unlink(), (path / "tokenizer.json").symlink_to("absent"))[1],
        "has tokenizer.json, which cannot be read",
    ),
    "scale is NaN": (lambda path: change_tensors(path, spoil_a_scale), "_scale_inv that is infinite or NaN"),
    "scale of whole numbers": (lambda path: change_tensors(path, whole_numbers("_scale_inv")), "_scale_inv in int8"),
    "weight of whole numbers": (lambda path: change_tensors(path, whole_numbers("norm.weight")), "expected float32"),
    "weight in a row": (lambda path: change_tensors(path, flatten_a_weight), "only matrices have blocks"),
    "shape unlike the others": (
        lambda path: change_tensors(path, cut_a_norm),
        "of shape (63,); expected (64,) by its config.json: (hidden_size), with hidden_size = 64",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("command", ["hf-to-megatron", "quantize --dequantize"])
def test_wrong_sources(
    sharded: Path, tmp_path: Path, case: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = WRONG[case]
    shutil.copytree(sharded, tmp_path / "source")
    spoil(tmp_path / "source")
    assert convert(*command.split(), tmp_path / "source", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error and str(tmp_path / "source") in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_wrong_places(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "there").mkdir()
    assert convert("hf-to-megatron", sharded, tmp_path / "there") == 2
    assert "exists already" in capsys.readouterr().err
    assert convert("hf-to-megatron", sharded, tmp_path / "no" / "out") == 2
    assert f"{tmp_path / 'no'} is not a directory" in capsys.readouterr().err
    assert convert("hf-to-megatron", tmp_path / "absent", tmp_path / "out") == 2
    assert "is not a directory; give a Hugging Face" in capsys.readouterr().err
    assert convert("hf-to-megatron", "zai-org/GLM-5", tmp_path / "out") == 2
    assert "zai-org/GLM-5 is not a directory; give a Hugging Face checkpoint directory" in capsys.readouterr().err
    assert convert("hf-to-megatron", sharded, tmp_path / ("x" * 300)) == 2
    assert "File name too long; it must be there" in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / ".out.partial").touch()
    assert convert("hf-to-megatron", sharded, tmp_path / "out") == 2
    assert "out.partial is in the way of the directory" in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / ".out.partial").unlink()
    free = shutil.disk_usage(tmp_path)._replace(free=67_200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert convert("hf-to-megatron", sharded, tmp_path / "out") == 2
    assert "has 0.07 GB free, and 0.07 GB are needed" in capsys.readouterr().err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_looks_odd_and_is_right(sharded: Path, tmp_path: Path) -> None:
    """Links as in the cache of the hub, lines that end as on Windows, a size of the index that nothing needs."""
    source = tmp_path / "source"
    shutil.copytree(sharded, tmp_path / "blobs")
    source.mkdir()
    content = json.loads((sharded / INDEX).read_text())
    (tmp_path / "blobs" / INDEX).write_text(json.dumps({**content, "metadata": {"total_size": 1}}))
    text = (sharded / "config.json").read_bytes()
    (tmp_path / "blobs" / "config.json").write_bytes(text.replace(b"\n", b"\r\n"))
    for file in (tmp_path / "blobs").iterdir():
        (source / file.name).symlink_to(Path("..", "blobs", file.name))
    assert convert("hf-to-megatron", source, source / "inside") == 0
    assert convert("hf-to-megatron", sharded, tmp_path / "plain") == 0
    assert convert("verify", source / "inside", tmp_path / "plain") == 0


def test_wrong_direction_of_fp8(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("quantize", sharded, tmp_path / "out") == 2
    assert "is in FP8 already; --dequantize" in capsys.readouterr().err
    assert convert("quantize", sharded, tmp_path / "plain", "--dequantize") == 0
    assert convert("quantize", tmp_path / "plain", tmp_path / "out", "--dequantize") == 2
    assert "is not in FP8" in capsys.readouterr().err
    change_config(tmp_path / "plain", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert convert("quantize", tmp_path / "plain", tmp_path / "out", "--dequantize") == 2
    assert "has no tensor in FP8, but config.json has quantization_config" in capsys.readouterr().err


def test_wrong_training_checkpoints(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good"
    assert convert("hf-to-megatron", sharded, good, "--shard-gb", "0.0005") == 0
    assert convert("megatron-to-hf", sharded, tmp_path / "out") == 2
    assert "is a Hugging Face directory, not a training checkpoint; hf-to-megatron" in capsys.readouterr().err
    assert convert("hf-to-megatron", good, tmp_path / "out") == 2
    assert "is a training checkpoint, not a Hugging Face directory; megatron-to-hf" in capsys.readouterr().err
    damaged = good / "part-00001.safetensors"

    def flip(path: Path) -> None:
        data = bytearray((path / damaged.name).read_bytes())
        data[-1] ^= 1
        (path / damaged.name).write_bytes(data)

    cases: list[tuple[Callable[[Path], None], str]] = [
        (flip, "part-00001.safetensors is damaged: its length or checksum"),
        (lambda path: (path / damaged.name).unlink(), "part-00001.safetensors is missing"),
        (lambda path: (path / "part-00001.sum.json").unlink(), "part-00001.sum.json is missing"),
        (lambda path: (path / "manifest.json").unlink(), "is not a training checkpoint"),
        (lambda path: (path / "manifest.json").write_text('{"format": "other"}'), "format 'other' is not supported"),
        (lambda path: (path / "manifest.json").write_text(""), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is not a JSON object"),
        (lambda path: change_manifest(path, parts=[]), "parts = []; expected role and files"),
        (lambda path: change_manifest(path, parts=["../part-00000.safetensors"]), "expected role and files"),
        (lambda path: change_manifest(path, role="x"), "has role = 'x'"),
        (lambda path: change_manifest(path, parts=["part-00000.safetensors"]), "tensor(s), first "),
        (lambda path: (path / "hf" / "config.json").write_text(""), "config.json is not valid JSON"),
        (lambda path: shutil.rmtree(path / "hf"), "say with --model"),
    ]
    for number, (spoil, message) in enumerate(cases):
        path = tmp_path / str(number)
        shutil.copytree(good, path)
        spoil(path)
        assert convert("megatron-to-hf", path, tmp_path / "out") == 2
        assert message in capsys.readouterr().err.replace("\n", " "), message
        assert not list(tmp_path.glob("*out*"))
    other = write_family(tmp_path / "other", "qwen3")
    assert convert("megatron-to-hf", good, tmp_path / "out", "--model", other) == 2
    assert f"is not a checkpoint of {other}" in capsys.readouterr().err.replace("\n", " ")
