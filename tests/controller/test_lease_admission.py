"""Who gets leases, and how many: room, credit, concurrency, and what the mode allows."""

import pytest
from controller_support import A, B, deliver, granted, make_config, make_state, ready

from megasao.controller.admission import Admission
from megasao.trajectories.ledger import Batch
from megasao.transport.messages import Manifest, Waiting

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
