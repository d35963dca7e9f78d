"""Evaluations and benchmarks beside training."""

import json

import pytest
from controller_support import (
    A,
    granted,
    make_config,
    ready,
    result_of,
    run_evaluation,
)

from megasao.environments.benchmarks.background import background_benchmarks


def test_evaluations_go_first_cost_no_buffer_and_end_in_one_line_each():
    state = ready(make_config(evaluation={"problems": 3}, loop={"batch_size": 4, "max_lag": 0}))
    state.request_evaluation(7, 3, 0.0)
    state.request_evaluation(7, 3, 0.0)
    leases = granted(state, 1.0)
    greedy = [lease for lease in leases if lease.evaluation_id == "step-000007/greedy"]
    sampled = [lease for lease in leases if lease.evaluation_id == "step-000007/sampled"]
    training = [lease for lease in leases if lease.evaluation_id is None]
    assert [lease.prompt_index for lease in greedy] == [lease.prompt_index for lease in sampled] == [0, 1, 2]
    assert {lease.temperature for lease in greedy} == {0.0} and {lease.temperature for lease in sampled} == {1.0}
    assert {(lease.split, lease.min_version) for lease in greedy + sampled} == {("eval", 3)}
    assert len(training) == 4 and leases[:6] == greedy + sampled

    run_evaluation(state, greedy, lambda lease: float(lease.prompt_index != 1))
    [line] = state.take_finished_evaluations(5.0)
    assert line.pop("time") > 0
    assert line == {
        "evaluation_id": "step-000007/greedy",
        "step": 7,
        "mode": "greedy",
        "problems": 3,
        "solved": 2,
        "success": 2 / 3,
        "success_by_task": {"task0": 1.0, "task1": 0.0},
        "truncated": 0.0,
        "response_tokens": 2.0,
        "failures": 0,
        "oldest_version": 3,
        "newest_version": 3,
        "seconds": 5.0,
    }
    assert state.evaluations.open == ["step-000007/sampled"]
    state.request_evaluation(7, 3, 0.0)
    assert state.evaluations.open == ["step-000007/sampled"], "finished ones are not run again"


def test_evaluations_take_no_room_of_rollouts():
    """With their own engine they have their own places: as many rollouts are leased as without them."""
    config = make_config(evaluation={"problems": 50, "concurrency": 5}, rollout={"concurrency": 9})
    state, without = ready(config, free=9), ready(config, free=9)
    state.request_evaluation(0, 0, 0.0)
    leases = granted(state, 0.0)
    training = [lease for lease in leases if lease.evaluation_id is None]
    assert len(leases) - len(training) == 5, "evaluation.concurrency"
    assert len(training) == 9 == len(granted(without, 0.0))
    state.credit(A, 9, 0, 0.0, 64)
    assert granted(state, 0.0) == [], "neither more than its concurrency, whatever a late credit says"
    state.evaluated(result_of(leases[0], 1, 1.0))
    state.credit(A, 0, 0, 0.0, 1)
    assert [lease.evaluation_id is not None for lease in granted(state, 0.0)] == [True]


def write_benchmark(path, name, count):
    path.mkdir(exist_ok=True)
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(count)]
    (path / f"{name}.json").write_text(json.dumps(rows))


