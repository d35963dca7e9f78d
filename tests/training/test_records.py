"""What a step leaves behind for people: its line of metrics, examples, and which checkpoints stay."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from megasao.algorithms.advantages import Advantages
from megasao.algorithms.objectives import PolicyInputs, make_objective
from megasao.config.algorithm import DisObjective
from megasao.config.rundir import RunDirectory
from megasao.training.batch import pack_trajectories
from megasao.training.checkpoint import latest_checkpoint, prune
from megasao.training.examples import example_rows
from megasao.training.metrics import batch_metrics, throughput_metrics
from megasao.training.sft import cross_entropy
from megasao.training.step import StepResult
from megasao.trajectories.schema import Trajectory
from megasao.transport.messages import ManifestEntry


def entry(name: str, reward: float, oldest: int, newest: int, *, truncated: bool = False) -> ManifestEntry:
    return ManifestEntry(
        trajectory_id=name,
        tokens=10,
        action_tokens=4 if truncated else 6,
        oldest_version=oldest,
        newest_version=newest,
        reward=reward,
        truncated=truncated,
    )


def test_a_line_says_what_the_manifest_holds() -> None:
    entries = [
        entry("a", 1.0, 3, 5),
        entry("b", 0.0, 5, 5, truncated=True),
        entry("c", 0.0, 6, 6),
        entry("d", 0.0, 5, 5),
    ]
    line = batch_metrics(entries, {"idle": 0.25}, version=5)
    assert line == {
        "reward/mean": 0.25,
        "reward/std": pytest.approx(math.sqrt(3) / 4),
        "data/trajectories": 4.0,
        "data/lag_mean": 0.5,
        "data/lag_max": 2.0,
        "data/mixed_versions": 0.25,
        "data/response_tokens": 5.5,
        "data/total_tokens": 10.0,
        "data/truncated": 0.25,
        "rollout/idle": 0.25,
    }


def test_several_tasks_have_a_mean_reward_each() -> None:
    entries = [structs.replace(entry("a", 1.0, 3, 5), task="sums"), entry("b", 0.0, 5, 5), entry("c", 0.5, 6, 6)]
    line = batch_metrics(entries, {}, version=5)
    assert (line["reward/mean"], line["reward/mean/sums"], line[f"reward/mean/{entries[1].task}"]) == (0.5, 1.0, 0.25)


def test_speed_counts_no_waiting_and_idle_is_its_share() -> None:
    line = throughput_metrics({"time/wait": 3.0, "rollout/idle": 0.5, "rollout/tokens_per_s": 7.0}, 100, 5.0)
    assert line["throughput/trainer_tokens_per_s"] == 50.0
    assert (line["idle/trainer"], line["idle/rollout"], line["throughput/rollout_tokens_per_s"]) == (0.6, 0.5, 7.0)


def trajectory(logprobs: list[float] | None) -> Trajectory:
    return Trajectory(
        trajectory_id="t",
        prompt_id="p",
        group_id="p",
        task="test",
        tokens=[1, 2, 3],
        action_mask=[False, True, True],
        rewards=[0.0, 0.0, 1.0],
        weight_versions=[(0, 0)],
        turn_starts=[1],
        finish_reason="done",
        rollout_logprobs=logprobs,
    )


def test_examples_show_numbers_at_actions_only_and_ratios_of_trainer_over_engine() -> None:
    batch = pack_trajectories([trajectory([0.0, -1.0, -2.0])], data_rank=0, data_size=1, token_budget=16)
    numbers = torch.tensor([9.0, -1.0 + math.log(2), -2.0 - math.log(10)])
    result = StepResult(values=[numbers], advantages=[Advantages(numbers, numbers, torch.ones(1))])
    codec: Any = type("Codec", (), {"token_text": staticmethod(str)})
    packed = batch.rows[0]
    inputs = PolicyInputs(numbers, packed.rollout_logprobs, numbers, packed.action_mask, packed.row.cu_seqlens)
    kept = make_objective(DisObjective(eps_low=0.8, eps_high=3.0)).kept(inputs)
    [row] = example_rows(batch, [numbers], [kept], result, codec, count=2)
    assert row["ratio"] == [None, pytest.approx(2.0), pytest.approx(0.1)]
    assert row["kept"] == [None, True, False]
    assert row["reward"] == 1.0 and row["text"] == ["1", "2", "3"]
    assert all(row[name][0] is None for name in ("logprobs", "rollout_logprobs", "values", "advantages", "returns"))


def test_examples_leave_out_what_the_algorithm_does_not_have() -> None:
    batch = pack_trajectories([trajectory(None)], data_rank=0, data_size=1, token_budget=16)
    numbers = torch.tensor([9.0, -1.0, -2.0])
    result = StepResult(advantages=[Advantages(numbers)])
    codec: Any = type("Codec", (), {"token_text": staticmethod(str)})
    [row] = example_rows(batch, [numbers], [batch.rows[0].action_mask], result, codec, count=2)
    assert not {"values", "returns", "rollout_logprobs", "ratio"} & row.keys()
    assert row["kept"] == [None, True, True] and row["advantages"] == [None, -1.0, -2.0]


def test_fine_tuning_learns_action_tokens_only() -> None:
    logprobs = torch.tensor([math.nan, -1.0, -3.0], requires_grad=True)
    loss, stats = cross_entropy(logprobs, torch.tensor([False, True, True]), 2.0)
    loss.backward()
    assert loss.item() == 2.0 and stats["tokens"] == 2
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, -0.5, -0.5]


def test_the_newest_complete_checkpoints_stay(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert latest_checkpoint(run) is None
    for step, complete in ((2, True), (4, False), (6, True), (8, True), (10, False)):
        directory = run.checkpoints / f"step_{step:06d}"
        directory.mkdir(parents=True)
        if complete:
            (directory / "COMPLETE").touch()
    (run.checkpoints / "latest").write_text("step_000010")
    with pytest.raises(ValueError, match="step_000010, which is not a complete checkpoint"):
        latest_checkpoint(run)
    (run.checkpoints / "latest").write_text("step_000008")
    assert latest_checkpoint(run) == run.checkpoints / "step_000008"
    prune(run, keep=2)
    assert sorted(p.name for p in run.checkpoints.glob("step_*")) == ["step_000006", "step_000008"]


def test_after_going_back_the_new_checkpoint_stays_and_the_abandoned_future_goes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (2, 4, 6):
        directory = run.checkpoints / f"step_{step:06d}"
        directory.mkdir(parents=True)
        (directory / "COMPLETE").touch()
    (run.checkpoints / "latest").write_text("step_000004")
    prune(run, keep=1)
    assert sorted(p.name for p in run.checkpoints.glob("step_*")) == ["step_000004"]
