"""The entropy bonus: value and gradient of the mean entropy of the step's action tokens, the same for every split."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.tiny import write_tiny_checkpoint
from tests.megatron.world import run_world
from tests.training.cases import trajectories

pytestmark = pytest.mark.world

COEFFICIENT = 0.5
SPLITS: dict[str, tuple[dict[str, Any], int]] = {
    "DP2 in short rows": ({"ranks": 2}, 64),
    "TP2 SP EP2": ({"ranks": 2, "tensor": 2, "sequence": True, "expert": 2}, 4096),
    "PP2 in short rows": ({"ranks": 2, "pipeline": 2}, 64),
}


def run(
    path: Path, out: Path, parallel: dict[str, Any], budget: int = 4096, *, bonus: float = COEFFICIENT, **more: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics, gradients) of the actor's first step, unclipped; the engine's log-probs are not needed."""
    out.mkdir()
    settings = {
        "parallel": parallel,
        "algorithm": {"objective": {"name": "gpg"}, "advantages": {"name": "group"}, "entropy_bonus": bonus},
        "critic": None,
        "actor": {"optimizer": {"lr": 1e-3, "clip_grad": 0}},
        "loop": {"steps": 100, "batch_size": 12, "group_size": 4},
        **more.pop("settings", {}),
    }
    whole = {"path": str(path), "out": str(out), "steps": 1, "settings": settings, "count": 12, "group_size": 4, **more}
    results = run_world(parallel["ranks"], "tests.training.cases:sao_steps", {**whole, "token_budget": budget})
    assert all(result == results[0] for result in results)
    return results[0][0], load_file(out / "actor-gradients.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], dict[str, Any]]:
    return run(checkpoint, tmp_path_factory.mktemp("one") / "out", {"ranks": 1})


def transformers_entropy(path: Path, *, hot: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean entropy over the step's action tokens, and its gradients; ``hot`` ignores the sampling temperatures."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    rows = trajectories(0, 12)
    total = torch.zeros(())
    for row in rows:
        logits = model(torch.tensor([row.tokens])).logits[0, :-1] / (1.0 if hot else row.temperature)
        law = torch.log_softmax(logits, dim=-1)
        entropies = -(law.exp() * law).sum(dim=-1)
        total = total + entropies[torch.tensor(row.action_mask[1:])].sum()
    mean = total / sum(sum(row.action_mask) for row in rows)
    mean.backward()
    return float(mean.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_bonus_equals_transformers(checkpoint: Path, expected: tuple[dict, dict], tmp_path: Path) -> None:
    metrics, gradients = expected
    without, plain = run(checkpoint, tmp_path / "off", {"ranks": 1}, bonus=0.0)
    assert "actor/entropy" not in without
    assert without["actor/loss"] == metrics["actor/loss"], "the reported loss is the objective's"
    entropy, wanted = transformers_entropy(checkpoint, hot=False)
    assert metrics["actor/entropy"] == pytest.approx(entropy, rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    _, wrong = transformers_entropy(checkpoint, hot=True)
    shared = sorted(wanted.keys() & gradients.keys())
    assert len(shared) > 15
    for name in shared:
        got = (plain[name] - gradients[name]) / COEFFICIENT
        torch.testing.assert_close(got, wanted[name], rtol=0, atol=2e-5 * largest, msg=name)
    head = "lm_head.weight"
    assert float((wrong[head] - wanted[head]).abs().max()) > 1e-2 * largest, "negative control: the temperature counts"


@pytest.mark.parametrize("name", SPLITS)
def test_bonus_is_the_same_for_every_split(
    name: str, checkpoint: Path, expected: tuple[dict, dict], tmp_path: Path
) -> None:
    metrics, gradients = run(checkpoint, tmp_path / "out", *SPLITS[name])
    check_equal((metrics, gradients), expected)


def check_equal(got: tuple[dict, dict], expected: tuple[dict, dict]) -> None:
    for metric in ("actor/entropy", "actor/loss", "actor/grad_norm"):
        assert got[0][metric] == pytest.approx(expected[0][metric], rel=1e-5, abs=2e-6), metric
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=2e-5 * largest, msg=name)


def test_a_mean_over_the_own_tokens_is_noticed(checkpoint: Path, expected: tuple[dict, dict], tmp_path: Path) -> None:
    wrong = run(checkpoint, tmp_path / "out", {"ranks": 2}, mutation="local_denominator")
    with pytest.raises(AssertionError, match="actor/entropy"):
        check_equal(wrong, expected)


def test_entropy_can_be_watched_without_a_bonus(checkpoint: Path, expected: tuple[dict, dict], tmp_path: Path) -> None:
    settings = {"observability": {"entropy": True}}
    metrics, watched = run(checkpoint, tmp_path / "watched", {"ranks": 1}, bonus=0.0, settings=settings)
    _, plain = run(checkpoint, tmp_path / "off", {"ranks": 1}, bonus=0.0)
    assert metrics["actor/entropy"] == expected[0]["actor/entropy"]
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(watched[name], gradient, rtol=0, atol=1e-6 * largest, msg=name)
    assert not torch.allclose(expected[1]["lm_head.weight"], plain["lm_head.weight"], atol=1e-3 * largest)
