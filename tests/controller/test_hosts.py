"""Payload with rollout hosts: what the controller decides when one goes, comes back, or is gone for good."""

from contextlib import closing
from dataclasses import replace

import pytest
from controller_support import (
    TinyEnvironment,
    WireWorker,
    free_address,
    granted,
    make_config,
    make_run,
    make_state,
    serving,
    trajectory,
)
from test_groups import CRITICLESS

from megasao.config import Config
from megasao.controller.hosts import HostBook
from megasao.controller.intake import PAYLOAD_HERE, PAYLOAD_THERE, Intake
from megasao.controller.recovery import Opened
from megasao.controller.server import ControllerServer
from megasao.controller.state import ControllerState
from megasao.trajectories.buffer import Summary, summarise
from megasao.trajectories.ledger import Batch, Dropped, HostedAt
from megasao.trajectories.schema import to_batch
from megasao.transport.messages import (
    SAY_HELLO,
    Ack,
    Credit,
    Heartbeat,
    Hello,
    Lease,
    Manifest,
    Refused,
    Stored,
    Trajectories,
    Waiting,
)

PATIENCE = 60.0
ONE, TWO = b"rollout-0", b"rollout-1"


def hosted_config(**sections):
    return make_config(
        buffer={"payload": "rollout", "max_trajectories": 64, "lease_timeout_s": 600.0},
        supervision={"start_timeout_s": PATIENCE},
        **{"loop": {"steps": 100, "batch_size": 2, "max_lag": 2}, **sections},
    )


class Fleet:
    """A controller's state, and what its two workers and its trainer do."""

    def __init__(self, replaced=None, records=(), now=0.0, **sections):
        config = hosted_config(**sections)
        self.config = Config.model_validate({**config.model_dump(), **(replaced or {})})
        self.state = make_state(self.config, records=list(records), now=now)
        self.records = list(records) + self.state.take_records()
        self.intake = Intake(self.state, None, None)
        self.seq = 0

    def hello(self, peer, now, free=0):
        self.state.hello(peer, peer.decode(), [], now, f"tcp://{peer.decode()}")
        self.state.credit(peer, free, 0, now)

    def store(self, peer, leases, **changes) -> Ack:
        return self.say(peer, summaries(leases, **changes))

    def say(self, peer, said: list[Summary]) -> Ack:
        self.seq += 1
        return self.intake.take_stored(Stored(self.seq, said), peer)

    def ask(self, step, version=0, now=0.0):
        answer = self.state.request_batch(step, version, now)
        self.records += self.state.take_records()
        return answer

    def lose(self, peer, now):
        """Silent for good: after this the host is waited for no longer."""
        self.state.lose(peer)
        self.state.tick(now)
        self.state.tick(now + PATIENCE + 1)
        self.records += self.state.take_records()


def summaries(leases: list[Lease], **changes) -> list[Summary]:
    return summarise(to_batch([trajectory(lease, **changes) for lease in leases]))


def ids(manifest: Manifest) -> list[str]:
    assert isinstance(manifest, Manifest), manifest
    return [entry.trajectory_id for entry in manifest.entries]


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.ask(0)
    fleet.hello(ONE, 0.0, free=4)
    fleet.hello(TWO, 0.0, free=4)
    return fleet


def leases_of(fleet: Fleet, now=0.0) -> dict[bytes, list[Lease]]:
    return fleet.state.grant(now)


def test_a_manifest_says_where_the_payload_is(fleet):
    given = leases_of(fleet)
    assert fleet.store(ONE, given[ONE][:1]) == Ack(1)
    assert fleet.store(TWO, given[TWO][:1]).refused == {}
    manifest = fleet.ask(0)
    assert [entry.payload for entry in manifest.entries] == ["tcp://rollout-0", "tcp://rollout-1"]
    assert all(entry.nbytes > 0 for entry in manifest.entries)
    assert [record.host for record in fleet.records if isinstance(record, HostedAt)] == ["rollout-0", "rollout-1"]
    assert fleet.ask(0) == manifest


