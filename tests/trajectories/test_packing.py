"""Plans are complete, bounded, balanced and deterministic; rows carry every trajectory unchanged."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasao.trajectories.packing import attention_cost, pack_row, plan
from megasao.trajectories.schema import Trajectory

BUDGET = 100
lengths_strategy = st.lists(st.integers(1, BUDGET), max_size=60)


def trajectory(name: str = "a", *, length: int = 4, logprobs: bool = True, **changes: object) -> Trajectory:
    fields: dict[str, object] = {
        "trajectory_id": name,
        "prompt_id": "p",
        "group_id": "g",
        "task": "t",
        "tokens": list(range(10, 10 + length)),
        "action_mask": [index % 2 == 1 for index in range(length)],
        "rewards": [0.25 * index for index in range(length)],
        "weight_versions": [(0, 0)],
        "turn_starts": [1],
        "finish_reason": "done",
        "rollout_logprobs": [-0.5 * index for index in range(length)] if logprobs else None,
        "temperature": 0.7,
    }
    return Trajectory(**(fields | changes))  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(lengths_strategy, st.integers(1, 5))
def test_a_plan_is_complete_bounded_and_even(lengths: list[int], data_size: int) -> None:
    ranks = plan(lengths, data_size=data_size, token_budget=BUDGET)
    rows = [row for rank in ranks for row in rank]
    assert len(ranks) == data_size
    assert len({len(rank) for rank in ranks}) == 1 and len(ranks[0]) >= 1
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= BUDGET for row in rows)
    assert plan(tuple(lengths), data_size=data_size, token_budget=BUDGET) == ranks


@settings(max_examples=100, deadline=None)
@given(lengths_strategy, st.integers(1, 4))
def test_the_number_of_rows_is_near_the_least(lengths: list[int], data_size: int) -> None:
    """Longest first, a trajectory that finds no room means that every row is more than half full."""
    rows_per_rank = len(plan(lengths, data_size=data_size, token_budget=BUDGET)[0])
    least = -(-sum(lengths) // BUDGET)
    assert rows_per_rank <= max(1, -(-2 * least // data_size))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, BUDGET), min_size=2, max_size=60), st.integers(2, 4))
def test_ranks_are_balanced_within_the_dearest_row(lengths: list[int], data_size: int) -> None:
    ranks = plan(lengths, data_size=data_size, token_budget=BUDGET)
    costs = [[sum(attention_cost(lengths[index]) for index in row) for row in rank] for rank in ranks]
    load = [sum(rank) for rank in costs]
    dearest = max(cost for rank in costs for cost in rank)
    assert max(load) - min(load) <= dearest + 1e-9


def test_balance_rejects_dealing_in_the_order_of_arrival() -> None:
    lengths = [90, 10, 90, 10, 90, 10, 90, 10]
    ranks = plan(lengths, data_size=2, token_budget=BUDGET)
    load = [sum(lengths[index] for row in rank for index in row) for rank in ranks]
    assert load == [200, 200]
    by_arrival = [sum(lengths[rank::2]) for rank in range(2)]
    assert max(by_arrival) - min(by_arrival) > BUDGET


def test_the_dearest_row_of_a_round_goes_to_the_rank_with_the_least_so_far() -> None:
    assert plan([90, 60, 55, 51], data_size=2, token_budget=BUDGET) == [[[0], [3]], [[1], [2]]]


def test_cost_decides_the_balance() -> None:
    lengths = [60, 20, 20, 20]
    linear = plan(lengths, data_size=2, token_budget=BUDGET, cost=float)
    assert linear == [[[0]], [[1, 2, 3]]]
    steps = plan(lengths, data_size=2, token_budget=BUDGET, cost=lambda length: 1.0)
    assert [len(rank[0]) for rank in steps] == [2, 2]
    assert attention_cost(2000) > 2 * attention_cost(1000)


def test_few_trajectories_leave_empty_rows() -> None:
    assert plan([], data_size=2, token_budget=BUDGET) == [[[]], [[]]]
    assert plan([5], data_size=3, token_budget=BUDGET) == [[[0]], [[]], [[]]]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 101], {}, "trajectory 1: expected 1 to token_budget = 100 tokens, got 101; raise trainer.token_budget"),
        ([0], {}, "trajectory 0: expected 1 to token_budget"),
        ([1], {"data_size": 0}, "expected data_size >= 1"),
        ([1], {"token_budget": 0}, "expected data_size >= 1 and token_budget >= 1, got 2 and 0"),
    ],
)
def test_impossible_plans_are_refused(lengths: list[int], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(lengths, **({"data_size": 2, "token_budget": BUDGET} | options))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=5), st.integers(1, 4))
def test_a_row_carries_every_trajectory(lengths: list[int], multiple_of: int) -> None:
    trajectories = [trajectory(str(n), length=length, temperature=0.5 + n) for n, length in enumerate(lengths)]
    row = pack_row(trajectories, multiple_of=multiple_of)
    total = len(row.tokens)
    assert total == int(row.cu_seqlens[-1]) >= max(1, sum(lengths))
    assert total % multiple_of == 0 and total < sum(lengths) + multiple_of + (not lengths)
    assert row.trajectory_ids == tuple(item.trajectory_id for item in trajectories)
    for n, item in enumerate(trajectories):
        part = slice(int(row.cu_seqlens[n]), int(row.cu_seqlens[n + 1]))
        assert row.tokens[part].tolist() == item.tokens
        assert row.action_mask[part].tolist() == item.action_mask
        assert row.rewards[part].tolist() == item.rewards
        assert row.position_ids[part].tolist() == list(range(lengths[n]))
        assert (row.sequence_ids[part] == n).all() and (row.temperature[part] == np.float32(0.5 + n)).all()
        expected = [
            logprob if acts else 0.0 for logprob, acts in zip(item.rollout_logprobs, item.action_mask, strict=True)
        ]
        assert row.rollout_logprobs[part].tolist() == expected
    assert not row.action_mask[sum(lengths) :].any() and not row.rewards[sum(lengths) :].any()
    assert row.max_seqlen == int(np.diff(row.cu_seqlens).max())


def test_dtypes() -> None:
    for row in (pack_row([trajectory()]), pack_row([])):
        for name in ("tokens", "position_ids", "sequence_ids"):
            assert getattr(row, name).dtype == np.int64
        for name in ("rollout_logprobs", "rewards", "temperature"):
            assert getattr(row, name).dtype == np.float32
        assert row.cu_seqlens.dtype == np.int32 and row.action_mask.dtype == np.bool_
        assert isinstance(row.max_seqlen, int)


def test_an_empty_row_is_one_masked_token() -> None:
    row = pack_row([])
    assert row.cu_seqlens.tolist() == [0, 1] and row.tokens.tolist() == [0] and row.trajectory_ids == ()
    assert row.max_seqlen == 1 and row.temperature.tolist() == [1.0] and not row.action_mask.any()
    assert pack_row([], multiple_of=4).cu_seqlens.tolist() == [0, 4]


def test_log_probabilities_that_were_not_recorded_are_zero() -> None:
    row = pack_row([trajectory("a", logprobs=False), trajectory("b")])
    assert row.rollout_logprobs[:4].tolist() == [0.0] * 4 and row.rollout_logprobs[5] == -0.5


def test_garbage_log_probability_at_an_observation_is_not_carried() -> None:
    row = pack_row([trajectory(rollout_logprobs=[float("nan"), -1.0, float("nan"), -2.0])])
    assert row.rollout_logprobs.tolist() == [0.0, -1.0, 0.0, -2.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_mask": [True, True, False, True]}, "trajectory 'a': expected an observation as first token"),
        ({"rewards": [0.0]}, "trajectory 'a': expected 4 entries in rewards .*, got 1"),
        ({"rollout_logprobs": [0.0] * 5}, "expected 4 entries in rollout_logprobs .*, got 5"),
        ({"length": 0}, "trajectory 'a': expected at least one token"),
    ],
)
def test_wrong_trajectories_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_row([trajectory("b"), trajectory("a", **changes)])


def test_multiple_of_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple_of: expected a number >= 1, got 0"):
        pack_row([], multiple_of=0)


def test_packing_needs_no_torch() -> None:
    code = "import sys, megasao.trajectories.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=400).returncode == 0


def test_each_segment_is_a_sequence_of_its_own_in_the_same_row() -> None:
    mask = [False, True, True, False, True, False, False, True]
    cut = trajectory("cut", length=8, action_mask=mask, segment_starts=[0, 3, 5])
    row = pack_row([trajectory("a"), cut], multiple_of=5)
    assert row.cu_seqlens.tolist() == [0, 4, 7, 9, 12, 15] and row.max_seqlen == 4
    assert row.trajectory_cu_seqlens.tolist() == [0, 4, 12, 15] and row.trajectory_cu_seqlens.dtype == np.int32
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2]
    assert row.trajectory_ids == ("a", "cut")
    whole = pack_row([trajectory("a"), trajectory("cut", length=8, action_mask=mask)], multiple_of=5)
    assert whole.cu_seqlens.tolist() == whole.trajectory_cu_seqlens.tolist() == [0, 4, 12, 15]
    for name in ("tokens", "action_mask", "rollout_logprobs", "rewards", "temperature"):
        assert (getattr(row, name) == getattr(whole, name)).all(), "only attention and positions differ"


def test_a_segment_that_begins_with_an_action_is_refused() -> None:
    with pytest.raises(ValueError, match="trajectory 'a': expected an observation as first token"):
        pack_row([trajectory("a", segment_starts=[0, 3])])
