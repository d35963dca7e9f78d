"""A whole SAO step (values, GAE, two critic updates, DIS) does not depend on the parallel layout or on the packing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.tiny import write_tiny_checkpoint
from tests.megatron.world import run_world

pytestmark = pytest.mark.world
STEPS = 3

LAYOUTS = {
    "DP2": {"ranks": 2},
    "EP2": {"ranks": 2, "expert": 2},
    "TP2 SP EP2": {"ranks": 2, "tensor": 2, "sequence": True, "expert": 2},
    "TP2 SP ETP2": {"ranks": 2, "tensor": 2, "sequence": True, "expert_tensor": 2},
    "TP2 SP EP2 ETP2": {"ranks": 4, "tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
}


class Outcome:
    """Metrics of each step, and tensors at the end."""

    def __init__(self, metrics: list[dict[str, Any]], out: Path) -> None:
        self.metrics = metrics
        self.tensors = {
            f"{role}-{kind}": load_file(out / f"{role}-{kind}.safetensors")
            for role in ("actor", "critic")
            for kind in ("weights", "gradients")
        }


def run(path: Path, out: Path, parallel: dict[str, Any], **payload: Any) -> Outcome:
    out.mkdir()
    whole = {"path": str(path), "out": str(out), "steps": STEPS, "settings": {"parallel": parallel}, **payload}
    results = run_world(parallel["ranks"], "tests.training.cases:sao_steps", whole)
    assert all(result == results[0] for result in results), "ranks disagree on the step's metrics"
    return Outcome(results[0], out)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(checkpoint, tmp_path_factory.mktemp("reference") / "out", {"ranks": 1})


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def check_equal(outcome: Outcome, reference: Outcome) -> None:
    """Losses and gradients of the first step to rounding; weights after all steps."""
    for name in ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "critic/value_mean"):
        for step in range(STEPS):
            got, expected = outcome.metrics[step][name], reference.metrics[step][name]
            assert got == pytest.approx(expected, rel=1e-5, abs=2e-6), (name, step)
    for name in ("actor/masked_low", "actor/masked_high"):
        assert outcome.metrics[0][name] == reference.metrics[0][name]
    for role in ("actor", "critic"):
        largest = max(float(g.abs().max()) for g in reference.tensors[f"{role}-gradients"].values())
        gap = difference(outcome.tensors[f"{role}-gradients"], reference.tensors[f"{role}-gradients"])
        assert gap < 2e-5 * largest, (role, gap, largest)
        assert difference(outcome.tensors[f"{role}-weights"], reference.tensors[f"{role}-weights"]) < 1e-5, role


def test_the_reference_trains_both_roles(reference: Outcome) -> None:
    first = reference.metrics[0]
    assert first["critic/value_mean"] == pytest.approx(0.5)
    assert first["actor/grad_norm"] > 1e-3
    assert first["critic/grad_norm"] > 1e-3
    assert 0 < first["actor/masked_low"] < 0.5
    assert 0 < first["actor/masked_high"] < 0.5
    assert reference.metrics[-1]["critic/value_mean"] != first["critic/value_mean"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str, checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    check_equal(run(checkpoint, tmp_path / "out", LAYOUTS[name]), reference)


def test_many_short_rows_equal_one_long_row(checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    check_equal(run(checkpoint, tmp_path / "out", {"ranks": 2}, token_budget=64), reference)


def test_a_local_denominator_is_noticed(checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    wrong = run(checkpoint, tmp_path / "out", {"ranks": 2}, mutation="local_denominator")
    with pytest.raises(AssertionError):
        check_equal(wrong, reference)
