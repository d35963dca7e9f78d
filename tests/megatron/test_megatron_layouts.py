"""Every parallel layout gives the loss, the gradients, the norm and the weights of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.tiny import random_sequences, read
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"ranks": 2},
    "EP2": {"ranks": 2, "expert": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
    "TP2 SP": {"ranks": 2, "tensor": 2, "sequence": True, "expert_tensor": 2},
    "TP2 SP EP2": {"ranks": 2, "tensor": 2, "sequence": True, "expert": 2},
    "TP2 SP EP2 ETP2": {"ranks": 4, "tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2},
    "TP2 SP PP2 EP2": {"ranks": 4, "tensor": 2, "sequence": True, "pipeline": 2, "expert": 2},
    "DP2 PP2": {"ranks": 4, "pipeline": 2},
}
STEPS = 3


def train(path: Path, out: Path, role: str, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Three Adam steps under a layout: report (rank 0's, after checking that all agree), gradients, weights."""
    out.mkdir()
    payload = {"path": str(path), "out": str(out), "role": role, "parallel": layout, "steps": STEPS, **more}
    reports = run_world(layout["ranks"], "tests.megatron.cases:train", payload)
    assert all(report == reports[0] for report in reports), "ranks disagree on losses or gradient norms"
    return {"report": reports[0], "gradients": read(out, "gradients"), "weights": read(out, "weights")}


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process, actor and critic."""
    root = tmp_path_factory.mktemp("reference")
    return {role: train(checkpoint, root / role, role, {"ranks": 1}) for role in ("actor", "critic")}


def differences(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Largest differences; gradients relative to the largest gradient."""
    assert result["gradients"].keys() == expected["gradients"].keys()
    assert result["weights"].keys() == expected["weights"].keys()
    largest = max(tensor.abs().max().item() for tensor in expected["gradients"].values())
    pairs = list(zip(result["report"], expected["report"], strict=True))
    return {
        "loss": max(abs(ours[0] - theirs[0]) for ours, theirs in pairs),
        "norm": max(abs(ours[1] / theirs[1] - 1) for ours, theirs in pairs),
        "gradients": _largest_difference(result["gradients"], expected["gradients"]) / largest,
        "weights": _largest_difference(result["weights"], expected["weights"]),
    }


def _largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def agrees(found: dict[str, float]) -> bool:
    """The bounds: rounding in fp32."""
    return found["loss"] < 2e-6 and found["norm"] < 2e-6 and found["gradients"] < 2e-6 and found["weights"] < 1e-6


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_equals_one_process(
    checkpoint: Path, tmp_path: Path, reference: dict[str, dict[str, Any]], role: str, layout: dict[str, Any]
) -> None:
    found = differences(train(checkpoint, tmp_path / "run", role, layout), reference[role])
    print(found)
    assert agrees(found), found


@pytest.mark.parametrize(
    ("layout", "mutation"), [("DP2", "scale"), ("EP2", "swap")], ids=["averaged gradients", "experts exchanged"]
)
def test_mistakes_are_rejected(
    checkpoint: Path, tmp_path: Path, reference: dict[str, dict[str, Any]], layout: str, mutation: str
) -> None:
    result = train(checkpoint, tmp_path / "run", "actor", LAYOUTS[layout], mutation=mutation)
    found = differences(result, reference["actor"])
    assert not agrees(found)
    assert found["gradients"] > 1e-3


def test_frozen_attention_does_not_move(checkpoint: Path, reference: dict[str, dict[str, Any]]) -> None:
    from safetensors.torch import load_file

    initial, critic = load_file(checkpoint / "model.safetensors"), reference["critic"]
    for name, weight in critic["weights"].items():
        if name.startswith("value_head."):
            assert weight.abs().max() > 1e-4, name
        elif ".mlp." in name:
            assert not torch.equal(weight, initial[name]), f"{name} did not move"
        else:
            assert torch.equal(weight, initial[name]), f"{name} is frozen but moved"
    trained = {name for name in critic["gradients"]}
    assert trained == {name for name in critic["weights"] if ".mlp." in name or name.startswith("value_head.")}


def test_unfrozen_critic_moves_everywhere(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    result = train(checkpoint, tmp_path / "run", "critic", {"ranks": 1}, critic={"freeze_attention": False})
    initial = load_file(checkpoint / "model.safetensors")
    for name, weight in result["weights"].items():
        assert name.startswith("value_head.") or not torch.equal(weight, initial[name]), name


def test_rank_without_tokens(checkpoint: Path, tmp_path: Path) -> None:
    gradients = []
    for layout in ({"ranks": 1}, {"ranks": 2}, {"ranks": 2, "expert": 2}):
        payload = {"path": str(checkpoint), "parallel": layout, "out": str(tmp_path)}
        run_world(layout["ranks"], "tests.megatron.cases:idle_rank", payload)
        gradients.append(read(tmp_path, "gradients"))
    largest = max(tensor.abs().max().item() for tensor in gradients[0].values())
    for other in gradients[1:]:
        assert _largest_difference(other, gradients[0]) < 2e-6 * largest


def test_split_into_rows_changes_no_gradient(checkpoint: Path, tmp_path: Path) -> None:
    sequences, gradients, counts = random_sequences(6, seed=9), [], []
    for layout, size in (({"ranks": 1}, 6), ({"ranks": 1}, 1), ({"ranks": 2}, 3), ({"ranks": 2, "pipeline": 2}, 2)):
        payload = {"path": str(checkpoint), "parallel": layout, "out": str(tmp_path)}
        payload |= {"sequences": sequences, "sequences_per_row": size}
        counts += run_world(layout["ranks"], "tests.megatron.cases:split_gradients", payload)
        gradients.append(read(tmp_path, "gradients"))
    assert counts == [1, 6, 1, 1, 3, 3]
    largest = max(tensor.abs().max().item() for tensor in gradients[0].values())
    for other in gradients[1:]:
        assert _largest_difference(other, gradients[0]) < 2e-6 * largest


def test_unequal_row_counts_are_an_error(checkpoint: Path) -> None:
    payload = {"path": str(checkpoint), "parallel": {"ranks": 2}}
    for message in run_world(2, "tests.megatron.cases:unequal_rows", payload):
        assert "between 1 and 2 rows" in message


def test_gradient_that_is_not_finite_updates_nothing(checkpoint: Path) -> None:
    [[message, unchanged]] = run_world(1, "tests.megatron.cases:not_finite", {"path": str(checkpoint)})
    assert "gradient norm is nan" in message
    assert unchanged
