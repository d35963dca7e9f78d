"""A critic in a world of its own gives the numbers of a colocated one, and neither world waits for the other's updates.

The actor's world and the critic's are two process worlds with their own torch.distributed.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megasao.launch.ports import free_ports
from tests.megatron.tiny import write_tiny_checkpoint
from tests.megatron.world import World, run_world

pytestmark = pytest.mark.world
STEPS = 4
ROW_TOKENS = 128
TP2 = {"ranks": 2, "tensor": 2, "sequence": True, "expert_tensor": 2}
DP2 = {"ranks": 2, "distributed_optimizer": True, "overlap": True}
ONE = {"ranks": 1}
TIMEOUT_S = 400.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def second_world() -> Iterator[World]:
    """One rank, beside the world of one rank that all tests share."""
    world = World(1)
    yield world
    world.kill()


class Outcome:
    def __init__(self, metrics: list[dict[str, Any]], out: Path) -> None:
        self.metrics = metrics
        self.weights = {role: load_file(out / f"{role}-weights.safetensors") for role in ("actor", "critic")}


@pytest.fixture(scope="module")
def colocated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    out = tmp_path_factory.mktemp("colocated")
    payload = {"path": str(checkpoint), "out": str(out), "steps": STEPS, "token_budget": ROW_TOKENS}
    [metrics] = run_world(1, "tests.training.cases:sao_steps", payload)
    return Outcome(metrics, out)


def separate(
    checkpoint: Path,
    out: Path,
    actor: dict[str, Any],
    critic: dict[str, Any],
    *,
    critic_world: World | None = None,
    actor_case: str = "actor_side",
    form: str = "safetensors",
    **payload: Any,
) -> list[Any]:
    """Run both worlds; results of the actor's ranks."""
    (out / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    [port] = free_ports(1)
    section = {
        "optimizer": {"lr": 2e-3, "eps": 1e-4},
        "warmup_steps": 0,
        "head_bias": 0.5,
        "placement": "separate",
        "parallel": critic,
        "token_budget": payload.pop("critic_budget", None),
    }
    settings = {"parallel": actor, "critic": section, "environment": {"max_tokens": 64, "max_turn_tokens": 8}}
    settings["checkpoint"] = {"format": form}
    whole = {
        "path": str(checkpoint),
        "out": str(out),
        "run": str(out / "run"),
        "address": f"tcp://127.0.0.1:{port}",
        "steps": STEPS,
        "token_budget": ROW_TOKENS,
        "settings": settings,
        **payload,
    }
    module = "tests.training.separate_cases"
    with ThreadPoolExecutor(1) as threads:
        name = f"{module}:critic_side"
        if critic_world is not None:
            ran = threads.submit(critic_world.run, name, whole, TIMEOUT_S)
        else:
            ran = threads.submit(run_world, critic["ranks"], name, whole)
        results = run_world(actor["ranks"], f"{module}:{actor_case}", whole)
        ran.result()
    return results


def run(checkpoint: Path, out: Path, actor: dict[str, Any], critic: dict[str, Any], **options: Any) -> Outcome:
    results = separate(checkpoint, out, actor, critic, **options)
    assert all(result == results[0] for result in results), "ranks disagree on the step's metrics"
    return Outcome(results[0], out)


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def check_equal(got: Outcome, expected: Outcome) -> None:
    for step, (ours, theirs) in enumerate(zip(got.metrics, expected.metrics, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ("actor/loss", "critic/loss", "critic/value_mean", "critic/explained_variance"):
            assert abs(ours[name] - theirs[name]) < 2e-6, (name, step)
        for name in ("actor/grad_norm", "critic/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), (name, step)
    for role in ("actor", "critic"):
        assert difference(got.weights[role], expected.weights[role]) < 1e-6, role


@pytest.mark.parametrize("form", ["safetensors", "torch_dist"])
def test_the_same_layout_gives_the_same_bits(
    checkpoint: Path, colocated: Outcome, second_world: World, tmp_path: Path, form: str
) -> None:
    """Also with a checkpoint taken on the way, and from that checkpoint on."""
    through = run(checkpoint, tmp_path / "through", ONE, ONE, critic_world=second_world, save_at=2, form=form)
    assert through.metrics == colocated.metrics
    for role, weights in colocated.weights.items():
        assert difference(through.weights[role], weights) == 0
    saved = tmp_path / "through" / "run" / "checkpoints" / "step_000002"
    assert (saved / "critic" / ".metadata").exists() == (form == "torch_dist")
    assert {"actor", "critic", "rng-0.safetensors", "rng-critic-0.safetensors", "COMPLETE"} <= {
        path.name for path in saved.iterdir()
    }
    (tmp_path / "resumed").mkdir()
    (tmp_path / "through" / "run").rename(tmp_path / "resumed" / "run")
    resumed = run(checkpoint, tmp_path / "resumed", ONE, ONE, critic_world=second_world)
    assert resumed.metrics == colocated.metrics[2:]
    for role, weights in colocated.weights.items():
        assert difference(resumed.weights[role], weights) == 0


@pytest.mark.parametrize(
    ("actor", "critic", "budget"), [(TP2, ONE, None), (ONE, DP2, 64)], ids=["actor TP2", "critic DP2"]
)
def test_each_has_its_own_layout(
    actor: dict[str, Any],
    critic: dict[str, Any],
    budget: int | None,
    checkpoint: Path,
    colocated: Outcome,
    tmp_path: Path,
) -> None:
    check_equal(run(checkpoint, tmp_path, actor, critic, critic_budget=budget), colocated)


def test_values_of_other_tokens_are_noticed(
    checkpoint: Path, colocated: Outcome, second_world: World, tmp_path: Path
) -> None:
    wrong = run(checkpoint, tmp_path, ONE, ONE, critic_world=second_world, mutation="row_order")
    with pytest.raises(AssertionError):
        check_equal(wrong, colocated)


def test_neither_waits_for_the_others_update(checkpoint: Path, second_world: World, tmp_path: Path) -> None:
    hold = str(tmp_path / "hold")
    options: dict[str, Any] = {"critic_world": second_world, "actor_case": "neither_waits", "hold": hold}
    [result] = separate(checkpoint, tmp_path, ONE, ONE, **options)
    silent, at_work, refused = result["errors"]
    named = r"waited for the critic at tcp://127\.0\.0\.1:\d+ to answer"
    assert re.match(
        named + r" LearnedRequest of step 1 longer than critic\.timeout_s = 1 s \(it does not answer", silent
    )
    assert re.match(named + r" Train of step 2 longer than critic\.timeout_s = 1 s \(it is still at work\)", at_work)
    assert "this critic has finished 3 steps; both worlds go on from one checkpoint" in refused
    assert len(set(result["losses"])) == 3, "three steps of other trajectories"


def test_payload_that_moved_or_was_lost_is_asked_for_again(
    checkpoint: Path, second_world: World, tmp_path: Path
) -> None:
    """The actor learns what the critic lacks, and the same step is of what can be had then; no world starts anew."""
    [port] = free_ports(1)
    options: dict[str, Any] = {"actor_case": "payload_is_elsewhere", "hosted": True}
    nowhere = f"tcp://127.0.0.1:{port}"
    [result] = separate(checkpoint, tmp_path, ONE, ONE, critic_world=second_world, nowhere=nowhere, **options)
    gone, other, had = result["told"]
    assert re.match(rf"the critic at tcp://127\.0\.0\.1:\d+: payload at {re.escape(nowhere)}: .* did not answer", gone)
    assert re.match(r"the critic at .*: payload at .*: the payload of \d+ trajectories is not to be had", other)
    assert not had
    assert result["difference"] == 0 and result["loss"] > 0
