"""Staleness and conservation under a virtual clock: whatever arrives when, nothing too old is handed out, nothing lost.

Hypothesis plays the world: how long episodes take, when the trainer asks, when workers die and come back.
"""

from collections import Counter

import pytest
from controller_support import deliver, ended_leases, granted, make_config, make_state
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from megasao.trajectories.buffer import Summary
from megasao.trajectories.ledger import Batch, Dropped
from megasao.transport.messages import Manifest

PEERS = [b"a", b"b"]

# Weighted: most of a run is episodes that end and a trainer that asks.
KINDS = ["finish"] * 8 + ["step"] * 5 + ["fail", "silence", "wait", "late"]
actions = st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 4))
scripts = st.lists(actions, min_size=40, max_size=120)


class World:
    """A trainer and two workers around the pure state."""

    def __init__(self, *, max_lag: int, mode: str = "async", batch_size: int = 3) -> None:
        self.config = make_config(
            loop={"mode": mode, "max_lag": max_lag, "batch_size": batch_size, "steps": 1000},
            buffer={"max_trajectories": 16, "lease_timeout_s": 50.0},
        )
        self.state = make_state(self.config)
        self.now, self.step, self.version = 0.0, 0, 0
        self.running = []
        self.ended = []
        self.handed_out: list[str] = []
        self.dropped: list[str] = []
        self.accepted: dict[str, int] = {}
        self.violations: list[tuple[str, int]] = []
        self.records = []
        for peer in PEERS:
            self.state.hello(peer, peer.decode(), [], self.now)

    def play(self, script) -> "World":
        for action, number, extra in script:
            self.now += 1
            getattr(self, f"do_{action}")(number, extra)
            self._settle()
        return self

    def _settle(self) -> None:
        self.state.tick(self.now)
        for peer in PEERS:
            self.state.credit(peer, 8, self.version, self.now)
        for lease in granted(self.state, self.now):
            assert lease.min_version <= self.version
            # Episodes begin with the weights that the worker has now.
            self.running.append((lease, max(lease.min_version, self.version)))
        room = self.state.admission.limit
        assert len(self.state.batches.buffer) + self.state.leases.training <= room
        for record in self.state.take_records():
            self.records.append(record)
            if isinstance(record, Dropped):
                self.dropped += record.trajectory_ids

    def do_finish(self, number: int, more: int) -> None:
        for _ in range(1 + more):
            if self.running:
                lease, begun = self.running.pop(number % len(self.running))
                self._deliver(lease, begun)
                self.ended.append((lease, begun))

    def do_late(self, number: int, _: int) -> None:
        """A trajectory is sent again."""
        if self.ended:
            assert self._deliver(*self.ended[number % len(self.ended)]) == "duplicate"

    def _deliver(self, lease, begun: int) -> str | None:
        reason = deliver(self.state, lease, begun, self.version if self.version > begun else None)
        if reason is None:
            assert lease.lease_id not in self.accepted
            self.accepted[lease.lease_id] = begun
        return reason

    def do_fail(self, number: int, _: int) -> None:
        if self.running:
            lease, _ = self.running.pop(number % len(self.running))
            self.state.failed(lease.lease_id, "engine_error")

    def do_silence(self, number: int, _: int) -> None:
        """A worker dies and comes back at once; what it was at work on still arrives, late, or never."""
        self.state.hello(PEERS[number % 2], "again", [], self.now)

    def do_wait(self, seconds: int, _: int) -> None:
        self.now += seconds

    def do_step(self, extra: int, _: int) -> None:
        """The trainer asks; if it gets the batch it makes 1 to 3 new versions of it."""
        answer = self.state.request_batch(self.step, self.version, self.now)
        if isinstance(answer, Manifest):
            for entry in answer.entries:
                true_lag = self.version - self.accepted[entry.trajectory_id]
                if true_lag > self.config.loop.max_lag:
                    self.violations.append((entry.trajectory_id, true_lag))
                self.handed_out.append(entry.trajectory_id)
            assert len(answer.entries) == self.config.loop.batch_size
            self.step += 1
            self.version += 1 + extra % 3

    def check_conservation(self) -> None:
        """Every accepted trajectory is in exactly one place, and no prompt was accepted twice."""
        waiting = [name for name in self.accepted if name in self.state.batches.buffer]
        places = Counter([*self.handed_out, *self.dropped, *waiting])
        assert places == Counter(self.accepted.keys())
        assert sum(self.state.batches.dropped.values()) == len(self.dropped)
        prompts = Counter(name.rpartition("-")[0] for name in self.accepted)
        assert all(count == 1 for count in prompts.values())
        written = [name for record in self.records if isinstance(record, Batch) for name in record.trajectory_ids]
        assert written == self.handed_out
        counters = self.state.counters
        assert counters.get("leased", 0) == ended_leases(counters) + self.state.leases.training


