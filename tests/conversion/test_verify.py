"""What comparing two checkpoints tells."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.support import convert


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


def test_every_kind_of_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5)
    touched = weight.clone()
    touched[3, 2] += 0.5
    touched[6, 4] = float("nan")
    a = write(tmp_path / "a", same=weight, mine=weight, shape=weight, dtype=weight, value=weight, half=torch.ones(2, 2))
    b = write(
        tmp_path / "b",
        same=weight.clone(),
        theirs=weight,
        shape=weight[:6].contiguous(),
        dtype=weight.bfloat16(),
        value=touched,
        half=torch.ones(2, 2, dtype=torch.float16),
    )
    assert convert("verify", a, b) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"mine: only in {a}" in lines and f"theirs: only in {b}" in lines
    assert "shape: shape (7, 5), other (6, 5)" in lines
    assert "half: dtype float32, other float16; values equal" in lines
    [value] = [line for line in lines if line.startswith("value:")]
    assert "2 of 35 numbers differ, first at [3, 2], by at most 0.5;" in value
    [dtype] = [line for line in lines if line.startswith("dtype:")]
    assert "dtype float32, other bfloat16; 35 of 35 numbers differ, first at [0, 0]" in dtype
    assert lines[-1] == "different: 6 tensors; 5 are in both"
    assert not any(line.startswith("same") for line in lines)


def test_bits_are_compared_not_numbers(tmp_path: Path) -> None:
    rest = {"b": torch.zeros(()), "c": torch.zeros(0, 3)}
    special = torch.tensor([0.0, float("nan"), float("inf"), 1e-45])
    a = write(tmp_path / "a", a=special, **rest)
    same = write(tmp_path / "same", a=special, **rest)
    negative = write(tmp_path / "negative", a=special * torch.tensor([-1.0, 1, 1, 1]), **rest)
    denormal = write(tmp_path / "denormal", a=special * torch.tensor([1.0, 1, 1, 0]), **rest)
    assert [convert("verify", a, other) for other in (same, negative, denormal)] == [0, 1, 1]


def test_the_last_number_of_a_tensor_of_many_pieces_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megasao.conversion.verify._PIECE", 1000)
    weight = torch.randn(300, 20)
    touched = weight.clone()
    touched[299, 19] += 1
    a, b = write(tmp_path / "a", w=weight), write(tmp_path / "b", w=touched)
    assert convert("verify", a, a) == 0
    assert convert("verify", a, b) == 1
    assert "w: 1 of 6000 numbers differ, first at [299, 19], by at most 1;" in capsys.readouterr().out


def test_what_is_not_there_or_not_whole_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good", a=torch.zeros(4))
    (tmp_path / "cut").write_bytes(good.read_bytes()[:-1])
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "cut", "is truncated"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "empty", "is not a training checkpoint"),
    ):
        assert convert("verify", good, path) == 2
        assert message in capsys.readouterr().err


def test_how_a_checkpoint_is_cut_into_files_does_not_matter(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    tensors = {"a": torch.randn(3), "b": torch.randn(4)}
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    for number, name in enumerate(tensors, 1):
        save_file({name: tensors[name]}, tmp_path / "two" / f"model-{number}.safetensors")
    (tmp_path / "two" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    assert convert("verify", tmp_path / "one", tmp_path / "two") == 0
    shutil.copy(tmp_path / "two" / "model-1.safetensors", tmp_path / "c")
    assert load_file(tmp_path / "c").keys() == {"a"}
    assert convert("verify", tmp_path / "one", tmp_path / "c") == 1
