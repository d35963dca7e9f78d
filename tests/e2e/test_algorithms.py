"""Algorithms other than SAO as whole runs: from the command line alone, three real steps each."""

from pathlib import Path
from typing import Any

import pytest

from megasao.trajectories.journal import Journal
from tests.e2e import runs

pytestmark = pytest.mark.e2e
STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_model(tmp_path_factory.mktemp("model"))


def train(model: Path, directory: Path, name: str, *more: str, **sections: dict[str, Any]) -> runs.RunDirectory:
    config = runs.write_config(
        directory / "config.yaml",
        model,
        critic={"warmup_steps": 0},
        loop={"steps": STEPS, "batch_size": 16},
        evaluation={"problems": 4, "every": 0, "sampled": False},
        **sections,
    )
    return runs.train(config, f"configs/algorithms/{name}.yaml", *more)


def columns(run: runs.RunDirectory) -> dict[str, list[Any]]:
    """The journal's rows by column."""
    names = (
        "group_id",
        "prompt_id",
        "rollout_logprobs",
        "routed_experts",
        "tokens",
        "trajectory_id",
        "weight_versions",
    )
    found: dict[str, list[Any]] = {name: [] for name in names}
    for batch, _ in Journal(run.journal).recover():
        for name, values in found.items():
            values += batch.column(name).to_pylist()
    return found


def check_groups(run: runs.RunDirectory, size: int) -> None:
    """Every step was trained on whole groups, each of one prompt."""
    rows = columns(run)
    groups = dict(zip(rows["trajectory_id"], zip(rows["group_id"], rows["prompt_id"], strict=True), strict=True))
    batches = [record for record in runs.read_ledger(run) if isinstance(record, runs.Batch)]
    assert [batch.step for batch in batches] == list(range(STEPS))
    for batch in batches:
        members = [groups[name] for name in batch.trajectory_ids]
        assert all(members.count(member) == size for member in members)


def check_steps(run: runs.RunDirectory) -> list[dict[str, Any]]:
    lines = runs.steps(run)
    assert [line["weight_version"] for line in lines] == [1, 2, 3], "no warm-up: every step is an update"
    assert all(line["actor/grad_norm"] is not None for line in lines)
    assert (run.path / "report.html").exists() and list(run.examples.iterdir())
    return lines


def test_asympo_needs_no_logprobs_and_no_critic(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path, "asympo")
    lines = check_steps(run)
    check_groups(run, 8)
    for name in ("rollout_logprobs", "weight_versions"):
        assert all(value is None for value in columns(run)[name]), "nobody asked for them"
    assert all(ids is None for ids in columns(run)["routed_experts"])
    assert all(abs(line["actor/loss"]) < 1e-6 for line in lines), "the loss of whole groups balances"
    for line in lines:
        assert not {"actor/ratio_mean", "actor/kl_k3", "critic/loss", "data/mixed_versions"} & line.keys()
        stale = line["data/lag_mean"] * 16
        assert stale <= 8 or line["data/lag_max"] > 1
    assert not list(run.checkpoints.glob("*/critic"))


def test_grpo_on_asynchronous_groups(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path, "grpo", "loop.group_size=4")
    lines = check_steps(run)
    check_groups(run, 4)
    for name in ("rollout_logprobs", "weight_versions"):
        assert all(value is not None for value in columns(run)[name])
    assert all(line["actor/clipped_high"] is not None and line["actor/ratio_mean"] > 0 for line in lines)


def test_vapo_has_a_critic_and_no_groups(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path, "vapo")
    lines = check_steps(run)
    assert all(line["critic/loss"] is not None for line in lines)
    assert all(line["actor/clipped_low"] is not None for line in lines)


def test_a_running_mean_is_the_same_after_a_resume(model: Path, tmp_path: Path) -> None:
    """Back to the checkpoint after two steps: the third is redone bit for bit, so its baselines were saved."""
    more = ("checkpoint.every=2", "algorithm.advantages.scope=global", "algorithm.advantages.window=128")
    run = train(model, tmp_path, "sao_running_mean", *more)
    check_steps(run)
    saved = {p.name: p.read_bytes() for p in sorted((run.checkpoints / "step_000003" / "actor").iterdir())}
    baselines = (run.checkpoints / "step_000003" / "estimator.json").read_bytes()
    assert b"rewards" in baselines
    (run.checkpoints / "step_000003" / "COMPLETE").unlink()
    (run.checkpoints / "latest").write_text("step_000002", encoding="utf-8")
    runs.train(tmp_path / "config.yaml", "configs/algorithms/sao_running_mean.yaml", *more, "--resume")
    directory = run.checkpoints / "step_000003"
    assert {p.name: p.read_bytes() for p in sorted((directory / "actor").iterdir())} == saved
    assert (directory / "estimator.json").read_bytes() == baselines


def test_routing_replay_takes_the_engines_experts(model: Path, tmp_path: Path) -> None:
    """With one version of the weights everywhere, the actor's log-probabilities are the engine's."""
    run = train(model, tmp_path, "sao", "actor.router_replay=true", "loop.mode=sync")
    check_steps(run)
    rows = columns(run)
    layers, top_k = 2, 2
    for tokens, ids in zip(rows["tokens"], rows["routed_experts"], strict=True):
        assert len(ids) == len(tokens) * layers * top_k
    assert len({choice for ids in rows["routed_experts"] for choice in ids}) > 2
