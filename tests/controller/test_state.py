"""What the controller decides, without sockets: admission, leases, barriers, evaluations, recovery."""

import json

import pytest
from controller_support import deliver, ended_leases, granted, make_config, make_state, result_of, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from megasao.controller.admission import Admission
from megasao.controller.batches import BatchBook
from megasao.controller.leases import Key, make_lease_id, parse_lease_id
from megasao.controller.lessor import episode_seed
from megasao.controller.prompts import IndexSet
from megasao.environments.benchmarks.background import background_benchmarks
from megasao.trajectories.buffer import summarise
from megasao.trajectories.ledger import Batch, GaveUp, Started
from megasao.trajectories.schema import to_batch
from megasao.transport.messages import Manifest, Waiting

A, B = b"a", b"b"
ONE = {"rollout": {"concurrency": 1}}
"""One lease at a time."""


def ready(config=None, *, free: int = 16, peers=(A,), **changes):
    """A state whose trainer has asked for its first batch, and whose workers have room."""
    state = make_state(config or make_config(), **changes)
    for peer in peers:
        state.hello(peer, peer.decode(), [], 0.0)
        state.credit(peer, free, 0, 0.0, free)
    state.request_batch(state.batches.next_step, 0, 0.0)
    return state


# admission


def test_no_lease_before_the_trainer_has_spoken():
    state = make_state(make_config())
    state.credit(A, 16, 0, 0.0)
    assert granted(state, 0.0) == []
    state.request_batch(0, 0, 0.0)
    assert len(granted(state, 0.0)) == 12


def test_a_full_buffer_gives_no_leases_and_drops_nothing():
    state = ready(make_config(loop={"batch_size": 4, "max_lag": 2}))
    leases = granted(state, 0.0)
    assert len(leases) == 12
    for lease in leases:
        assert deliver(state, lease) is None
    state.credit(A, 16, 0, 1.0)
    assert granted(state, 1.0) == []
    assert len(state.batches.buffer) == 12 and not state.batches.dropped
    assert isinstance(state.request_batch(0, 0, 1.0), Manifest)
    assert len(granted(state, 1.0)) == 4


def test_bytes_bound_the_buffer_with_each_lease_at_its_worst_case():
    config = make_config(loop={"batch_size": 2, "max_lag": 9})
    worst = Admission.from_config(config).worst_bytes
    config = make_config(loop={"batch_size": 2, "max_lag": 9}, buffer={"max_bytes": 5 * worst + 1})
    state = ready(config)
    leases = granted(state, 0.0)
    assert len(leases) == 5
    deliver(state, leases[0])
    # A finished one is smaller than its reservation, but not by a whole one.
    assert granted(state, 0.0) == []
    for lease in leases[1:]:
        deliver(state, lease)
    assert len(granted(state, 0.0)) == 4


def test_a_buffer_that_cannot_hold_a_batch_is_refused_by_name():
    with pytest.raises(ValueError, match=r"buffer\.max_bytes = 1000 cannot hold one batch"):
        make_state(make_config(buffer={"max_bytes": 1000}))


def test_leases_are_spread_and_never_exceed_credit_or_concurrency():
    state = ready(make_config(rollout={"concurrency": 4}, loop={"max_lag": 9}), free=3, peers=(A, B))
    given_out = state.grant(0.0)
    assert {peer: len(leases) for peer, leases in given_out.items()} == {A: 3, B: 3}
    # The credit below crossed the leases on the wire: the worker holds 3 already, its concurrency is 4.
    state.credit(A, 3, 0, 0.0)
    assert {peer: len(leases) for peer, leases in state.grant(0.0).items()} == {A: 1}


def test_a_single_place_goes_to_the_worker_with_the_most_room():
    """Under load places come one at a time: whoever is first in a list must not get them all."""
    state = ready(make_config(buffer={"max_trajectories": 12}, loop={"max_lag": 9}), peers=(A, B))
    held = state.grant(0.0)
    assert {peer: len(leases) for peer, leases in held.items()} == {A: 6, B: 6}
    for lease in held[B][:4]:
        state.failed(lease.lease_id, "engine_error")
        state.credit(A, 10, 0, 1.0)
        state.credit(B, 11, 0, 1.0)
        assert {peer: len(leases) for peer, leases in state.grant(1.0).items()} == {B: 1}


