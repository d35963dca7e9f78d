"""A whole SAO step (values, GAE, two critic updates, DIS) does not depend on the parallel layout or on the packing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.tiny import write_tiny_checkpoint
from tests.megatron.world import run_world

pytestmark = pytest.mark.world
STEPS = 5
ALGORITHM_STEPS = 3
ROW_TOKENS = 128
"""Rows short enough that every rank has several, of different lengths."""

SP = {"tensor": 2, "sequence": True}
SPLIT = {"distributed_optimizer": True, "overlap": True}
PP2 = {"pipeline": 2}
VPP2 = {"pipeline": 2, "virtual_pipeline": 2}
ALLGATHER = {"dispatcher": "allgather"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2 distributed optimizer, overlap": {"ranks": 2, **SPLIT},
    "EP2": {"ranks": 2, "expert": 2},
    "EP2 allgather": {"ranks": 2, "expert": 2, **ALLGATHER},
    "TP2 SP ETP2": {"ranks": 2, **SP, "expert_tensor": 2},
    "TP2 SP EP2 ETP2": {"ranks": 4, **SP, "expert": 2, "expert_tensor": 2},
    "PP2": {"ranks": 2, **PP2},
    "PP2 VPP2": {"ranks": 2, **VPP2},
    "CP2": {"ranks": 2, "context": 2},
    "CP2 PP2 EP2 distributed optimizer, overlap": {"ranks": 4, "context": 2, **PP2, "expert": 2, **SPLIT},
    "TP2 SP PP2 EP2": {"ranks": 4, **SP, **PP2, "expert": 2},
    "TP2 SP PP2 EP2 DP2 distributed optimizer, overlap": {"ranks": 8, **SP, **PP2, "expert": 2, **SPLIT},
}
MORE_LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"ranks": 2},
    "DP2 overlap": {"ranks": 2, "overlap": True},
    "DP2 distributed optimizer": {"ranks": 2, "distributed_optimizer": True},
    "DP4": {"ranks": 4},
    "EP4": {"ranks": 4, "expert": 4},
    "EP2 DP4": {"ranks": 4, "expert": 2, **SPLIT},
    "TP2 SP EP2": {"ranks": 2, **SP, "expert": 2},
    "TP2 SP EP2 allgather": {"ranks": 2, **SP, "expert": 2, **ALLGATHER},
    "TP2 SP EP2 ETP2 allgather": {"ranks": 4, **SP, "expert": 2, "expert_tensor": 2, **ALLGATHER},
    "PP4": {"ranks": 4, "pipeline": 4},
    "PP2 VPP2 allgather": {"ranks": 2, **VPP2, **ALLGATHER},
    "DP2 EP2 PP2 VPP2": {"ranks": 4, **VPP2, "expert": 2},
    "TP2 SP PP2 VPP2 EP2 distributed optimizer, overlap": {"ranks": 4, **SP, **VPP2, "expert": 2, **SPLIT},
    "CP2 distributed optimizer, overlap": {"ranks": 2, "context": 2, **SPLIT},
    "CP2 EP2 allgather": {"ranks": 2, "context": 2, "expert": 2, **ALLGATHER},
    "CP2 DP2": {"ranks": 4, "context": 2},
    "CP2 PP2 VPP2": {"ranks": 4, "context": 2, **VPP2},
    "TP2 SP CP2": {"ranks": 4, "context": 2, **SP, "expert_tensor": 2},
    "TP2 SP CP2 PP2 VPP2 EP2": {"ranks": 8, "context": 2, **SP, **VPP2, "expert": 2, **SPLIT},
}


class Outcome:
    """Metrics of each step, and tensors at the end."""

    def __init__(self, metrics: list[dict[str, Any]], out: Path) -> None:
        self.metrics = metrics
        self.tensors = {
            f"{role}-{kind}": load_file(out / f"{role}-{kind}.safetensors")
            for role in ("actor", "critic")
            for kind in ("weights", "gradients")
            if (out / f"{role}-{kind}.safetensors").exists()
        }


def run(path: Path, out: Path, parallel: dict[str, Any], **payload: Any) -> Outcome:
    out.mkdir()
    whole = {"path": str(path), "out": str(out), "steps": STEPS, "settings": {"parallel": parallel}}
    whole |= {"token_budget": ROW_TOKENS, **payload}
    results = run_world(parallel["ranks"], "tests.training.cases:sao_steps", whole)
    assert all(result == results[0] for result in results), "ranks disagree on the step's metrics"
    return Outcome(results[0], out)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(checkpoint, tmp_path_factory.mktemp("reference") / "out", {"ranks": 1})


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def check_equal(outcome: Outcome, reference: Outcome, gradients: float = 1.7e-6) -> None:
    """In fp32: losses of all steps, gradients of the first (the largest is 0.06 for the actor), weights at the end.

    ``gradients``: bound on a gradient's difference, as a share of the largest gradient.
    """
    for step, (got, expected) in enumerate(zip(outcome.metrics, reference.metrics, strict=True)):
        for name in ("actor/loss", "critic/loss", "critic/value_mean"):
            assert abs(got[name] - expected[name]) < 2e-6, (name, step)
        for name in ("actor/grad_norm", "critic/grad_norm"):
            assert got[name] == pytest.approx(expected[name], rel=1e-5), (name, step)
    for name in ("actor/masked_low", "actor/masked_high"):
        assert outcome.metrics[0][name] == reference.metrics[0][name]
    for role in ("actor", "critic"):
        largest = max(float(g.abs().max()) for g in reference.tensors[f"{role}-gradients"].values())
        gap = difference(outcome.tensors[f"{role}-gradients"], reference.tensors[f"{role}-gradients"])
        assert gap < gradients * largest, (role, gap, largest)
        assert difference(outcome.tensors[f"{role}-weights"], reference.tensors[f"{role}-weights"]) < 1e-6, role


def test_the_reference_trains_both_roles(reference: Outcome) -> None:
    first = reference.metrics[0]
    assert first["critic/value_mean"] == pytest.approx(0.5)
    assert first["actor/grad_norm"] > 1e-3
    assert first["critic/grad_norm"] > 1e-3
    assert 0 < first["actor/masked_low"] < 0.5
    assert 0 < first["actor/masked_high"] < 0.5
    assert reference.metrics[-1]["critic/value_mean"] != first["critic/value_mean"]


def test_the_bound_means_what_it_says(reference: Outcome) -> None:
    largest = max(float(gradient.abs().max()) for gradient in reference.tensors["actor-gradients"].values())
    assert 0.05 < largest < 0.07


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str, checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    check_equal(run(checkpoint, tmp_path / "out", LAYOUTS[name]), reference)


@pytest.mark.full
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_other_layout_equals_one_process(name: str, checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    check_equal(run(checkpoint, tmp_path / "out", MORE_LAYOUTS[name]), reference)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_short_rows_equal_one_long_row(tokens: int, checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    check_equal(run(checkpoint, tmp_path / "out", {"ranks": 2}, token_budget=tokens), reference)


RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"trainer": {"recompute": "full"}},
    "experts": {"trainer": {"recompute": "selective"}, "megatron": {"model": {"recompute_modules": ["moe"]}}},
}


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recomputation_changes_nothing(name: str, checkpoint: Path, reference: Outcome, tmp_path: Path) -> None:
    """Also for the critic, below whose experts everything is frozen."""
    parallel = {"ranks": 2, **PP2}
    settings = {**RECOMPUTE[name], "parallel": parallel}
    check_equal(run(checkpoint, tmp_path / "right", parallel, settings=settings), reference)
    wrong = run(checkpoint, tmp_path / "wrong", parallel, settings=settings, mutation="frozen_input", steps=1)
    largest = max(float(gradient.abs().max()) for gradient in reference.tensors["critic-gradients"].values())
    gap = difference(wrong.tensors["critic-gradients"], reference.tensors["critic-gradients"])
    assert gap > 100 * 1.7e-6 * largest, "weights without their gradient would be noticed"


@pytest.mark.parametrize(
    ("layout", "mutation"),
    [
        ({"ranks": 2}, "local_denominator"),
        # Rows of one length: with variable ones the stages would wait for each other's shapes forever.
        ({"ranks": 2, **VPP2, **ALLGATHER}, "batched_p2p"),
        ({"ranks": 2, "context": 2}, "unsummed_context"),
        ({"ranks": 2, **SPLIT}, "ungathered_weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_noticed(
    layout: dict[str, Any], mutation: str, checkpoint: Path, reference: Outcome, tmp_path: Path
) -> None:
    wrong = run(checkpoint, tmp_path / "out", layout, mutation=mutation)
    with pytest.raises(AssertionError):
        check_equal(wrong, reference)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {
        "objective": {"name": "ppo_clip"},
        "advantages": {"name": "group", "std": True},
        "allow_uncorrected": True,
    },
    "gpg whitened": {"objective": {"name": "gpg"}, "advantages": {"name": "group"}, "whiten": True},
    "asympo": {"objective": {"name": "asympo"}, "advantages": {"name": "group"}, "denominator": "sequences"},
    "spo": {"objective": {"name": "spo"}, "advantages": {"name": "running_mean"}, "denominator": "sequences"},
    "kl": {"objective": {"name": "dis", "eps_low": 0.8}, "kl": {"coefficient": 0.5}},
    "entropy": {"objective": {"name": "dis", "eps_low": 0.8}, "entropy_bonus": 0.3},
    "accepted": {"objective": {"name": "dis", "eps_low": 0.8}, "denominator": "accepted_tokens"},
}


def run_algorithm(
    name: str, checkpoint: Path, out: Path, parallel: dict[str, Any], budget: int, value_clip: float | None = 0.01
) -> Outcome:
    algorithm = ALGORITHMS[name]
    estimator = algorithm.get("advantages", {}).get("name")
    settings: dict[str, Any] = {
        "parallel": parallel,
        "algorithm": algorithm,
        "loop": {"steps": 100, "batch_size": 12, "group_size": 4 if estimator == "group" else 1},
    }
    if estimator is not None:
        settings["critic"] = None
    else:
        optimizer = {"lr": 2e-3}
        settings["critic"] = {"optimizer": optimizer, "warmup_steps": 0, "head_bias": 0.5, "value_clip": value_clip}
    shape = {"token_budget": budget, "count": 12, "group_size": 4, "steps": ALGORITHM_STEPS}
    return run(checkpoint, out, parallel, settings=settings, **shape)


def check_metrics(got: Outcome, expected: Outcome) -> None:
    both = ("actor/loss", "actor/grad_norm", "actor/positive_nll", "actor/negative_loss")
    critic = ("critic/loss", "critic/grad_norm", "critic/explained_variance")
    for step in range(ALGORITHM_STEPS):
        for metric in (*both, *(name for name in critic if name in expected.metrics[0])):
            assert got.metrics[step][metric] == pytest.approx(expected.metrics[step][metric], rel=1e-5, abs=2e-6), (
                metric
            )


@pytest.mark.parametrize("layout", ["TP2 SP EP2", "PP2"])
@pytest.mark.parametrize("name", ["asympo", "gpg whitened", "kl", "entropy"])
def test_what_sums_over_a_step_is_the_same_on_split_models(
    name: str, layout: str, checkpoint: Path, tmp_path: Path
) -> None:
    expected = run_algorithm(name, checkpoint, tmp_path / "one", {"ranks": 1}, 4096)
    got = run_algorithm(name, checkpoint, tmp_path / "two", MORE_LAYOUTS.get(layout) or LAYOUTS[layout], 64)
    check_metrics(got, expected)
    if name == "asympo":
        assert all(abs(metrics["actor/loss"]) < 1e-6 for metrics in got.metrics)


def test_value_clipping_changes_what_is_learnt(checkpoint: Path, tmp_path: Path) -> None:
    """Negative control of the cases with a critic: without the clip the second step begins elsewhere."""
    clipped = run_algorithm("kl", checkpoint, tmp_path / "clipped", {"ranks": 1}, 4096)
    free = run_algorithm("kl", checkpoint, tmp_path / "free", {"ranks": 1}, 4096, value_clip=None)
    assert clipped.metrics[0]["critic/loss"] == free.metrics[0]["critic/loss"]
    assert clipped.metrics[1]["critic/loss"] != pytest.approx(free.metrics[1]["critic/loss"], rel=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("parallel", [{"ranks": 2}, {"ranks": 2, "context": 2}], ids=["DP2", "CP2"])
def test_every_algorithm_is_the_same_on_two_ranks_in_short_rows(
    name: str, parallel: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """Whitening, global denominators, group baselines and value clipping: nothing depends on the split."""
    expected = run_algorithm(name, checkpoint, tmp_path / "one", {"ranks": 1}, 4096)
    got = run_algorithm(name, checkpoint, tmp_path / "two", parallel, 64)
    check_metrics(got, expected)
    assert ("critic/loss" in expected.metrics[0]) == (ALGORITHMS[name].get("advantages") is None)
    if name == "kl":
        distances = [metrics["actor/kl_reference"] for metrics in got.metrics]
        assert distances[0] == pytest.approx(0, abs=1e-6) and distances[1] > 1e-5
        assert distances == pytest.approx(
            [metrics["actor/kl_reference"] for metrics in expected.metrics], rel=1e-4, abs=1e-6
        )
    else:
        assert "actor/kl_reference" not in got.metrics[0]
    if name == "entropy":
        for ours, theirs in zip(got.metrics, expected.metrics, strict=True):
            assert ours["actor/entropy"] == pytest.approx(theirs["actor/entropy"], rel=1e-5)
    if name == "asympo":
        assert all(abs(metrics["actor/loss"]) < 1e-6 for metrics in got.metrics)
        assert "actor/ratio_mean" not in got.metrics[0]
    assert expected.metrics[0]["actor/grad_norm"] > 1e-4
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensors in expected.tensors.items():
        # Adam turns rounding of gradients near 0 into steps: weights only show that nothing went another way.
        scale = max(float(tensor.abs().max()) for tensor in tensors.values()) if "gradients" in name else 1.0
        assert difference(got.tensors[name], tensors) < 1e-4 * scale, name


def pushes(checkpoint: Path, out: Path, reset: bool, **payload: Any) -> tuple[dict[str, torch.Tensor], int]:
    out.mkdir()
    actor = {"optimizer": {"lr": 1e-3}, "reset_optimizer": reset}
    whole = {"path": str(checkpoint), "out": str(out), "settings": {"actor": actor}, **payload}
    [updates] = run_world(1, "tests.training.cases:optimizer_after_pushes", whole)
    return load_file(out / "actor-weights.safetensors"), updates


def test_the_optimizer_is_reset_after_each_push_if_asked(checkpoint: Path, tmp_path: Path) -> None:
    """It is then as a new one each time; also through a checkpoint. Not asked for, it goes on."""
    expected, _ = pushes(checkpoint, tmp_path / "rebuilt", False, rebuild=True)
    got, updates = pushes(checkpoint, tmp_path / "reset", True)
    assert updates == 0 and difference(got, expected) == 0
    other, updates = pushes(checkpoint, tmp_path / "kept", False)
    assert updates == 3 and difference(other, expected) > 1e-4
