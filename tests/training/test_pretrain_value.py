"""Value pretraining: what is held out, what is learnt, and that a critic starts from the result, under any layout."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megasao.config.algorithm import SkipObservationGae
from megasao.training.batch import pack_trajectories
from megasao.training.pretrain_value import monte_carlo_returns, split_by_prompt
from megasao.trajectories.ipc import to_ipc
from megasao.trajectories.schema import Trajectory, to_batch
from tests.megatron.tiny import write_tiny_checkpoint
from tests.megatron.world import run_world
from tests.training.cases import trajectory

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"ranks": 2},
    "TP2 SP EP2": {"ranks": 2, "tensor": 2, "sequence": True, "expert": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
}


def told_by_the_first_token(count: int) -> list[Trajectory]:
    """Four trajectories of each prompt; the reward is 1 where the first token is below 16."""
    generator = random.Random(0)
    rows = [trajectory(number, generator) for number in range(count)]
    return [
        replace(
            row,
            prompt_id=f"p{number // 4}",
            rewards=[0.0] * (len(row.tokens) - 1) + [float(row.tokens[0] < 16)],
            rollout_logprobs=None,
            weight_versions=None,
        )
        for number, row in enumerate(rows)
    ]


def shuffled(rows: list[Trajectory]) -> list[Trajectory]:
    """Each with the reward of another."""
    rewards = [row.rewards[-1] for row in rows]
    random.Random(1).shuffle(rewards)
    return [
        replace(row, rewards=[0.0] * (len(row.tokens) - 1) + [reward])
        for row, reward in zip(rows, rewards, strict=True)
    ]


def write(path: Path, rows: list[Trajectory]) -> Path:
    path.write_bytes(to_ipc(to_batch(rows)))
    return path


def section(path: Path, **changes: Any) -> dict[str, Any]:
    whole = {"steps": 40, "batch_size": 32, "held_out": 0.25, "evaluate_every": 40, "optimizer": {"lr": 3e-3}}
    return {"trajectories": [str(path)], **whole, **changes}


def pretrain(checkpoint: Path, out: Path, data: Path, parallel: dict[str, Any], **changes: Any) -> dict[str, Any]:
    settings = {"parallel": parallel, "value_pretraining": section(data, **changes)}
    payload = {"path": str(checkpoint), "out": str(out), "settings": settings}
    results = run_world(parallel["ranks"], "tests.training.cases:pretrained_critic", payload)
    assert all(result["held_out"] == results[0]["held_out"] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "told.arrow", told_by_the_first_token(320))


@pytest.mark.world
def test_what_the_tokens_tell_is_learnt_and_what_they_do_not_tell_is_not(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    result = pretrain(checkpoint, tmp_path / "told", data, {"ranks": 1})
    assert result["held_out"]["explained_variance"] > 0.3
    assert 40 < result["held_out"]["trajectories"] < 120
    assert result["updates"] == 0, "RL begins with a fresh optimizer"
    assert result["moved"] and all(".mlp." in name or "value_head" in name for name in result["moved"]), (
        "frozen attention"
    )
    assert sum(1 for name in result["moved"] if ".mlp." in name) > 10
    noise = write(tmp_path / "noise.arrow", shuffled(told_by_the_first_token(320)))
    control = pretrain(checkpoint, tmp_path / "noise", noise, {"ranks": 1})
    assert control["held_out"]["explained_variance"] < 0.1


@pytest.mark.world
def test_every_layout_learns_the_same_and_loads_the_result(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    few = {"steps": 3, "optimizer": {"lr": 1e-3, "eps": 1e-4}}
    expected = pretrain(checkpoint, tmp_path / "one", data, {"ranks": 1}, **few)
    for name, parallel in LAYOUTS.items():
        got = pretrain(checkpoint, tmp_path / name, data, parallel, **few)
        assert got["held_out"] == pytest.approx(expected["held_out"], rel=1e-4, abs=1e-5), name
        assert got["values"] == pytest.approx(expected["values"], abs=1e-5), name
        payload = {
            "path": str(checkpoint),
            "out": str(tmp_path / "unused"),
            "start": str(tmp_path / name / "value"),
            "settings": {"parallel": {"ranks": 1}},
        }
        [loaded] = run_world(1, "tests.training.cases:pretrained_critic", payload)
        assert loaded["values"] == pytest.approx(got["values"], abs=1e-6), name
        assert len(set(loaded["values"])) > 5, "no constant"
    other = pretrain(checkpoint, tmp_path / "other", data, {"ranks": 1}, **{**few, "steps": 2})
    assert other["values"] != pytest.approx(expected["values"], abs=1e-5), "negative control: a step less shows"


@pytest.mark.world
def test_what_cannot_be_pretrained_on_or_started_from_is_refused(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    large = [replace(row, tokens=[40, *row.tokens[1:]]) for row in told_by_the_first_token(40)]
    unknown = section(write(tmp_path / "large.arrow", large), held_out=0.5)
    one_prompt = section(write(tmp_path / "one.arrow", told_by_the_first_token(4)))
    other_model = write_tiny_checkpoint(tmp_path / "other", num_hidden_layers=1)
    pretrain(other_model, tmp_path / "pretrained", data, {"ranks": 1}, steps=1)
    payload = {
        "path": str(checkpoint),
        "out": str(tmp_path / "out"),
        "sections": [unknown, one_prompt],
        "starts": [str(tmp_path / "absent"), str(tmp_path / "pretrained" / "value")],
    }
    [(large_tokens, too_few, absent, other)] = run_world(1, "tests.training.cases:pretraining_errors", payload)
    assert "token 40, but the model has a vocabulary of 32" in large_tokens
    assert "of 1 prompts" in too_few and "give more prompts" in too_few
    assert "is not a complete model checkpoint: it has no manifest.json" in absent
    assert "it is a checkpoint of another model" in other
    assert not (tmp_path / "out" / "value").exists()


def test_a_prompt_is_held_out_with_all_its_trajectories() -> None:
    names = [f"prompt-{number % 50}" for number in range(400)]
    train, held_out = split_by_prompt(names, 0.2, seed=0)
    assert sorted(train + held_out) == list(range(400))
    assert not {names[row] for row in train} & {names[row] for row in held_out}
    assert 40 <= len(held_out) <= 120
    again = split_by_prompt(list(reversed(names)), 0.2, seed=0)
    assert {names[row] for row in held_out} == {names[399 - row] for row in again[1]}, "whatever the order"
    assert split_by_prompt(names, 0.2, seed=1)[1] != held_out
    with pytest.raises(ValueError, match=r"held_out = 0.5 of 1 prompts: (0|4) trajectories"):
        split_by_prompt(["a"] * 4, 0.5, seed=0)


def test_targets_are_discounted_returns_at_action_tokens() -> None:
    row = replace(
        trajectory(0, random.Random(0)),
        tokens=[1, 2, 3, 4, 5, 6],
        action_mask=[False, True, True, False, True, True],
        rewards=[0.0, 0.0, 0.5, 0.0, 0.0, 1.0],
        rollout_logprobs=None,
    )
    [packed] = pack_trajectories([row], data_rank=0, data_size=1, token_budget=64).rows
    options = SkipObservationGae(gamma=0.5, value_lambda=0.3)
    returns = monte_carlo_returns(packed, options)
    expected = torch.tensor([0.0, 0.25 + 0.125, 0.5 + 0.25, 0.0, 0.5, 1.0])
    torch.testing.assert_close(returns, expected)