def test_what_is_said_again_is_known_and_what_nobody_wants_may_go(fleet):
    given = leases_of(fleet)
    first = summaries(given[ONE][:1])
    assert fleet.say(ONE, first).forget == []
    assert fleet.say(TWO, first).forget == [first[0].trajectory_id], "another host has it"
    strange = [replace(first[0], trajectory_id="train-000099-1.1")]
    answer = fleet.say(ONE, strange)
    assert list(answer.refused) == answer.forget == ["train-000099-1.1"]


def test_a_host_that_is_away_is_waited_for_and_comes_back(fleet):
    given = leases_of(fleet)
    fleet.store(ONE, given[ONE][:1])
    fleet.store(TWO, given[TWO][:3])
    fleet.state.lose(ONE)
    fleet.state.tick(1.0)
    manifest = fleet.ask(0)
    assert {entry.payload for entry in manifest.entries} == {"tcp://rollout-1"}, "those of the other host go first"
    fleet.state.lose(TWO)
    waiting = fleet.ask(0)
    assert isinstance(waiting, Waiting) and "rollout-1" in waiting.detail
    assert fleet.state.training_room() >= 0
    fleet.hello(TWO, 2.0)
    assert ids(fleet.ask(0)) == ids(manifest), "the step keeps its trajectories"
    fleet.hello(ONE, 3.0)
    assert len(ids(fleet.ask(1))) == 2
    assert not any(isinstance(record, Dropped) for record in fleet.records)


def test_what_waits_with_a_host_that_is_gone_is_dropped_and_may_go_when_it_comes_back(fleet):
    given = leases_of(fleet)
    lost = summaries(given[ONE][:2])
    fleet.say(ONE, lost)
    fleet.store(TWO, given[TWO][:2])
    fleet.lose(ONE, 1.0)
    fleet.hello(TWO, 90.0)
    names = [summary.trajectory_id for summary in lost]
    dropped = [r for r in fleet.records if isinstance(r, Dropped)]
    assert {r.reason for r in dropped} == {"lost_host"}
    assert sorted(n for r in dropped for n in r.trajectory_ids) == sorted(names)
    assert len(fleet.state.batches.buffer) == 2 and not set(ids(fleet.ask(0))) & set(names)
    fleet.hello(ONE, 100.0)
    assert fleet.say(ONE, lost).forget == names
    metrics = fleet.state.metrics()
    assert sum(value for name, value in metrics.items() if name.startswith("dropped/lost_host/")) == 2


def lost_in_a_step(fleet: Fleet) -> tuple[list[str], str]:
    """Step 0 holds one trajectory of each host, and the first is gone; the step's ids, and the one that is lost."""
    given = leases_of(fleet)
    fleet.store(ONE, given[ONE][:1])
    fleet.store(TWO, given[TWO][:1])
    before = ids(fleet.ask(0))
    fleet.lose(ONE, 1.0)
    assert not any(isinstance(record, Dropped) for record in fleet.records), "it may have been trained"
    fleet.hello(TWO, 100.0, free=4)
    return before, before[0]


def test_a_step_that_lost_payload_is_assembled_again(fleet):
    (_, kept), lost = lost_in_a_step(fleet)
    assert isinstance(fleet.ask(0), Waiting)
    assert [r.trajectory_ids for r in fleet.records if isinstance(r, Dropped)] == [[lost]]
    fleet.store(TWO, granted(fleet.state, 100.0)[:2])
    after = ids(fleet.ask(0))
    assert kept in after and lost not in after and len(after) == 2
    assert ids(fleet.ask(0)) == after
    assert len(fleet.state.batches.buffer) == 1
    rest = Fleet(records=fleet.records, now=200.0)
    assert len(rest.state.batches.buffer) == 1, "as after a restart"
    rest.hello(TWO, 200.0)
    assert ids(rest.ask(0)) == after
    assert sum(rest.state.batches.consumed.values()) == 2


