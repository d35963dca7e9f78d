"""The whole SAO step of a GLM-5.2-shaped model is the same under every layout.

Latent attention with an indexer whose selection other layers share, three dense layers, a sigmoid router with a float32
bias and a shared expert; the checkpoint carries a multi-token-prediction layer.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.tiny_families import write_tiny_family
from tests.training import test_sao_step_layouts as sao
from tests.training.test_sao_step_layouts import Outcome, run

pytestmark = pytest.mark.world
SP = {"tensor": 2, "sequence": True}
SPLIT = {"distributed_optimizer": True, "overlap": True}
PP2 = {"pipeline": 2, "pipeline_layers": [6, 2]}
"""The second stage starts on layer 6, which has an indexer."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 SP PP2 EP2": {"ranks": 4, **SP, **PP2, "expert": 2},
    "EP2 allgather, distributed optimizer, overlap": {"ranks": 2, "expert": 2, "dispatcher": "allgather", **SPLIT},
    "CP2 PP2 EP2 distributed optimizer, overlap": {"ranks": 4, "context": 2, **PP2, "expert": 2, **SPLIT},
}
MORE_LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"ranks": 2},
    "DP2 distributed optimizer, overlap": {"ranks": 2, **SPLIT},
    "EP2": {"ranks": 2, "expert": 2},
    "EP2 DP4 distributed optimizer": {"ranks": 4, "expert": 2, "distributed_optimizer": True},
    "TP2 SP ETP2": {"ranks": 2, **SP, "expert_tensor": 2},
    "TP2 SP EP2 ETP2": {"ranks": 4, **SP, "expert": 2, "expert_tensor": 2},
    "PP2 6+2": {"ranks": 2, **PP2},
    "PP2 2+6": {"ranks": 2, "pipeline": 2, "pipeline_layers": [2, 6]},
    "PP2 EP2 DP2": {"ranks": 4, **PP2, "expert": 2, **SPLIT},
    "TP2 SP PP2 EP2 DP2 distributed optimizer, overlap": {"ranks": 8, **SP, **PP2, "expert": 2, **SPLIT},
    "CP2": {"ranks": 2, "context": 2},
    "CP4": {"ranks": 4, "context": 4},
    "CP2 DP2 distributed optimizer": {"ranks": 4, "context": 2, "distributed_optimizer": True},
    "CP2 EP2 allgather": {"ranks": 2, "context": 2, "expert": 2, "dispatcher": "allgather"},
    "TP2 SP CP2": {"ranks": 4, **SP, "expert_tensor": 2, "context": 2},
    "TP2 SP CP2 PP2 EP2": {"ranks": 8, **SP, "context": 2, **PP2, "expert": 2, **SPLIT},
}


GRADIENTS = 3e-6
"""Of the largest (0.08): what eight layers round in float32 (see the test in float64); four stay below 1.7e-6."""

IN_FLOAT64: dict[str, dict[str, Any]] = {
    "TP2 SP PP2 EP2": LAYOUTS["TP2 SP PP2 EP2"],
    "TP2 SP ETP2": MORE_LAYOUTS["TP2 SP ETP2"],
    "CP2": MORE_LAYOUTS["CP2"],
    "CP2 PP2 EP2": {"ranks": 4, "context": 2, **PP2, "expert": 2},
}
UNCLIPPED = {"lr": 1e-3, "eps": 1e-4, "clip_grad": 1e6}


def check_equal(outcome: Outcome, reference: Outcome) -> None:
    sao.check_equal(outcome, reference, GRADIENTS)


def run_glm(path: Path, out: Path, parallel: dict[str, Any], **payload: Any) -> Outcome:
    return run(path, out, parallel, **{"steps": 5, **payload})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_family(tmp_path_factory.mktemp("checkpoint"), "glm_moe_dsa")


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_glm(checkpoint, tmp_path_factory.mktemp("reference") / "out", {"ranks": 1})


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str, checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    check_equal(run_glm(checkpoint, tmp_path / "out", LAYOUTS[name]), reference)


@pytest.mark.full
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_other_layout_equals_one_process(name: str, checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    check_equal(run_glm(checkpoint, tmp_path / "out", MORE_LAYOUTS[name]), reference)


def test_what_is_frozen_and_what_moves(reference: Outcome, checkpoint: Path) -> None:
    moved = {name.split(".", 3)[-1] for name in reference.tensors["actor-gradients"]}
    assert any("kv_b_proj" in name for name in moved) and any("shared_experts" in name for name in moved)
    critic = reference.tensors["critic-gradients"]
    assert not any("self_attn" in name for name, gradient in critic.items() if gradient.abs().max() > 0)
    assert not any("indexer" in name for name in critic) and not any("indexer" in name for name in moved)


RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"trainer": {"recompute": "full"}},
    "attention": {"trainer": {"recompute": "selective"}, "megatron": {"model": {"recompute_modules": ["core_attn"]}}},
}


