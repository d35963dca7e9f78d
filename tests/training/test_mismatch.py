"""The monitor of log-probs of trainer and engine: its sets of tokens, its numbers, its alarms."""

import random
from dataclasses import replace

import pytest
import torch

from megasao.algorithms.stats import combine
from megasao.config.rollout import MismatchConfig
from megasao.training.batch import Batch, pack_trajectories
from megasao.training.mismatch import alarms, row_stats, sampled_by, summarize
from megasao.trajectories.schema import Trajectory
from tests.training.cases import trajectories

VERSION = 7


def versioned(step: int) -> list[Trajectory]:
    """Trajectories of which the tokens from a random place on are of the current version, some wholly, some not."""
    generator = random.Random(step)
    rows = []
    for trajectory in trajectories(step):
        cut = generator.choice([0, generator.randrange(1, len(trajectory.tokens)), len(trajectory.tokens)])
        spans = [(0, VERSION - 1)] * (cut > 0) + [(cut, VERSION)] * (cut < len(trajectory.tokens))
        rows.append(replace(trajectory, weight_versions=spans))
    return rows


def pack(rows: list[Trajectory], budget: int) -> Batch:
    return pack_trajectories(rows, data_rank=0, data_size=1, token_budget=budget)


def drifted(batch: Batch, *, current: float, older: float) -> list[torch.Tensor]:
    """The trainer's log-probs: the engine's, and a difference by who sampled; observations hold no numbers."""
    found = []
    for row in batch.rows:
        drift = torch.where(sampled_by(row, VERSION), current, older)
        found.append(torch.where(row.action_mask, row.rollout_logprobs + drift, torch.nan))
    return found


def measure(batch: Batch, logprobs: list[torch.Tensor], version: int = VERSION) -> dict[str, float | None]:
    return summarize(combine(row_stats(p, r, version) for p, r in zip(logprobs, batch.rows, strict=True)))


def test_current_tokens_are_told_from_older_ones() -> None:
    rows = versioned(1)
    batch = pack(rows, 64)
    expected = sum(
        action and any(start <= i and version == VERSION for start, version in row.weight_versions or [])
        for row in rows
        for i, action in enumerate(row.action_mask)
    )
    found = measure(batch, drifted(batch, current=0.01, older=-0.5))
    assert 0 < expected < batch.action_tokens
    assert (found["current_tokens"], found["current_invalid"]) == (expected, 0)
    assert found["current_log_ratio_abs_mean"] == pytest.approx(0.01, rel=1e-4)
    assert found["current_log_ratio_abs_max"] == pytest.approx(0.01, rel=1e-4)
    assert found["current_kl_k3"] == pytest.approx(0.01**2 / 2, rel=0.01)
    assert found["current_ess"] == pytest.approx(1.0)
    assert found["log_ratio_abs_max"] == pytest.approx(0.5, rel=1e-4)


def test_the_numbers_do_not_depend_on_packing() -> None:
    rows = versioned(2)
    generator = torch.Generator().manual_seed(0)
    noise = {row.trajectory_id: torch.randn(len(row.tokens), generator=generator) for row in rows}

    def packed(budget: int) -> dict[str, float | None]:
        batch = pack(rows, budget)
        logprobs = []
        for row in batch.rows:
            drift = torch.zeros(len(row.action_mask))
            whole = torch.cat([noise[trajectory.trajectory_id] for trajectory in row.trajectories])
            drift[: len(whole)] = whole
            logprobs.append(row.rollout_logprobs + drift)
        return measure(batch, logprobs)

    narrow, wide = packed(48), packed(4096)
    assert narrow == pytest.approx(wide, rel=1e-6)
    assert narrow["current_ess"] != pytest.approx(1.0, abs=0.1)


def test_without_a_current_token_there_is_nothing_to_say_of_them() -> None:
    batch = pack([replace(row, weight_versions=None) for row in trajectories(3)], 64)
    found = measure(batch, drifted(batch, current=0.0, older=0.2))
    assert found["current_tokens"] == 0.0
    assert found["current_log_ratio_abs_mean"] is found["current_log_ratio_abs_max"] is found["current_ess"] is None
    assert found["log_ratio_abs_max"] == pytest.approx(0.2, rel=1e-4)


def test_log_probs_that_are_no_number_are_counted_and_left_out() -> None:
    batch = pack(versioned(4), 64)
    logprobs = drifted(batch, current=0.01, older=0.01)
    current = [row.action_mask & sampled_by(row, VERSION) for row in batch.rows]
    number = next(number for number, mask in enumerate(current) if mask.any())
    logprobs[number][current[number].nonzero()[0]] = torch.nan
    found = measure(batch, logprobs)
    assert (found["current_invalid"] or 0) * (found["current_tokens"] or 0) == pytest.approx(1.0)
    assert found["current_log_ratio_abs_max"] == pytest.approx(0.01, rel=1e-4)


LIMITS = MismatchConfig(current_abs_mean=0.1, current_abs_max=1.0, kl=0.05, ess=0.5)
GOOD = {
    "actor/current_log_ratio_abs_mean": 0.1,
    "actor/current_log_ratio_abs_max": 1.0,
    "actor/kl_k3": 0.05,
    "actor/ess": 0.5,
}


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("actor/current_log_ratio_abs_mean", 0.11, "mismatch.current_abs_mean = 0.1"),
        ("actor/current_log_ratio_abs_max", 1.1, "mismatch.current_abs_max = 1"),
        ("actor/kl_k3", float("nan"), "mismatch.kl = 0.05"),
        ("actor/ess", 0.4, "below observability.mismatch.ess = 0.5"),
    ],
)
def test_an_alarm_names_the_number_and_its_limit(name: str, value: float, setting: str) -> None:
    assert alarms(dict(GOOD), LIMITS) == []
    (alarm,) = alarms({**GOOD, name: value}, LIMITS)
    assert alarm.startswith(f"{name} = {value:.3g} is ") and setting in alarm
    off = MismatchConfig(current_abs_mean=None)
    assert alarms({**GOOD, name: value}, off) == []
    assert alarms(dict.fromkeys(GOOD), LIMITS) == [], "a step without such tokens"