def test_a_host_that_comes_back_on_another_disk_says_what_it_lacks(fleet):
    """A job that goes on elsewhere: the host is there under its name, and its payload is not."""
    granted_to = leases_of(fleet)
    for peer in (ONE, TWO):
        fleet.store(peer, granted_to[peer][:2])
    before = ids(fleet.ask(0))
    rest = Fleet(records=fleet.records, now=100.0)
    for peer in (ONE, TWO):
        rest.hello(peer, 100.0, free=4)
    assert ids(rest.ask(0)) == before
    own = [lease.lease_id for lease in granted_to[ONE][:2]]
    rest.state.lacking(TWO, own)
    assert ids(rest.ask(0)) == before, "another host's word does not count"
    rest.state.lacking(ONE, [*own, "never heard of"])
    after = ids(rest.ask(0))
    assert set(after) == {lease.lease_id for lease in granted_to[TWO][:2]}
    assert {name for r in rest.records if isinstance(r, Dropped) for name in r.trajectory_ids} == set(own)


def test_a_controller_that_dies_before_the_step_is_assembled_again_does_it_then(fleet):
    (_, kept), lost = lost_in_a_step(fleet)
    assert isinstance(fleet.ask(0), Waiting)
    rest = Fleet(records=fleet.records, now=200.0)
    rest.hello(TWO, 200.0, free=4)
    assert isinstance(rest.ask(0), Waiting), "one of two"
    rest.store(TWO, granted(rest.state, 300.0)[:1])
    assert ids(rest.ask(0))[0] == kept
    assert [r.trajectory_ids for r in rest.records if isinstance(r, Dropped)] == [[lost]], "counted once"


def test_in_sync_mode_a_step_that_lost_payload_gets_leases_again():
    fleet = Fleet(loop={"steps": 1, "batch_size": 2, "mode": "sync"}, critic={"warmup_steps": 0})
    fleet.ask(0)
    fleet.hello(ONE, 0.0, free=1)
    fleet.hello(TWO, 0.0, free=1)
    given = leases_of(fleet)
    for peer in (ONE, TWO):
        fleet.store(peer, given[peer])
    before = ids(fleet.ask(0))
    fleet.lose(ONE, 1.0)
    fleet.hello(TWO, 100.0, free=4)
    assert granted(fleet.state, 100.0) == [], "nothing more is needed of a step that is whole, as far as anyone knows"
    assert isinstance(fleet.ask(0), Waiting)
    (lease,) = granted(fleet.state, 100.0)
    fleet.store(TWO, [lease])
    assert set(ids(fleet.ask(0))) == {before[1], lease.lease_id}


def test_groups_die_with_the_host_of_a_member():
    fleet = Fleet(CRITICLESS, loop={"steps": 50, "batch_size": 2, "group_size": 2})
    fleet.ask(0)
    fleet.hello(ONE, 0.0, free=1)
    fleet.hello(TWO, 0.0, free=1)
    given = leases_of(fleet)
    for peer in (ONE, TWO):
        fleet.store(peer, given[peer])
    assert len(ids(fleet.ask(0))) == 2
    fleet.lose(ONE, 1.0)
    assert isinstance(fleet.ask(0), Waiting)
    reasons = [record.reason for record in fleet.records if isinstance(record, Dropped)]
    assert sorted(reasons) == ["incomplete_group", "lost_host"] and not len(fleet.state.batches.buffer)


