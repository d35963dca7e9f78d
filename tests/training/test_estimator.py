"""Advantages of a step do not depend on ranks or packing; whitening counts all ranks; a critic-less step has none."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megasao.algorithms.advantages import Advantages, estimate_from_values
from megasao.config.algorithm import AlgorithmConfig, GroupBaseline, RunningMean, SkipObservationGae
from megasao.training.batch import Batch, pack_trajectories
from megasao.training.estimator import Estimator
from megasao.trajectories.schema import Trajectory
from tests.training.cases import trajectories

ESTIMATORS = {
    "group": AlgorithmConfig(advantages=GroupBaseline(std=True)),
    "running_mean": AlgorithmConfig(advantages=RunningMean(scope="task")),
    "gae": AlgorithmConfig(advantages=SkipObservationGae()),
    "whitened": AlgorithmConfig(advantages=SkipObservationGae(), whiten=True),
}


def grouped(step: int = 0) -> list[Trajectory]:
    """Twelve trajectories in groups of four."""
    return [replace(t, group_id=f"g{number // 4}") for number, t in enumerate(trajectories(step, 12))]


def batches(ranks: int, budget: int, step: int = 0) -> list[Batch]:
    return [
        pack_trajectories(grouped(step), data_rank=rank, data_size=ranks, token_budget=budget) for rank in range(ranks)
    ]


def values_of(batch: Batch) -> list[torch.Tensor]:
    """A critic that looks at the token alone."""
    return [(row.row.tokens * 7 % 11) / 11.0 for row in batch.rows]


def by_trajectory(parts: list[Batch], estimates: list[list[Advantages]]) -> dict[str, torch.Tensor]:
    found = {}
    for batch, rows in zip(parts, estimates, strict=True):
        for row, estimate in zip(batch.rows, rows, strict=True):
            bounds = row.row.cu_seqlens.tolist()
            for number, trajectory in enumerate(row.trajectories):
                found[trajectory.trajectory_id] = estimate.advantages[bounds[number] : bounds[number + 1]]
    return found


def estimate(name: str, ranks: int, budget: int) -> dict[str, torch.Tensor]:
    """All ranks of a layout, in lockstep: the sums of whitening go through ``reduce`` one after another."""
    parts = batches(ranks, budget)
    sums: list[list[torch.Tensor]] = []

    def reducer(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        calls = iter(range(100))

        def reduce(part: torch.Tensor) -> torch.Tensor:
            call = next(calls)
            if len(sums) == call:
                sums.append([torch.zeros(())] * ranks)
            sums[call][rank] = part
            return torch.stack(sums[call]).sum()

        return reduce

    # Twice per sum: the first passes only collect the parts of every rank.
    for _ in range(3):
        results = [
            Estimator(ESTIMATORS[name], reducer(rank)).estimate(batch, values_of(batch))
            for rank, batch in enumerate(parts)
        ]
    return by_trajectory(parts, results)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(("ranks", "budget"), [(1, 48), (2, 4096), (3, 64)])
def test_advantages_do_not_depend_on_the_split(name: str, ranks: int, budget: int) -> None:
    expected, got = estimate(name, 1, 4096), estimate(name, ranks, budget)
    assert expected.keys() == got.keys()
    for trajectory, advantages in expected.items():
        torch.testing.assert_close(got[trajectory], advantages, rtol=1e-6, atol=1e-6)


def test_whitening_by_a_rank_alone_is_noticed() -> None:
    parts = batches(2, 4096)
    wrong = [Estimator(ESTIMATORS["whitened"], lambda part: part).estimate(b, values_of(b)) for b in parts]
    expected = estimate("whitened", 1, 4096)
    assert any(not torch.allclose(a, expected[name], atol=1e-3) for name, a in by_trajectory(parts, wrong).items())


def test_whitened_advantages_have_mean_zero_and_variance_one() -> None:
    [batch] = batches(1, 64)
    whitened = Estimator(ESTIMATORS["whitened"], lambda part: part).estimate(batch, values_of(batch))
    plain = Estimator(ESTIMATORS["gae"], lambda part: part).estimate(batch, values_of(batch))
    flat = torch.cat([a.advantages[row.action_mask] for row, a in zip(batch.rows, whitened, strict=True)])
    assert float(flat.mean()) == pytest.approx(0, abs=1e-6) and float(flat.std(correction=0)) == pytest.approx(1)
    assert all(torch.equal(a.returns, b.returns) for a, b in zip(whitened, plain, strict=True))
    assert all(not a.advantages[~row.action_mask].any() for row, a in zip(batch.rows, whitened, strict=True))


def test_baselines_stand_at_action_tokens_and_give_no_returns() -> None:
    [batch] = batches(1, 64)
    for row, estimates in zip(
        batch.rows, Estimator(ESTIMATORS["group"], lambda part: part).estimate(batch, []), strict=True
    ):
        assert estimates.returns is None
        assert not estimates.advantages[~row.action_mask].any()
        assert estimates.advantages.dtype == torch.float32


def test_the_running_mean_goes_on_from_its_state() -> None:
    first, second = (
        Estimator(ESTIMATORS["running_mean"], lambda p: p),
        Estimator(ESTIMATORS["running_mean"], lambda p: p),
    )
    [batch], [later] = batches(1, 4096), batches(1, 4096, step=1)
    first.estimate(batch, [])
    second.load(first.state())
    fresh = Estimator(ESTIMATORS["running_mean"], lambda p: p).estimate(later, [])[0].advantages
    assert torch.equal(second.estimate(later, [])[0].advantages, expected := first.estimate(later, [])[0].advantages)
    assert not torch.equal(fresh, expected)
    assert Estimator(ESTIMATORS["gae"], lambda p: p).state() == {}


VALUES = torch.tensor([0.5, 0.1, 0.2, 0.9, 0.8, 0.3, 0.4])
GOLDEN = [0.0, 0.799675, 0.7365, 0.0, 0.0, 0.67, 0.6]


def in_segments(segment_starts: list[int] | None) -> Batch:
    """A prompt, two actions, two observations (or the prompt of a second segment), two actions; reward 1 at the end."""
    [episode] = trajectories(0, 1)
    episode = replace(
        episode,
        trajectory_id="long",
        tokens=[1] * 7,
        action_mask=[False, True, True, False, False, True, True],
        rewards=[0.0] * 6 + [1.0],
        rollout_logprobs=None,
        segment_starts=segment_starts,
    )
    return pack_trajectories([episode, *trajectories(1, 3)], data_rank=0, data_size=1, token_budget=4096)


@pytest.mark.parametrize("value_lambda", [1.0, 0.9])
def test_gae_runs_over_the_segments_as_over_one_sequence_of_actions(value_lambda: float) -> None:
    options = SkipObservationGae(policy_lambda=0.95, value_lambda=value_lambda)
    cut, whole = in_segments([0, 3]), in_segments(None)
    estimates = []
    for batch in (cut, whole):
        row = batch.rows[0]
        start = row.cu_seqlens[[t.trajectory_id for t in row.trajectories].index("long")]
        values = torch.zeros(len(row.row.tokens)).index_copy(0, torch.arange(7) + start, VALUES)
        [estimate] = Estimator(AlgorithmConfig(advantages=options), lambda total: total).estimate(batch, [values])
        estimates.append(estimate)
        assert estimate.advantages[start : start + 7].tolist() == pytest.approx(GOLDEN, abs=1e-6)
    assert torch.equal(estimates[0].advantages, estimates[1].advantages)
    assert torch.equal(estimates[0].returns, estimates[1].returns)
    # negative control: returns that end with a segment give the first one's actions nothing of the reward
    row = cut.rows[0]
    assert row.row.cu_seqlens.numel() == row.cu_seqlens.numel() + 1
    split = estimate_from_values(row.rewards, values, row.action_mask, row.row.cu_seqlens, options)
    assert split.advantages[start + 1].item() == pytest.approx(-0.1 + 0.95 * 0.0 + 0.2 - 0.95 * 0.2, abs=1e-6)


def test_the_length_that_adapts_lambda_counts_the_actions_of_all_segments() -> None:
    options = AlgorithmConfig(advantages=SkipObservationGae())
    lam = []
    for starts in ([0, 3], None):
        batch = in_segments(starts)
        [estimate] = Estimator(options, lambda total: total).estimate(batch, [values_of(batch)[0]])
        lam.append(estimate.lam)
    assert torch.equal(*lam) and lam[0].numel() == 4