class UntaggedWorld(World):
    """The same, of an objective that needs no versions; the workers' weights are up to three behind the trainer's.

    The trajectories do not say what they began with; the world knows, and holds the bound against it.
    """

    def __init__(self, **more) -> None:
        super().__init__(**more)
        sections = {**self.config.model_dump(), "algorithm": {"objective": {"name": "gpg"}}}
        self.config = self.config.model_validate(sections)
        self.state = make_state(self.config)
        for peer in PEERS:
            self.state.hello(peer, peer.decode(), [], self.now)

    def _settle(self) -> None:
        self.state.tick(self.now)
        for number, peer in enumerate(PEERS):
            weights = max(0, self.version - (self.step + number) % 4)
            self.state.credit(peer, 8, weights, self.now)
            for lease in self.state.grant(self.now).get(peer, []):
                assert not lease.want_versions and lease.min_version <= self.version
                # The worker begins when it has what the lease asks for, and not before.
                self.running.append((lease, max(lease.min_version, weights)))
            self.state.credit(peer, 0, weights, self.now)
        for record in self.state.take_records():
            self.records.append(record)
            if isinstance(record, Dropped):
                self.dropped += record.trajectory_ids


@settings(max_examples=60, deadline=None)
@given(scripts, st.integers(0, 4), st.sampled_from(["async", "sync"]))
def test_the_bound_holds_without_versions_on_the_wire(script, max_lag, mode):
    world = UntaggedWorld(max_lag=max_lag, mode=mode).play(script)
    assert world.violations == []
    world.check_conservation()


def test_without_versions_a_steady_run_trains_and_drops():
    world = UntaggedWorld(max_lag=2).play(steady())
    assert world.violations == []
    assert len(world.handed_out) > 30 and len(world.dropped) > 5
    world.check_conservation()


def test_negative_control_counting_from_the_trainers_version_at_the_grant_is_caught(monkeypatch):
    """What the trainer had when the lease was given is newer than what the worker began with: no bound."""
    world = UntaggedWorld(max_lag=2)
    make = world.state._lessor.make

    def renamed(key, temperature, min_version):
        lease = make(key, temperature, min_version)
        stem, _, _ = lease.lease_id.partition(".v")
        return structs.replace(lease, lease_id=f"{stem}.v{world.version}")

    monkeypatch.setattr(world.state._lessor, "make", renamed)
    assert world.play(steady()).violations


@settings(max_examples=60, deadline=None)
@given(scripts, st.integers(0, 4), st.sampled_from(["async", "sync"]))
def test_nothing_too_stale_is_handed_out_and_nothing_is_lost(script, max_lag, mode):
    world = World(max_lag=max_lag, mode=mode).play(script)
    assert world.violations == []
    world.check_conservation()


def steady(rounds: int = 40):
    """A plain run that makes some trajectories wait, and some straddle several versions."""
    script = []
    for number in range(rounds):
        script += [("finish", 29 - number % 30, 0), ("finish", number, 1), ("step", 2, 0)]
    return script


def test_a_steady_run_trains_and_drops():
    world = World(max_lag=2).play(steady())
    assert world.violations == []
    assert len(world.handed_out) > 30 and len(world.dropped) > 5
    world.check_conservation()


def test_negative_control_a_lease_that_vanishes_is_caught():
    world = World(max_lag=2).play(steady())
    world.state.leases.release(world.state.leases.all()[0].lease_id)
    with pytest.raises(AssertionError):
        world.check_conservation()


def _from_newest(self, version):
    return max(0, version - self.newest_version)


def _never(self, version):
    return 0


def _off_by_one(self, version):
    return max(0, version - self.oldest_version - 1)


@pytest.mark.parametrize("wrong", [_from_newest, _never, _off_by_one])
def test_negative_control_wrong_lags_are_caught(monkeypatch, wrong):
    monkeypatch.setattr(Summary, "lag", wrong)
    assert World(max_lag=2).play(steady()).violations


def test_negative_control_ignoring_the_time_in_the_queue_is_caught(monkeypatch):
    """Staleness decided when a trajectory arrives, not when it is consumed."""
    arrived: dict[str, int] = {}
    world = World(max_lag=2)
    accept = world.state.accept

    def remember(summary):
        arrived[summary.trajectory_id] = world.version
        accept(summary)

    monkeypatch.setattr(world.state, "accept", remember)
    monkeypatch.setattr(Summary, "lag", lambda self, version: max(0, arrived[self.trajectory_id] - self.oldest_version))
    assert world.play(steady()).violations


def test_dropped_ones_are_counted_by_task_and_reason():
    state = make_state(make_config(loop={"batch_size": 2, "max_lag": 1}))
    state.credit(b"a", 16, 0, 0.0)
    state.request_batch(0, 0, 0.0)
    leases = granted(state, 0.0)
    for lease in leases[:3]:
        deliver(state, lease, version=0)
    assert isinstance(state.request_batch(0, 0, 0.0), Manifest)
    waiting = state.request_batch(1, 5, 0.0)
    assert waiting.have == 0
    [lost] = leases[2:3]
    assert state.metrics()[f"dropped/stale/{lost.task}"] == 1
    assert state.metrics()[f"accept_rate/{lost.task}"] == 0.5
    fresh = granted(state, 0.0)
    assert {lease.prompt_index for lease in fresh}.isdisjoint({lease.prompt_index for lease in leases})
    assert all(lease.min_version == 4 for lease in fresh)
