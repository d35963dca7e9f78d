"""How leases end: silence, time, failures, late and foreign results; and what workers say of themselves."""

from controller_support import ONE, A, B, deliver, granted, make_config, ready, trajectory

from megasao.controller.batches import BatchBook
from megasao.controller.leases import Key, make_lease_id
from megasao.trajectories.buffer import summarise
from megasao.trajectories.ledger import GaveUp
from megasao.trajectories.schema import to_batch

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


def test_leases_that_were_lost_with_a_connection_come_back_without_a_failure():
    state = ready(free=4)  # dead_after_s = 10, lease_timeout_s = 60
    names = [lease.lease_id for lease in granted(state, 0.0)]
    assert state.take_back_lost(A, names[:1], 10.0) == [], "they may still be on their way"
    assert state.take_back_lost(A, None, 11.0) == [], "nothing was said of them"
    assert state.take_back_lost(A, names, 11.0) == []
    assert state.take_back_lost(A, names[:1], 11.0) == names[1:]
    assert state.take_back_lost(A, names[:1], 12.0) == []
    state.credit(A, 3, 0, 12.0)
    again = granted(state, 12.0)
    assert [lease.prompt_index for lease in again] == [1, 2, 3] and not {x.lease_id for x in again} & set(names)
    assert state.counters["returned/forgotten"] == 3 and not any(n.startswith("failures") for n in state.counters)
    assert state.take_back_lost(A, [], 13.0) == names[:1], "those of before, and not the new ones"


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