def test_no_more_is_leased_than_the_run_still_needs():
    state = ready(
        make_config(
            loop={"steps": 11, "batch_size": 4, "max_lag": 5},
            buffer={"max_trajectories": 200},
            rollout={"concurrency": 99},
        )
    )
    state.batches.restore(Batch(9, 0, []))  # ten of eleven steps are done
    assert len(granted(state, 0.0)) == 4


# leases that end


def test_leases_of_a_silent_worker_come_back():
    state = ready(peers=(A, B), free=6)
    mine = {lease.prompt_index for lease in state.grant(0.0)[A]}
    state.credit(B, 6, 0, 9.0)
    state.tick(9.0)
    assert granted(state, 9.0) == []
    state.tick(11.0)
    assert A not in state.workers
    again = {lease.prompt_index for lease in state.grant(11.0)[B]}
    assert again == mine
    assert state.counters["returned/lost_worker"] == len(mine)


def test_a_lease_past_its_time_is_tried_again_then_given_up():
    config = make_config(
        loop={"batch_size": 2, "max_lag": 0}, **ONE, buffer={"lease_timeout_s": 5.0, "max_attempts": 2}
    )
    state = ready(config)
    seen = []
    for now in (0.0, 5.0, 10.0):
        state.tick(now)
        [lease] = granted(state, now)
        seen.append((lease.prompt_index, lease.lease_id))
        state.workers.heard(A, now)
    assert [index for index, _ in seen] == [0, 0, 1]
    assert len({name for _, name in seen}) == 3
    assert state.counters["failures/lease_timeout"] == 2 and state.counters["given_up"] == 1
    assert GaveUp(0, "lease_timeout") in state.take_records()


def test_failures_are_counted_by_reason_and_are_no_rewards():
    state = ready(make_config(loop={"batch_size": 2, "max_lag": 0}, **ONE, buffer={"max_attempts": 3}))
    for attempt in range(3):
        [lease] = granted(state, 0.0)
        assert lease.prompt_index == 0
        state.failed(lease.lease_id, "engine_error" if attempt else "environment_failure")
        state.failed(lease.lease_id, "engine_error")  # said twice: counts once
    assert state.counters["failures/engine_error"] == 2
    assert state.counters["failures/environment_failure"] == 1
    assert [lease.prompt_index for lease in granted(state, 0.0)] == [1]
    assert len(state.batches.buffer) == 0


def test_a_late_trajectory_counts_if_it_is_the_first_of_its_prompt():
    config = make_config(loop={"batch_size": 2, "max_lag": 0}, **ONE, buffer={"lease_timeout_s": 5.0})
    state = ready(config)
    [first] = granted(state, 0.0)
    state.workers.heard(A, 5.0)
    state.tick(5.0)
    [second] = granted(state, 5.0)
    assert second.prompt_index == first.prompt_index and second.lease_id != first.lease_id
    assert deliver(state, first) is None
    assert deliver(state, second) == "duplicate"
    assert deliver(state, first) == "duplicate"
    assert len(state.batches.buffer) == 1 and len(state.leases) == 0
    assert state.counters["duplicates"] == 2


def test_what_does_not_belong_to_a_lease_is_refused():
    state = ready()
    [lease, *_] = granted(state, 0.0)

    def verdict(**changes):
        [summary] = summarise(to_batch([trajectory(lease, **changes)]))
        return state.screen(summary)

    assert "does not name a training lease" in verdict(trajectory_id="nonsense")
    assert "does not name a training lease" in verdict(trajectory_id=make_lease_id(Key("train", 10**9), 1, 1))
    assert "does not name a training lease" in verdict(trajectory_id="step-000000/greedy-000001-1.1")
    assert "is not the prompt of the lease" in verdict(prompt_id="train-prompt-999")
    long = 200
    too_long = {
        "tokens": [1] * long,
        "action_mask": [True] * long,
        "rewards": [0.0] * long,
        "rollout_logprobs": [-1.0] * long,
    }
    assert "above environment.max_tokens = 110" in verdict(**too_long)
    assert "the objective needs them" in verdict(rollout_logprobs=None)
    assert verdict() is None


