"""A run saved under one layout goes on under another, with everything; what cannot be trusted is refused or skipped."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.tiny import read_torch_dist, write_tiny_checkpoint
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

SPLIT = {"distributed_optimizer": True, "overlap": True}
CHAIN: dict[str, dict[str, Any]] = {
    "TP2 PP2 EP2": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2, "expert": 2},
    "DP2 EP2": {"ranks": 2, "expert": 2, **SPLIT},
    "one": {"ranks": 1},
    "PP2 VPP2": {"ranks": 2, "pipeline": 2, "virtual_pipeline": 2},
}
FORMATS = ["safetensors", "torch_dist"]
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4, "warmup_steps": 3, "decay_start": 0.05}
SETTINGS = {
    "actor": {"optimizer": OPTIMIZER},
    "critic": {"optimizer": OPTIMIZER, "warmup_steps": 0, "head_bias": 0.5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def train(model: Path, run: Path, until: int, parallel: dict[str, Any], out: Path, **payload: Any) -> list[Any]:
    out.mkdir(exist_ok=True)
    whole = {"path": str(model), "run": str(run), "until": until, "out": str(out), **payload}
    whole["settings"] = {**SETTINGS, "parallel": parallel}
    return run_world(parallel["ranks"], "tests.training.cases:train_and_save", whole)


def states(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor that a run checkpoint holds of its models."""
    return {
        f"{role}:{name}": tensor
        for role in ("actor", "critic")
        for name, tensor in model_state(checkpoint / role).items()
    }


def model_state(directory: Path) -> dict[str, torch.Tensor]:
    """A model's part of it, in either format."""
    if (directory / ".metadata").exists():
        return read_torch_dist(directory)
    parts = sorted(directory.glob("part-*.safetensors"))
    return {name: tensor for part in parts for name, tensor in load_file(part).items()}


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("form", FORMATS)
def test_a_run_moves_through_four_layouts(model: Path, tmp_path: Path, form: str) -> None:
    """Two steps in each; the losses, weights and Adam states are those of a run that never moved."""
    [whole] = train(model, tmp_path / "whole", 8, {"ranks": 1}, tmp_path / "expected", format=form)
    moved: list[float] = []
    for number, parallel in enumerate(CHAIN.values(), start=1):
        answers = train(model, tmp_path / "moved", 2 * number, parallel, tmp_path / "got", format=form)
        assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
        assert answers[0]["step"] == 2 * number and len(answers[0]["losses"]) == 2
        moved += answers[0]["losses"]
    assert moved == pytest.approx(whole["losses"], abs=2e-6)
    expected, got = (states(tmp_path / name / "checkpoints" / "step_000008") for name in ("whole", "moved"))
    weights = [name for name in expected if "exp_avg" not in name]
    assert len(weights) < len([name for name in expected if "exp_avg" in name]) < 2 * len(weights), "some are frozen"
    assert difference(got, expected) < 1e-6
    # Control: one step more or less is another state.
    assert difference(got, states(tmp_path / "moved" / "checkpoints" / "step_000006")) > 1e-4


def test_every_layout_loads_every_bit(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(model, run, 1, CHAIN["TP2 PP2 EP2"], tmp_path / "out")
    saved = states(run / "checkpoints" / "step_000001")
    for parallel in CHAIN.values():
        answers = train(model, run, 1, parallel, tmp_path / "out")
        assert answers[0]["losses"] == [] and answers[0]["step"] == 1
        for role in ("actor", "critic"):
            for name, tensor in load_file(tmp_path / "out" / f"{role}-weights.safetensors").items():
                assert torch.equal(tensor, saved[f"{role}:weight:{name}"]), name


@pytest.mark.parametrize(
    ("parallel", "form"),
    [({"ranks": 1}, "safetensors"), (CHAIN["DP2 EP2"], "safetensors"), (CHAIN["DP2 EP2"], "torch_dist")],
    ids=["one", "DP2 EP2", "DP2 EP2 torch_dist"],
)
def test_what_is_saved_is_the_state_at_the_beginning(
    model: Path, tmp_path: Path, parallel: dict[str, Any], form: str
) -> None:
    """Training goes on while it is written; and resumed on the same layout it is the same, bit for bit."""
    train(model, tmp_path / "sync", 2, parallel, tmp_path / "out", format=form)
    answers = train(model, tmp_path / "async", 2, parallel, tmp_path / "later", more=2, format=form)
    begun, synchronous = (states(tmp_path / name / "checkpoints" / "step_000002") for name in ("async", "sync"))
    assert all(torch.equal(begun[name], synchronous[name]) for name in synchronous)
    resumed = train(model, tmp_path / "async", 4, parallel, tmp_path / "resumed")
    assert resumed[0]["losses"] == answers[0]["losses"][2:]
    for role in ("actor", "critic"):
        later, again = (load_file(tmp_path / name / f"{role}-weights.safetensors") for name in ("later", "resumed"))
        assert all(torch.equal(later[name], again[name]) for name in later)


@pytest.mark.parametrize(("form", "name"), [("safetensors", "part-00001.safetensors"), ("torch_dist", "__1_0.distcp")])
def test_a_damaged_file_is_refused_by_name_on_every_rank(model: Path, tmp_path: Path, form: str, name: str) -> None:
    train(model, tmp_path / "run", 1, CHAIN["DP2 EP2"], tmp_path / "out", format=form)
    part = tmp_path / "run" / "checkpoints" / "step_000001" / "critic" / name
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    for parallel in ({"ranks": 1}, CHAIN["DP2 EP2"]):
        for answer in train(model, tmp_path / "run", 2, parallel, tmp_path / "out"):
            assert f"{part} is damaged" in answer["refused"]


def test_an_incomplete_checkpoint_is_skipped_with_a_message(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path / "run", 1, {"ranks": 1}, tmp_path / "out")
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(checkpoints / "step_000001", checkpoints / "step_000002")
    (checkpoints / "step_000002" / "COMPLETE").unlink()
    [answer] = train(model, tmp_path / "run", 1, {"ranks": 1}, tmp_path / "out")
    assert answer["messages"] == ["checkpoint step_000002 was not completed (no file COMPLETE) and is skipped"]
    assert answer["step"] == 1


@pytest.mark.parametrize("form", FORMATS)
def test_a_rank_that_cannot_write_fails_every_rank(model: Path, tmp_path: Path, form: str) -> None:
    answers = train(model, tmp_path / "run", 1, CHAIN["DP2 EP2"], tmp_path / "out", damage=1, format=form)
    for answer in answers:
        assert "rank 1 could not write" in answer["failed"] and "step_000001" in answer["failed"]
    assert "No space left on device" in answers[1]["failed"]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not (checkpoints / "latest").exists() and not list(checkpoints.glob("*/COMPLETE"))


def test_a_checkpoint_says_what_it_holds(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path / "run", 1, CHAIN["DP2 EP2"], tmp_path / "out")
    directory = tmp_path / "run" / "checkpoints" / "step_000001"
    names = {path.name for path in directory.iterdir()}
    documents = {"trainer.json", "estimator.json", "controller.json", "COMPLETE"}
    assert names == {"actor", "critic", "rng-0.safetensors", "rng-1.safetensors"} | documents
    assert json.loads((directory / "controller.json").read_text()) == {"step": 1}
    assert set(load_file(directory / "rng-0.safetensors")) >= {"torch", "megatron:model-parallel-rng"}
