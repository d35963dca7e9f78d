"""bfloat16 with float32 gradients and optimizer, recomputation, and options that are passed on to Megatron-Core."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.tiny import read
from tests.megatron.world import run_world

pytestmark = pytest.mark.world

BFLOAT16 = {"model": {"dtype": "bfloat16"}}
SPLIT = {"ranks": 2, "expert": 2, "distributed_optimizer": True, "overlap": True}


def repeat(path: Path, out: Path, parallel: dict[str, Any], **payload: Any) -> tuple[list[float], dict[str, Any]]:
    """Adam steps on the same rows again and again: the loss of each, and the tensors written."""
    out.mkdir()
    whole = {"path": str(path), "out": str(out), "parallel": parallel, "role": "actor", "steps": 12, **payload}
    [losses, facts], *_ = run_world(parallel["ranks"], "tests.megatron.cases:repeat_step", whole)
    return losses, {"facts": facts, "start": read(out, "start"), "end": read(out, "end")}


@pytest.mark.parametrize("parallel", [{"ranks": 1}, SPLIT], ids=["one", "EP2 distributed optimizer, overlap"])
def test_bfloat16_learns_like_float32(checkpoint: Path, tmp_path: Path, parallel: dict[str, Any]) -> None:
    expected, full = repeat(checkpoint, tmp_path / "full", {"ranks": 1})
    losses, half = repeat(checkpoint, tmp_path / "half", parallel, **BFLOAT16)
    assert half["facts"] == {
        "parameter": ["torch.bfloat16"],
        "gradient": ["torch.float32"],
        "main": ["torch.float32"],
        "exp_avg": ["torch.float32"],
    }
    assert full["facts"]["parameter"] == ["torch.float32"]
    gain = expected[0] - expected[-1]
    assert gain > 1
    assert losses != expected
    for got, wanted in zip(losses, expected, strict=True):
        assert abs(got - wanted) < 0.08 * gain


def moved(run: dict[str, Any]) -> torch.Tensor:
    return torch.cat([(run["end"][name] - run["start"][name]).flatten() for name in sorted(run["start"])])


def test_steps_below_bfloat16_add_up(checkpoint: Path, tmp_path: Path) -> None:
    """Twelve steps of 1e-5 at weights of 0.1, where bfloat16 knows nothing below 4e-4: only a float32 copy moves."""
    _, full = repeat(checkpoint, tmp_path / "full", {"ranks": 1}, lr=1e-5)
    _, half = repeat(checkpoint, tmp_path / "half", {"ranks": 1}, lr=1e-5, **BFLOAT16)
    likeness = torch.nn.functional.cosine_similarity(moved(full), moved(half), dim=0)
    assert likeness > 0.9
    assert 0.8 < moved(half).norm() / moved(full).norm() < 1.2
    # Control: what the same steps leave in bfloat16 weights is hardly anything.
    rounded = {key: {name: t.bfloat16().float() for name, t in half[key].items()} for key in ("start", "end")}
    assert (moved(rounded) == 0).float().mean() > 0.5


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("parallel", [{"ranks": 1}, {"ranks": 2, "context": 2}], ids=["one", "CP2"])
def test_recomputation_changes_nothing(
    checkpoint: Path, tmp_path: Path, recompute: str, parallel: dict[str, Any]
) -> None:
    expected, kept = repeat(checkpoint, tmp_path / "kept", {"ranks": 1})
    got, again = repeat(checkpoint, tmp_path / "again", parallel, trainer={"recompute": recompute})
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) < 5e-6
    assert (moved(kept) - moved(again)).abs().max() < 1e-5
    assert kept["facts"] == again["facts"]


def test_options_reach_megatron(checkpoint: Path) -> None:
    megatron = {
        "model": {"moe_router_dtype": "fp64", "recompute_modules": ["mlp"]},
        "optimizer": {"log_num_zeros_in_grad": True, "main_grads_dtype": "float32"},
        "gradients": {"bucket_size": 1000},
    }
    payload = {"path": str(checkpoint), "parallel": {"ranks": 2, "overlap": True}, "megatron": megatron}
    payload |= {"trainer": {"recompute": "selective"}}
    for answer in run_world(2, "tests.megatron.cases:passed_options", payload):
        assert answer == {
            "moe_router_dtype": "fp64",
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp"],
            "log_num_zeros_in_grad": True,
            "main_grads_dtype": "torch.float32",
            "bucket_size": 1000,
            "buckets": answer["buckets"],
        }
        assert answer["buckets"] > 10, "small buckets are many"


def test_options_that_need_a_gpu_are_refused_without(checkpoint: Path) -> None:
    payload = {"path": str(checkpoint), "parallel": {"ranks": 1}, "megatron": {"model": {"apply_rope_fusion": True}}}
    [message] = run_world(1, "tests.megatron.cases:layout_errors", payload)
    assert "megatron.model.apply_rope_fusion = True needs CUDA" in message


def test_what_is_set_here_is_refused_in_a_config(checkpoint: Path) -> None:
    """Or Megatron would be given the same argument twice."""
    from megasao.config.megatron import ours

    [answer] = run_world(1, "tests.megatron.cases:arguments_set", {"path": str(checkpoint), "parallel": {"ranks": 1}})
    for kind, names in answer.items():
        assert len(names) > 3
        assert set(names) <= set(ours(kind)), kind
