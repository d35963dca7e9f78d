"""The whole SAO step of a GLM-5.2-shaped model is the same under every layout.

Latent attention with an indexer whose selection other layers share, three dense layers, a sigmoid router with a float32
bias and a shared expert; the checkpoint carries a multi-token-prediction layer.
"""

from pathlib import Path
from typing import Any

import pytest

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
}


GRADIENTS = 3e-6
"""Of the largest (0.08): rounding of eight layers, where four stay below 1.7e-6."""


def check_equal(outcome: Outcome, reference: Outcome) -> None:
    sao.check_equal(outcome, reference, GRADIENTS)


def run_glm(path: Path, out: Path, parallel: dict[str, Any], **payload: Any) -> Outcome:
    return run(path, out, parallel, **{"steps": 3, **payload})


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


def test_a_mistake_is_noticed(checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    wrong = run_glm(checkpoint, tmp_path / "out", {"ranks": 2}, mutation="local_denominator")
    with pytest.raises(AssertionError):
        check_equal(wrong, reference)