def test_hosts_forget_what_no_checkpoint_needs():
    fleet = Fleet(checkpoint={"keep": 1})
    fleet.ask(0)
    fleet.hello(ONE, 0.0, free=4)
    said = summaries(leases_of(fleet)[ONE][:4])
    fleet.say(ONE, said)
    first, second = ids(fleet.ask(0)), ids(fleet.ask(1))
    assert fleet.state.take_forgotten() == {}
    fleet.state.checkpointed(1)
    assert fleet.state.take_forgotten() == {ONE: first}
    assert fleet.state.take_forgotten() == {}
    assert fleet.say(ONE, said).forget == first, "a host that missed it is told again"
    with pytest.raises(ValueError, match="resume from a newer checkpoint"):
        fleet.ask(0)
    rest = Fleet(records=fleet.records + fleet.state.take_records(), checkpoint={"keep": 1})
    rest.hello(ONE, 0.0)
    assert rest.say(ONE, said).forget == first
    assert ids(rest.ask(1)) == second


def test_who_has_the_payload_is_agreed_on():
    lease = granted_one(hosted := Fleet())
    refused = hosted.intake.take(Trajectories(1, [lease.lease_id]), b"")
    assert refused == {lease.lease_id: PAYLOAD_THERE}
    state = make_state(make_config())
    (said,) = summaries([lease])
    assert Intake(state, None, None).take_stored(Stored(1, [said]), ONE).refused == {said.trajectory_id: PAYLOAD_HERE}


def granted_one(fleet: Fleet) -> Lease:
    fleet.ask(0)
    fleet.hello(ONE, 0.0, free=1)
    return leases_of(fleet)[ONE][0]


def test_a_worker_that_a_new_controller_does_not_know_says_hello_before_all_else(tmp_path):
    """Its credit and its heartbeat may cross the restart on the wire, both at once: neither makes it known."""
    run = make_run(tmp_path, free_address())
    with serving(run, hosted_config()), closing(WireWorker(run.read_endpoints().controller)) as worker:
        worker.send(Credit(4, 0, 0))
        worker.send(Heartbeat({}))
        worker.until(lambda: len(worker.others) == 2)
        assert worker.others == [Refused(SAY_HELLO)] * 2


def test_a_worker_that_was_given_up_hears_it_and_says_again_what_it_holds(tmp_path):
    """What was forgotten meanwhile it would keep for good."""
    run = make_run(tmp_path, free_address())
    address = run.read_endpoints().controller
    server = ControllerServer(run, hosted_config(), TinyEnvironment(), Opened(run), address=address)
    with closing(server), closing(WireWorker(address)) as worker:

        def heard(message) -> str:
            worker.others.clear()
            worker.send(message)
            for _ in range(1000):
                server.tick()
                worker.poll(0)
                if worker.others:
                    break
            (welcome,) = worker.others
            return welcome.incarnation

        hello = Hello("rollout-0")
        first = heard(hello)
        assert heard(Heartbeat({})) == heard(hello) == first, "a connection that broke is no news"
        server.state.lose(ONE)
        second = heard(hello)
        assert second != first and heard(Heartbeat({})) == second
        server.state.lose(TWO)
        assert heard(hello) == second, "another one's loss"


def test_the_book_of_hosts():
    book = HostBook(10.0)
    book.hold(["a", "b"], "one")
    assert not book.is_there("a") and book.is_there("not hosted") and book.away == ["one"]
    assert book.give_up(0.0) == [] and book.give_up(10.0) == []
    book.arrive("one", "here")
    assert book.address("a") == "here" and book.give_up(99.0) == []
    book.leave("one")
    assert book.give_up(100.0) == [] and book.give_up(111.0) == ["a", "b"] and book.give_up(222.0) == []
    assert book.is_gone("a") and not book.wants("a", "one")
    book.arrive("one", "there")
    assert not book.is_there("a"), "what counts as gone stays gone"
    assert book.forget(["a", "unknown"]) == {"one": ["a"]} and not book.is_gone("a")


def test_batches_restored_twice_keep_the_later(fleet):
    """The ledger's word on a step is its last one."""
    state: ControllerState = fleet.state
    state.batches.restore(Batch(0, 0, ["train-000000-1.1", "train-000001-1.1"]))
    state.batches.restore(Batch(0, 0, ["train-000001-1.1", "train-000002-1.1"]))
    assert not state.batches.may_forget("train-000000-1.1")
