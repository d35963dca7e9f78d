"""What is at ``model.path``: a checkpoint, nothing yet, or something else, which is told and not passed over."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megasao.config.errors import ConfigError
from megasao.config.load import load_config
from megasao.config.model_check import check_model
from megasao.planning.plan import make_plan
from megasao.storage.hf_directory import INDEX
from tests.checkpoints import SHAPE, write_checkpoint

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop.yaml"


def checked(path: Path) -> bool:
    return check_model(load_config(LAPTOP, [f"model.path={path}"]))


def a_directory(path: Path) -> None:
    path.mkdir()


def with_config(content: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def linked_config(path: Path) -> None:
    path.mkdir()
    (path / "config.json").symlink_to("nowhere")


def looped_config(path: Path) -> None:
    path.mkdir()
    (path / "config.json").symlink_to("config.json")


NO_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file": (
        lambda path: path.write_text("x"),
        "is not a directory; give the directory of a Hugging Face checkpoint",
    ),
    "a link to nothing": (lambda path: path.symlink_to("nowhere"), "is not a directory; give"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "is not a directory; give"),
    "an empty directory": (a_directory, "is not a Hugging Face checkpoint: it has no config.json; give"),
    "config.json is a link to nothing": (linked_config, "it has no config.json; give"),
    "config.json is a link to itself": (looped_config, "config.json cannot be read: Too many levels of symbolic links"),
    "config.json is a directory": (
        lambda path: (path / "config.json").mkdir(parents=True),
        "config.json is not a file",
    ),
    "config.json is empty": (with_config(""), "config.json is not valid JSON: Expecting value"),
    "config.json is cut off": (with_config('{"model_type": '), "config.json is not valid JSON: Expecting value"),
    "config.json is a list": (with_config("[]"), "config.json is not a JSON object"),
    "config.json is a hundred thousand lists": (with_config("[" * 100_000), "config.json is not valid JSON: "),
    "config.json is no text": (with_config(b"\xff\xfe{}"), "config.json is not valid JSON: 'utf-8' codec"),
    "config.json has a byte order mark": (with_config("\ufeff{}"), "config.json begins with a byte order mark"),
    "config.json has a number of 5,000 digits": (
        with_config('{"num_hidden_layers": 1' + 5000 * "0" + "}"),
        "config.json is not valid JSON: Exceeds the limit",
    ),
    "config.json has layers that no model has": (
        with_config(json.dumps(SHAPE | {"num_nextn_predict_layers": 10_000})),
        "num_hidden_layers = 2 and num_nextn_predict_layers = 10000 are 10002 layers; expected up to 1000, "
        "far more than any model has; correct config.json, or copy it again",
    ),
    "config.json has experts that no model has": (
        with_config(json.dumps(SHAPE | {"num_hidden_layers": 100, "num_experts": 10_000})),
        "num_hidden_layers = 100, with num_experts = 10000, are 1000000 experts; expected up to 100000, far more",
    ),
    "config.json is of no model": (with_config("{}"), "model_type = None is not supported"),
}


@pytest.mark.parametrize("case", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_told(case: str, tmp_path: Path) -> None:
    make, message = NO_CHECKPOINTS[case]
    make(tmp_path / "model")
    with pytest.raises(ConfigError) as told:
        checked(tmp_path / "model")
    [problem] = told.value.problems
    assert problem.path == "model.path" and message in problem.reason and str(tmp_path / "model") in problem.reason
    with pytest.raises(ConfigError) as told:
        make_plan(load_config(LAPTOP, [f"model.path={tmp_path / 'model'}"]))
    [problem] = told.value.problems
    assert message in problem.reason and "planning needs the model's config.json" in problem.reason


def test_a_place_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "file" / "model", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be read: {reason}; give"):
            checked(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("what", ["model", "model/config.json"])
def test_what_may_not_be_read_is_told(what: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    (tmp_path / what).chmod(0)
    try:
        with pytest.raises(ConfigError, match=r"config\.json cannot be read: Permission denied"):
            checked(tmp_path / "model")
    finally:
        (tmp_path / what).chmod(0o700)


def test_nothing_there_yet_is_no_mistake(tmp_path: Path) -> None:
    assert not checked(tmp_path / "later")
    write_checkpoint(tmp_path / "model")
    assert checked(tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    assert checked(tmp_path / "link")
    text = (tmp_path / "model" / "config.json").read_text()
    (tmp_path / "model" / "config.json").write_bytes(text.replace(",", ",\r\n").encode())
    assert checked(tmp_path / "model"), "lines end as on Windows"


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the weights; the numbers are holes, so any place will do."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def wider(header: dict[str, Any]) -> None:
    """Every expert's down_proj is transposed, so that its bytes are as many."""
    for name, entry in header.items():
        if name.endswith("down_proj.weight"):
            entry["shape"].reverse()


def with_index(**files: str) -> Callable[[Path], Any]:
    return lambda path: (path / INDEX).write_text(json.dumps({"weight_map": files}))


WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "wrong in every layer": (
        lambda path: rewrite(path, wider),
        "down_proj.weight of shape (96, 32); expected (32, 96) by its config.json: (hidden_size, moe_inter",
    ),
    "a tensor is gone": (
        lambda path: rewrite(path, lambda header: header.pop("model.layers.1.mlp.gate.weight")),
        "lacks 1 tensor(s), first model.layers.1.mlp.gate.weight",
    ),
    "a file is gone": (with_index(a="model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors is missing"),
    "a file is elsewhere": (with_index(a="../model.safetensors"), "outside of its directory"),
    "a file is absolute": (with_index(a="/model.safetensors"), "outside of its directory"),
    "in FP8": (
        lambda path: (path / "config.json").write_text(
            json.dumps(SHAPE | {"quantization_config": {"quant_method": "fp8"}})
        ),
        "`megasao convert quantize --dequantize` makes one",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_training_would_refuse_are_told(case: str, tmp_path: Path) -> None:
    spoil, message = WEIGHTS[case]
    write_checkpoint(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(ConfigError) as told:
        checked(tmp_path / "model")
    assert message in str(told.value)