def test_an_episode_of_several_segments_is_one_trajectory_up_to_their_number():
    state = ready(
        make_config(
            environment={"compaction": {"max_segments": 2, "summary_tokens": 9}}, trainer={"token_budget": 8192}
        )
    )
    [lease, *_] = granted(state, 0.0)

    def verdict(tokens):
        mask = [index % 2 == 1 for index in range(tokens)]
        columns = {"tokens": [1] * tokens, "action_mask": mask, "rewards": [0.0] * tokens}
        logprobs = [-1.0 * acted for acted in mask]
        row = trajectory(lease, **columns, rollout_logprobs=logprobs, turn_starts=[1], segment_starts=[0, 100])
        [summary] = summarise(to_batch([row]))
        return state.screen(summary)

    assert verdict(220) is None
    assert verdict(221) == "tokens: 221, above environment.max_tokens = 110 in 2 segments"


def test_a_trajectory_without_the_experts_that_are_to_be_replayed_is_refused():
    state = ready(make_config(actor={"router_replay": True}))
    [lease, *_] = granted(state, 0.0)
    assert lease.want_routed_experts
    without, with_them = summarise(to_batch([trajectory(lease), trajectory(lease, routed_experts=b"12")]))
    assert state.screen(without) == "routed_experts: null, and actor.router_replay needs them"
    assert state.screen(with_them) is None


# numbers


def test_rates_are_over_the_last_heartbeats_and_survive_a_workers_restart():
    state = ready(peers=(A, B))
    assert "idle" not in state.metrics()
    for now, tokens, busy in ((0.0, 0.0, 0.0), (2.0, 100.0, 1.5), (4.0, 20.0, 0.5)):
        state.workers.reported(A, {"generated_tokens": tokens, "busy_seconds": busy, "odd": float("nan")}, now)
        state.workers.reported(B, {"generated_tokens": 10 * now, "busy_seconds": now}, now)
        if now == 2.0:
            assert state.metrics()["tokens_per_s"] == 50.0 + 10.0
            assert state.metrics()["idle"] == (0.25 + 0.0) / 2
    assert state.metrics()["tokens_per_s"] == 10.0 + 10.0, "the total fell: the worker counts from 0 again"
    state.lose(B)
    assert state.metrics()["tokens_per_s"] == 10.0
    assert state.workers.get(A).stats == {"generated_tokens": 20.0, "busy_seconds": 0.5}


def test_totals_of_the_engines_are_those_of_the_workers_that_are_there():
    state = ready(peers=(A, B))
    assert not any(name.startswith("engine/") for name in state.metrics())
    state.workers.reported(A, {"generated_tokens": 7.0, "decode_steps": 3.0, "active": 5.0}, 1.0)
    state.workers.reported(B, {"generated_tokens": 5.0, "busy_seconds": 0.5}, 1.0)
    totals = {name: value for name, value in state.metrics().items() if name.startswith("engine/")}
    assert totals == {"engine/generated_tokens": 12.0, "engine/decode_steps": 3.0, "engine/busy_seconds": 0.5}


def test_only_distinct_checkpoints_that_are_still_there_are_kept_for():
    book = BatchBook(batch_size=2, max_lag=1, keep_checkpoints=2)
    for step, horizon in ((5, 0), (5, 0), (10, 5), (10, 5), (15, 10), (8, 5)):
        book.checkpointed(step, [])
        assert book.horizon == horizon, step


# workers that come back


def test_hello_returns_what_the_worker_lost_and_names_what_it_must_forget():
    state = ready(free=4)
    leases = granted(state, 0.0)
    kept, lost = leases[0], leases[1:]
    unknown = state.hello(A, "a", [kept.lease_id, "train-000099-1.1", "rubbish"], 1.0)
    assert set(unknown) == {*(lease.lease_id for lease in lost), "train-000099-1.1", "rubbish"}
    assert [held.lease_id for held in state.leases.of_peer(A)] == [kept.lease_id]
    state.credit(A, 16, 0, 1.0)
    assert {lease.prompt_index for lease in lost} <= {lease.prompt_index for lease in granted(state, 1.0)}


# sync mode