def test_benchmarks_are_measured_beside_the_environment(tmp_path):
    write_benchmark(tmp_path, "gsm8k", 3)
    write_benchmark(tmp_path, "aime24", 2)
    config = make_config(
        evaluation={"problems": 1, "sampled": False, "benchmarks": ["gsm8k", "aime24"]},
        benchmarks={"data": str(tmp_path), "samples": 2, "temperature": 0.6, "max_tokens": 110},
    )
    benchmarks = background_benchmarks(config)
    assert {name: one.responses for name, one in benchmarks.items()} == {"gsm8k": 6, "aime24": 4}
    state = ready(config, benchmarks=benchmarks)
    state.request_evaluation(3, 0, 0.0)
    leases = [lease for lease in granted(state, 0.0) if lease.evaluation_id]
    gsm = [lease for lease in leases if lease.evaluation_id == "step-000003/gsm8k"]
    assert [lease.prompt_index for lease in gsm] == [0, 1, 2, 0, 1, 2] and len(leases) == 1 + 6 + 4
    assert len({lease.seed for lease in gsm}) == 6 and {lease.temperature for lease in gsm} == {0.6}
    assert [lease.prompt_id for lease in gsm[:3]] == [
        benchmarks["gsm8k"].environment.prompt("eval", n).prompt_id for n in range(3)
    ]
    run_evaluation(state, gsm, lambda lease: float(lease.prompt_index == 1))
    [line] = state.take_finished_evaluations(5.0)
    assert (line["mode"], line["problems"], line["solved"], line["success"]) == ("gsm8k", 6, 2, 2 / 6)
    assert line["oldest_version"] == line["newest_version"] == 3, "what produced the tokens"
    assert sorted(state.evaluations.open) == ["step-000003/aime24", "step-000003/greedy"]


def test_an_open_evaluation_of_a_benchmark_that_is_no_longer_asked_for_is_let_go(tmp_path):
    """Its number would be of the environment's own problems."""
    write_benchmark(tmp_path, "gsm8k", 3)
    config = make_config(
        evaluation={"problems": 1, "sampled": False, "benchmarks": ["gsm8k"]},
        benchmarks={"data": str(tmp_path), "samples": 2, "max_tokens": 110},
    )
    before = ready(config, benchmarks=background_benchmarks(config))
    before.request_evaluation(3, 0, 0.0)
    records = before.take_records()
    assert ready(config, benchmarks=background_benchmarks(config), records=records).evaluations.open == [
        "step-000003/greedy",
        "step-000003/gsm8k",
    ]
    assert ready(make_config(evaluation={"problems": 1}), records=records).evaluations.open == ["step-000003/greedy"]


@pytest.mark.parametrize(("name", "message"), [("gsm8", "did you mean 'gsm8k'"), ("gsm8k", "does not exist")])
def test_benchmarks_that_cannot_be_had_are_refused(tmp_path, name, message):
    config = make_config(
        evaluation={"benchmarks": [name]}, benchmarks={"data": str(tmp_path / "none"), "max_tokens": 110}
    )
    with pytest.raises(ValueError, match=message):
        background_benchmarks(config)


def test_a_failed_evaluation_episode_is_no_zero():
    state = ready(make_config(evaluation={"problems": 2, "sampled": False}, buffer={"max_attempts": 2}))
    state.request_evaluation(0, 0, 0.0)
    first, second = [lease for lease in granted(state, 0.0) if lease.evaluation_id]
    state.evaluated(result_of(first, 1, 1.0))
    state.failed(second.lease_id, "engine_error")
    state.credit(A, 16, 0, 0.0, 16)
    [again] = [lease for lease in granted(state, 0.0) if lease.evaluation_id]
    assert again.prompt_index == second.prompt_index
    state.failed(again.lease_id, "engine_error")
    [line] = state.take_finished_evaluations(1.0)
    assert (line["success"], line["solved"], line["failures"]) == (1.0, 1, 1)


def test_an_evaluation_waits_for_its_weights():
    state = ready(make_config(evaluation={"problems": 2}))
    state.request_evaluation(4, 4, 0.0)
    state.request_batch(0, 1, 0.0)  # the trainer went back behind the evaluation's version
    assert [lease for lease in granted(state, 0.0) if lease.evaluation_id] == []
    state.request_batch(0, 4, 0.0)
    state.credit(A, 16, 0, 0.0, 16)
    assert len([lease for lease in granted(state, 0.0) if lease.evaluation_id]) == 4


def test_impossible_evaluation_results_are_refused_and_tried_again():
    state = ready(make_config(evaluation={"problems": 1, "sampled": False}))
    state.request_evaluation(0, 0, 0.0)
    lease = next(lease for lease in granted(state, 0.0) if lease.evaluation_id)
    assert "not finite" in state.evaluated(result_of(lease, 1, float("nan")))
    state.credit(A, 16, 0, 0.0, 16)
    assert any(lease.evaluation_id for lease in granted(state, 0.0))
