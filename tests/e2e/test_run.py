"""A whole run through the command line: it ends, its books balance, and everything a person is promised is there."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e import greedy, runs

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_model(tmp_path_factory.mktemp("model"))


def logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits


def test_fine_tuning_then_asynchronous_run_on_two_ranks(model: Path, tmp_path: Path) -> None:
    config = runs.write_config(
        tmp_path / "config.yaml",
        model,
        environment={"max_turns": 8, "max_tokens": 110, "max_turn_tokens": 16},
        sft={"steps": 4, "batch_size": 8, "demonstrations": 32, "optimizer": {"lr": 1e-3}},
        parallel={"ranks": 2, "expert": 2},
        loop={"steps": 5, "batch_size": 8},
    )
    run = runs.train(config)
    runs.check_books(run, total_steps=5)

    lines = runs.steps(run)
    assert [line["step"] for line in lines] == list(range(5))
    assert [line["weight_version"] for line in lines] == [0, 1, 2, 3, 4], "one warm-up step, then one version a step"
    assert all(line["data/lag_max"] <= 4 for line in lines)
    assert all("actor/loss" in line for line in lines[1:]) and "actor/loss" not in lines[0]
    assert all(line["time/transfer"] > 0 for line in lines[2:]), "how long the version before was on its way"

    found = {(e["mode"], e["newest_version"]) for e in runs.evaluations(run)}
    assert {("greedy", 0), ("sampled", 0), ("greedy", 4), ("sampled", 4)} <= found
    assert all(e["oldest_version"] == e["newest_version"] and e["problems"] == 16 for e in runs.evaluations(run))

    tokens = [3, 4, 5, 6]
    assert not torch.equal(logits(run.final_policy, tokens), logits(run.sft, tokens)), "the policy was trained"
    assert not torch.equal(logits(run.sft, tokens), logits(model, tokens)), "fine-tuning moved the model"
    prompts = [[(3 * number + step) % 32 for step in range(4 + number)] for number in range(12)]
    answers = greedy.by_transformers(run.final_policy, prompts)
    assert greedy.by_engine(run.sft, run.final_policy, prompts) == answers
    assert greedy.by_transformers(run.sft, prompts) != answers, "other weights answer otherwise"
    assert json.loads((run.path / "summary.json").read_text(encoding="utf-8"))
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert list(run.tensorboard.rglob("events.out.tfevents.*"))


def test_synchronous_run_is_on_policy_and_engine_and_trainer_agree(model: Path, tmp_path: Path) -> None:
    """With a barrier every token comes from the trainer's own weights: the log-ratio is numerical difference alone."""
    config = runs.write_config(tmp_path / "config.yaml", model, loop={"mode": "sync", "steps": 4, "batch_size": 8})
    run = runs.train(config, "transport.curve=true")
    lines = runs.steps(run)
    assert all(line["data/lag_max"] == 0 and line["data/mixed_versions"] == 0 for line in lines)
    assert all(line["actor/log_ratio_abs_mean"] < 1e-5 for line in lines[1:])
    assert all(line["actor/masked_low"] == line["actor/masked_high"] == 0 for line in lines[1:])
    assert all(abs(math.log(line["actor/ratio_max"])) < 1e-5 for line in lines[1:])
    for step in (0, 2):
        rows = [json.loads(row) for row in (run.examples / f"step_{step:06d}.jsonl").read_text().splitlines()]
        pairs = [pair for row in rows for pair in zip(row["logprobs"], row["rollout_logprobs"], strict=True)]
        gaps = [abs(ours - theirs) for ours, theirs in pairs if ours is not None]
        assert gaps and max(gaps) < 1e-5, "every token by itself, not only their mean"
    moved = [line["actor/grad_norm"] for line in lines[1:]]
    assert min(moved) > 0, "a run that does not move agrees for nothing"


def test_lost_steps_are_redone_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """Four steps; then back to the checkpoint after two: the resumed run repeats steps 3 and 4 exactly."""
    config = runs.write_config(tmp_path / "config.yaml", model, loop={"steps": 4, "batch_size": 8})
    run = runs.train(config)
    first = {p.name: p.read_bytes() for p in sorted((run.checkpoints / "step_000004" / "actor").iterdir())}
    critic = {p.name: p.read_bytes() for p in sorted((run.checkpoints / "step_000004" / "critic").iterdir())}
    (run.checkpoints / "step_000004" / "COMPLETE").unlink()
    (run.checkpoints / "latest").write_text("step_000002", encoding="utf-8")

    run = runs.train(config, "--resume")
    directory = run.checkpoints / "step_000004"
    assert {p.name: p.read_bytes() for p in sorted((directory / "actor").iterdir())} == first
    assert {p.name: p.read_bytes() for p in sorted((directory / "critic").iterdir())} == critic
    runs.check_books(run, total_steps=4)


def test_a_run_directory_in_use_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    config = runs.write_config(tmp_path / "config.yaml", model)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("x", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "megasao", "train", str(config)],
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT_S,
    )
    assert result.returncode == 2
    assert "--resume" in result.stdout + result.stderr