def test_sync_leases_only_for_a_step_that_the_trainer_waits_for():
    state = make_state(make_config(loop={"mode": "sync", "batch_size": 3, "max_lag": 4}))
    state.credit(A, 16, 0, 0.0)
    assert granted(state, 0.0) == []
    for step, version in ((0, 0), (1, 1), (2, 2)):
        assert isinstance(state.request_batch(step, version, 0.0), Waiting)
        leases = granted(state, 0.0)
        assert len(leases) == 3
        assert {lease.min_version for lease in leases} == {version}
        state.failed(leases[0].lease_id, "engine_error")
        [replacement] = granted(state, 0.0)
        for lease in (*leases[1:], replacement):
            deliver(state, lease, version=version)
        assert granted(state, 0.0) == []
        manifest = state.request_batch(step, version, 0.0)
        assert {entry.oldest_version for entry in manifest.entries} == {version}
        state.credit(A, 16, version, 0.0)
        assert granted(state, 0.0) == [], "the trainer is at work: nobody generates"


def test_async_leases_do_not_wait_for_the_trainer():
    """The control of the test above: the same sequence in async mode leases at once."""
    state = ready(make_config(loop={"mode": "async", "batch_size": 3, "max_lag": 1}))
    for lease in granted(state, 0.0)[:3]:
        deliver(state, lease)
    assert isinstance(state.request_batch(0, 0, 0.0), Manifest)
    assert len(granted(state, 0.0)) == 3


def test_async_leases_never_begin_with_weights_that_are_too_old_already():
    state = ready(make_config(loop={"batch_size": 2, "max_lag": 2}))
    state.request_batch(0, 7, 0.0)
    assert {lease.min_version for lease in granted(state, 0.0)} == {5}


# the trainer's restarts


def test_a_step_keeps_its_batch_and_a_skipped_step_is_refused():
    state = ready(make_config(loop={"batch_size": 2, "max_lag": 2}))
    for lease in granted(state, 0.0):
        deliver(state, lease)
    batches = [state.request_batch(step, step, 0.0).entries for step in (0, 1)]
    assert [state.request_batch(step, step, 0.0).entries for step in (0, 1)] == batches
    with pytest.raises(ValueError, match="step 5 was asked for, but the last batch in the ledger is of step 1"):
        state.request_batch(5, 5, 0.0)
    with pytest.raises(ValueError, match=r"above loop\.max_lag = 2"):
        state.request_batch(0, 3, 0.0)


def test_a_trainer_that_goes_back_recalls_leases_that_wait_for_newer_weights():
    state = ready(make_config(loop={"batch_size": 2, "max_lag": 1}))
    for lease in granted(state, 0.0)[:2]:
        deliver(state, lease)
    state.request_batch(0, 0, 0.0)
    state.request_batch(1, 6, 0.0)
    [newer] = [lease for lease in granted(state, 0.0) if lease.min_version == 5][:1]
    assert isinstance(state.request_batch(0, 0, 0.0), Manifest)
    assert newer.lease_id in state.take_recalled()[A]
    assert newer.lease_id not in state.leases
    state.credit(A, 16, 0, 0.0)
    assert newer.prompt_index in {lease.prompt_index for lease in granted(state, 0.0)}


# evaluations


def run_evaluation(state, leases, reward):
    for number, lease in enumerate(leases):
        assert state.evaluated(result_of(lease, number, reward(lease), version=3)) is None


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


# recovery


class Disk:
    """What a run has written, as the state would find it after a crash."""

    def __init__(self):
        self.records, self.rows, self.finished = [], [], set()

    def store(self, state, lease, version=0):
        assert deliver(state, lease, version) is None
        self.rows += summarise(to_batch([trajectory(lease, version)]))

    def restart(self, state, config, now=0.0):
        self.records += state.take_records()
        again = make_state(
            config, records=self.records, journaled=self.rows, finished_evaluations=self.finished, now=now
        )
        again.credit(A, 16, 0, now)
        return again


def test_after_a_restart_batches_buffer_and_prompts_are_what_they_were():
    config = make_config(loop={"batch_size": 2, "max_lag": 3})
    disk, state = Disk(), ready(config)
    leases = granted(state, 0.0)
    for lease in leases[:5]:
        disk.store(state, lease)
    first = state.request_batch(0, 0, 0.0)
    again = disk.restart(state, config, now=100.0)
    assert again.generation == 2
    assert len(again.batches.buffer) == 3
    assert again.request_batch(0, 0, 100.0).entries == first.entries
    assert {e.trajectory_id for e in again.request_batch(1, 1, 100.0).entries} == {x.lease_id for x in leases[2:4]}
    assert deliver(again, leases[0]) == "duplicate"

    # Prompts below the reservation that nobody finished come again, after the workers had time to claim theirs.
    early = granted(again, 100.0)
    assert min(lease.prompt_index for lease in early) >= 256
    again.tick(111.0)
    again.credit(A, 16, 0, 111.0)
    for lease in early:
        again.failed(lease.lease_id, "engine_error")
    again.credit(A, 16, 0, 111.0)
    assert [lease.prompt_index for lease in granted(again, 111.0)][:3] == [5, 6, 7]