def test_recomputed_attention_to_selected_keys_changes_nothing(
    checkpoint: Path, reference: Outcome, tmp_path: Path
) -> None:
    parallel = {"ranks": 2, "context": 2}
    settings = {**RECOMPUTE["attention"], "parallel": parallel}
    check_equal(run_glm(checkpoint, tmp_path / "out", parallel, settings=settings), reference)


@pytest.mark.full
@pytest.mark.parametrize("name", RECOMPUTE)
def test_recomputation_on_parts_of_rows_changes_nothing(
    name: str, checkpoint: Path, reference: Outcome, tmp_path: Path
) -> None:
    parallel = {"ranks": 4, **SP, "context": 2, "expert": 2}
    settings = {**RECOMPUTE[name], "parallel": parallel}
    check_equal(run_glm(checkpoint, tmp_path / "out", parallel, settings=settings), reference)


@pytest.mark.full
@pytest.mark.parametrize("selected", [20, 64], ids=["some sequences", "no sequence"])
def test_parts_of_rows_where_few_sequences_are_longer_than_what_is_selected(selected: int, tmp_path: Path) -> None:
    """Sequences have 2 to 48 tokens, rows up to 128; tiles of 8 queries are computed again in the backward pass."""
    path = write_tiny_family(tmp_path / "checkpoint", "glm_moe_dsa", index_topk=selected)
    expected = run_glm(path, tmp_path / "one", {"ranks": 1}, steps=1)
    got = run_glm(path, tmp_path / "two", {"ranks": 2, "context": 2}, steps=1, tile=8, scores=2**11)
    check_equal(got, expected)
    wrong = run_glm(path, tmp_path / "wrong", {"ranks": 2, "context": 2}, steps=1, mutation="own_keys")
    assert (selected == 64) == same(wrong, expected)


def same(outcome: Outcome, reference: Outcome) -> bool:
    try:
        check_equal(outcome, reference)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("mutation", "parallel"),
    [
        ("local_denominator", {"ranks": 2}),
        ("own_keys", {"ranks": 2, "context": 2}),
        ("unsummed_context", {"ranks": 2, "context": 2}),
    ],
)
def test_mistakes_are_noticed(
    mutation: str, parallel: dict[str, Any], checkpoint: Path, reference: Outcome, tmp_path: Path
) -> None:
    wrong = run_glm(checkpoint, tmp_path / "out", parallel, mutation=mutation)
    assert not same(wrong, reference)


def actor_gradients(path: Path, out: Path, parallel: dict[str, Any], **payload: Any) -> dict[str, torch.Tensor]:
    """Of the first step, before they are clipped."""
    settings = {"parallel": parallel, "actor": {"optimizer": UNCLIPPED}}
    gradients = run_glm(path, out, parallel, steps=1, settings=settings, **payload).tensors["actor-gradients"]
    return {name: tensor.double() for name, tensor in gradients.items()}


@pytest.mark.full
def test_nothing_but_rounding_separates_the_layouts(checkpoint: Path, tmp_path: Path) -> None:
    """In float64 they agree to its own rounding; one process in float32 is as far from that as layouts may be apart.

    (The engine's numbers come in float32, and the angles of rotations are made in it: the same in every layout.)
    """
    one = actor_gradients(checkpoint, tmp_path / "one", {"ranks": 1}, float64=True)
    largest = max(float(tensor.abs().max()) for tensor in one.values())
    for name, parallel in IN_FLOAT64.items():
        gap = sao.difference(actor_gradients(checkpoint, tmp_path / name, parallel, float64=True), one) / largest
        print(f"{name} in float64: {gap:.2g} of the largest, {largest:.3g}")
        assert gap < 1e-13, name
    rounding = sao.difference(actor_gradients(checkpoint, tmp_path / "float32", {"ranks": 1}), one) / largest
    print(f"one process in float32: {rounding:.2g}")
    assert 1e-6 < rounding < GRADIENTS
    # Control: a mistake shows in float64 too.
    wrong = actor_gradients(checkpoint, tmp_path / "wrong", MORE_LAYOUTS["CP2"], float64=True, mutation="own_keys")
    assert sao.difference(wrong, one) > 1e-3 * largest
