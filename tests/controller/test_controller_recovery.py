"""What a restart of the trainer or of the controller leaves as it was, and the names of leases."""

import subprocess
import sys

import pytest
from controller_support import (
    ONE,
    A,
    B,
    deliver,
    ended_leases,
    granted,
    make_config,
    make_state,
    ready,
    run_evaluation,
    trajectory,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megasao.controller.leases import Key, make_lease_id, parse_lease_id
from megasao.controller.lessor import episode_seed
from megasao.controller.prompts import IndexSet
from megasao.controller.recovery import EvaluationsFile
from megasao.trajectories.buffer import summarise
from megasao.trajectories.ledger import Started
from megasao.trajectories.schema import to_batch
from megasao.transport.messages import Manifest

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


def test_accept_rates_are_of_the_whole_run_also_when_its_trajectories_are_deleted():
    config = make_config(loop={"batch_size": 2, "max_lag": 1}, checkpoint={"keep": 1})
    state = ready(config)
    leases = granted(state, 0.0)  # two of each task
    for lease in leases:
        deliver(state, lease)
    for step in (0, 1):
        assert isinstance(state.request_batch(step, 0, 0.0), Manifest)
    state.checkpointed(2)
    state.batches.forget([lease.lease_id for lease in leases])
    stale = granted(state, 0.0)[0]
    deliver(state, stale)
    state.request_batch(2, 5, 0.0)
    rates = state.batches.accept_rates()
    assert rates == {"task0": 1.0, "task1": 1.0, stale.task: 2 / 3}
    again = make_state(config, records=state.take_records())
    assert again.batches.accept_rates() == rates


FULL = """
import resource, signal, sys
from pathlib import Path
from megasao.controller.recovery import EvaluationsFile
from megasao.trajectories.ledger import GaveUp, Ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = Path(sys.argv[1])
ledger, evaluations = Ledger.open(directory / "ledger.jsonl"), EvaluationsFile(directory / "evaluations.jsonl")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for append in (lambda: ledger.append([GaveUp(1, "x" * 200)]), lambda: evaluations.append({"evaluation_id": "y" * 200})):
    try:
        append()
    except OSError as error:
        print(error.strerror)
"""


def test_a_record_that_the_disk_takes_in_part_is_an_error_and_is_cut_off_later(tmp_path):
    said = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["File too large"] * 2
    assert (tmp_path / "evaluations.jsonl").stat().st_size == 100
    assert EvaluationsFile(tmp_path / "evaluations.jsonl").finished == set()
    assert (tmp_path / "evaluations.jsonl").stat().st_size == 0