def test_after_a_restart_workers_keep_the_leases_that_they_are_at_work_on():
    config = make_config(loop={"batch_size": 2, "max_lag": 1}, evaluation={"problems": 3, "sampled": False})
    disk, state = Disk(), ready(config)
    state.request_evaluation(0, 0, 0.0)
    leases = granted(state, 0.0)
    evaluation = [lease for lease in leases if lease.evaluation_id]
    training = [lease for lease in leases if not lease.evaluation_id]
    disk.store(state, training[0])
    again = disk.restart(state, config)
    active = [lease.lease_id for lease in (training[0], training[1], evaluation[1])]
    assert again.hello(A, "a", active, 0.0) == [training[0].lease_id]
    assert again.leases.training == 1
    assert again.hello(B, "b", [training[1].lease_id], 0.0) == [], "another worker may say that it has it now"
    assert deliver(again, training[1]) is None
    assert again.counters["leased"] == ended_leases(again.counters) == 1, "an adopted one counts where it ends"
    # The evaluation begins again; what a worker has of it counts.
    again.request_batch(0, 0, 0.0)
    again.credit(A, 16, 0, 0.0, 16)
    asked = [lease for lease in granted(again, 0.0) if lease.evaluation_id]
    assert {lease.prompt_index for lease in asked} == {0, 2}
    run_evaluation(again, [evaluation[1], *asked], lambda lease: 1.0)
    assert len(again.take_finished_evaluations(1.0)) == 1


def test_failures_and_given_up_prompts_survive_a_restart():
    config = make_config(loop={"batch_size": 2, "max_lag": 0}, **ONE, buffer={"max_attempts": 2})
    disk, state = Disk(), ready(config)
    [lease] = granted(state, 0.0)
    state.failed(lease.lease_id, "engine_error")
    again = disk.restart(state, config)
    again.request_batch(0, 0, 0.0)
    assert again.hello(A, "a", [lease.lease_id], 0.0) == []
    again.failed(lease.lease_id, "engine_error")
    assert again.counters["given_up"] == 1
    last = disk.restart(again, config)
    assert last.prompts.is_settled(0)
    assert last.counters["failures/engine_error"] == 2


def test_a_generation_never_reuses_a_lease_id():
    config = make_config(loop={"batch_size": 2, "max_lag": 0}, **ONE)
    disk, state = Disk(), ready(config)
    names = set()
    for _ in range(3):
        state.tick(1000.0)
        state.credit(A, 16, 0, 1000.0)
        state.request_batch(0, 0, 1000.0)
        [lease] = granted(state, 1000.0)
        assert lease.lease_id not in names
        names.add(lease.lease_id)
        state = disk.restart(state, config, now=0.0)
    assert sum(isinstance(record, Started) for record in disk.records) == 3


@pytest.mark.parametrize("stream", ["train", "step-000010/greedy"])
def test_lease_ids_can_be_read_back(stream):
    key = Key(stream, 123)
    assert parse_lease_id(make_lease_id(key, 2, 3)) == key


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40)))
def test_index_set(indices):
    dense = IndexSet()
    for index in indices:
        dense.add(index)
    assert [index in dense for index in range(41)] == [index in set(indices) for index in range(41)]
    assert len(dense) == len(set(indices))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_lease_id_or_not(text):
    assert parse_lease_id(text) is None or text.count("-") >= 2


def test_the_same_prompt_gets_the_same_seed_and_others_do_not():
    greedy, later = Key("step-000001/greedy", 5), Key("step-000009/greedy", 5)
    assert episode_seed(0, greedy) == episode_seed(0, later)
    others = [Key("step-000001/sampled", 5), Key("train", 5), Key("step-000001/greedy", 6)]
    seeds = [episode_seed(0, key) for key in (greedy, *others)] + [episode_seed(1, greedy)]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**31 for seed in seeds)
