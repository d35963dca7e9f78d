"""Groups of rollouts: leased together, trained on whole, dropped or shrunk by the rule; the bound on stale shares."""

from collections import Counter

import pytest
from controller_support import deliver, granted, make_config, make_state, trajectory
from hypothesis import given, settings
from test_staleness import World, scripts

from megasao.controller.groups import GroupBook
from megasao.trajectories.buffer import summarise
from megasao.trajectories.ledger import Dropped, GaveUp
from megasao.trajectories.schema import to_batch
from megasao.transport.messages import Manifest, Waiting

A = b"a"
CRITICLESS = {
    "critic": None,
    "algorithm": {"advantages": {"name": "group"}},
}


def group_config(**loop):
    config = make_config(loop={"batch_size": 6, "group_size": 3, "max_lag": 2, **loop}).model_dump()
    return make_config().model_validate({**config, **CRITICLESS})


def ready(config, free: int = 16):
    state = make_state(config)
    state.hello(A, "a", [], 0.0)
    state.credit(A, free, 0, 0.0)
    state.request_batch(0, 0, 0.0)
    return state


# the book


def test_indices_count_rollouts():
    book = GroupBook(4, "drop")
    assert [book.name(index) for index in (0, 3, 4)] == ["group-000000", "group-000000", "group-000001"]
    assert list(book.members("group-000001")) == [4, 5, 6, 7] and book.prompt_index(7) == 1


@pytest.mark.parametrize(("partial", "deaths"), [("drop", [True, False, False]), ("shrink", [False, False, True])])
def test_a_group_dies_once(partial, deaths):
    book = GroupBook(4, partial)
    assert [book.lose("group-000000") for _ in deaths] == deaths
    assert book.dead == ["group-000000"] and book.expected("group-000001") == 4


def test_a_single_rollout_is_no_group():
    assert not GroupBook(1, "drop").lose("group-000000") and not GroupBook(1, "drop").dead


# leases and batches


def test_the_rollouts_of_a_group_share_problem_and_group_and_nothing_else():
    state = ready(group_config())
    leases = granted(state, 0.0)
    assert len(leases) == 16
    for number, lease in enumerate(leases):
        assert (lease.prompt_index, lease.group_id) == (number // 3, f"group-{number // 3:06d}")
        assert lease.prompt_id == f"train-prompt-{number // 3}"
    assert len({lease.seed for lease in leases}) == len({lease.lease_id for lease in leases}) == 16


def test_a_batch_waits_for_whole_groups_and_names_them():
    state = ready(group_config())
    leases = granted(state, 0.0)
    for lease in (*leases[:3], *leases[4:8]):
        deliver(state, lease)
    assert isinstance(state.request_batch(0, 0, 0.0), Waiting), "seven trajectories, but one whole group"
    deliver(state, leases[3])
    manifest = state.request_batch(0, 0, 0.0)
    assert Counter(entry.group_id for entry in manifest.entries) == {"group-000000": 3, "group-000001": 3}
    assert {entry.prompt_id for entry in manifest.entries} == {"train-prompt-0", "train-prompt-1"}
    assert all(entry.task for entry in manifest.entries)


def test_a_group_begun_can_be_completed_though_the_buffer_is_full():
    config = group_config(max_lag=0)
    state = ready(config)
    first = granted(state, 0.0)
    assert len(first) == 6
    for lease in first[:2] + first[3:]:
        deliver(state, lease)
    state.failed(first[2].lease_id, "engine_error")
    [again] = granted(state, 0.0)
    assert again.group_id == first[2].group_id and again.seed == first[2].seed
    deliver(state, again)
    assert isinstance(state.request_batch(0, 0, 0.0), Manifest)


def fail_for_good(state, lease, reason="environment_failure"):
    """Failures until the rollout is given up."""
    state.failed(lease.lease_id, reason)
    for _ in range(9):
        state.credit(A, 1, 0, 0.0)
        again = [new for new in granted(state, 0.0) if new.seed == lease.seed]
        if not again:
            return
        state.failed(again[0].lease_id, reason)


def test_drop_buries_the_rest_of_the_group_with_reasons():
    state = ready(group_config())
    leases = granted(state, 0.0)
    deliver(state, leases[0])
    fail_for_good(state, leases[1])
    records = state.take_records()
    assert [r.trajectory_ids for r in records if isinstance(r, Dropped) and r.reason == "incomplete_group"] == [
        [leases[0].lease_id]
    ]
    assert [r for r in records if isinstance(r, GaveUp)] == [
        GaveUp(1, "environment_failure"),
        GaveUp(2, "incomplete_group"),
    ]
    assert state.take_recalled() == {A: [leases[2].lease_id]}
    assert state.counters["failures/environment_failure"] == 2
    assert state.batches.dropped == {("incomplete_group", "task0"): 1}
    assert deliver(state, leases[2]) == "duplicate", "what arrives all the same is not wanted"
    for lease in leases[3:9]:
        deliver(state, lease)
    manifest = state.request_batch(0, 0, 0.0)
    assert {entry.group_id for entry in manifest.entries} == {"group-000001", "group-000002"}


def test_rollouts_of_a_dead_group_that_were_never_leased_never_are():
    state = ready(group_config(), free=1)
    [first] = granted(state, 0.0)
    fail_for_good(state, first)
    state.credit(A, 1, 0, 0.0)
    leases = [held for held in state.leases.all()] or granted(state, 0.0)
    assert [lease.lease_id.split("-")[1] for lease in leases] == ["000003"]
    assert all(state.prompts.is_settled(index) for index in range(3))


def test_shrink_goes_on_with_what_is_left():
    state = ready(group_config(partial_groups="shrink"))
    leases = granted(state, 0.0)
    deliver(state, leases[0])
    fail_for_good(state, leases[1])
    for lease in leases[2:6]:
        deliver(state, lease)
    manifest = state.request_batch(0, 0, 0.0)
    assert Counter(entry.group_id for entry in manifest.entries) == {"group-000000": 2, "group-000001": 3}
    assert not state.batches.dropped


def test_a_stale_member_takes_its_group_with_it():
    state = ready(group_config())
    leases = granted(state, 0.0)
    deliver(state, leases[0], version=0)
    for lease in (*leases[1:3], *leases[3:9]):
        deliver(state, lease, version=3)
    manifest = state.request_batch(0, 3, 0.0)
    assert {entry.group_id for entry in manifest.entries} == {"group-000001", "group-000002"}
    assert state.batches.dropped == {("stale", "task0"): 1, ("incomplete_group", "task0"): 2}


def test_a_wrong_group_is_refused():
    state = ready(group_config())
    [lease, *_] = granted(state, 0.0)
    [summary] = summarise(to_batch([trajectory(lease, group_id="group-000007")]))
    assert "is not the group of the lease" in state.screen(summary)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_recovery_from_any_prefix_of_the_records_buries_the_same(kept):
    """A crash may cut the ledger between the loss of a rollout and what follows from it."""
    state = ready(group_config())
    state.take_records()
    leases = granted(state, 0.0)
    records = state.take_records()
    [early] = summarise(to_batch([trajectory(leases[0])]))
    state.accept(early)
    fail_for_good(state, leases[1])
    after = state.take_records()
    lost = next(number for number, record in enumerate(after) if isinstance(record, GaveUp))
    again = make_state(group_config(), records=records + after[: lost + kept], journaled=[early])
    if kept == 0:
        assert len(again.batches.buffer) == 1 and not again.groups.dead
        return
    assert len(again.batches.buffer) == 0
    assert again.batches.dropped == {("incomplete_group", "task0"): 1}
    assert all(again.prompts.is_settled(index) for index in range(3)) and not again.prompts.is_settled(3)


# the share of stale ones


def test_half_of_a_batch_may_be_stale():
    """Threshold 0.5, batches of four: two may be begun while the trainer is at work, the rest once it waits."""
    state = ready(make_config(loop={"batch_size": 4, "max_lag": 9, "max_stale_share": 0.5}))
    leases = granted(state, 0.0)
    assert len(leases) == 6, "a batch, and what may be left over from it"
    for lease in leases[:4]:
        deliver(state, lease)
    assert isinstance(state.request_batch(0, 0, 0.0), Manifest)
    assert granted(state, 0.0) == [], "two are under way already"
    for lease in leases[4:]:
        deliver(state, lease)
    assert isinstance(state.request_batch(1, 1, 0.0), Waiting)
    fresh = granted(state, 0.0)
    assert len(fresh) == 4 and {lease.min_version for lease in fresh} == {1}
    for lease in fresh[:2]:
        deliver(state, lease, version=1)
    manifest = state.request_batch(1, 1, 0.0)
    assert sorted(entry.oldest_version for entry in manifest.entries) == [0, 0, 1, 1]


def test_without_the_threshold_a_batch_may_be_all_stale():
    state = ready(make_config(loop={"batch_size": 4, "max_lag": 9}))
    for lease in granted(state, 0.0)[:4]:
        deliver(state, lease)
    manifest = state.request_batch(0, 1, 0.0)
    assert {entry.oldest_version for entry in manifest.entries} == {0}


def test_what_is_stale_beyond_the_quota_makes_room():
    state = ready(make_config(loop={"batch_size": 4, "max_lag": 9, "max_stale_share": 0.5}))
    for lease in granted(state, 0.0):
        deliver(state, lease)
    assert isinstance(state.request_batch(0, 2, 0.0), Waiting), "six are there, all of them stale"
    assert state.batches.dropped == {("stale_share", "task0"): 2, ("stale_share", "task1"): 2}
    assert len(state.batches.buffer) == 2 and len(granted(state, 0.0)) == 4


# properties


class GroupWorld(World):
    """The same world with groups of three, and a quota of stale ones."""

    def __init__(self, *, partial="drop", share=1.0, group_size=3, **more) -> None:
        super().__init__(batch_size=6, **more)
        loop = {**self.config.loop.model_dump(), "group_size": group_size, "partial_groups": partial}
        loop["max_stale_share"] = share
        sections = {**self.config.model_dump(), "loop": loop} | (CRITICLESS if group_size > 1 else {})
        self.config = self.config.model_validate(sections)
        self.partial, self.group_size = partial, group_size
        self.quota = share * 6
        self.state = make_state(self.config)
        for peer in (b"a", b"b"):
            self.state.hello(peer, peer.decode(), [], self.now)
        request = self.state.request_batch

        def checked(step, version, now):
            answer = request(step, version, now)
            if isinstance(answer, Manifest):
                self.check_batch(answer, version)
            return answer

        self.state.request_batch = checked

    def check_batch(self, manifest: Manifest, version: int) -> None:
        sizes = Counter(entry.group_id for entry in manifest.entries)
        assert len(sizes) == 6 // self.group_size
        least = self.group_size if self.partial == "drop" else min(2, self.group_size)
        assert all(least <= size <= self.group_size for size in sizes.values()), sizes
        assert sum(entry.oldest_version < version for entry in manifest.entries) <= self.quota

    def do_step(self, extra: int, _: int) -> None:
        """As the base's, for batches that may be smaller."""
        answer = self.state.request_batch(self.step, self.version, self.now)
        if isinstance(answer, Manifest):
            self.handed_out += [entry.trajectory_id for entry in answer.entries]
            self.step += 1
            self.version += 1 + extra % 2

    def check_progress(self) -> None:
        """Whatever happened: when everything works from now on, batches come."""
        target = self.step + 3
        for _ in range(200):
            if self.step == target:
                return
            # Nothing of the past arrives any more: its leases expire.
            self.now += 60 if not self.running else 1
            self.do_finish(0, 30)
            self.do_step(0, 0)
            self._settle()
        raise AssertionError(self.state.metrics())


@pytest.mark.parametrize(
    ("partial", "share", "group_size"),
    [("drop", 1.0, 3), ("shrink", 1.0, 3), ("drop", 0.5, 3), ("drop", 0.5, 1), ("drop", 0.0, 1)],
)
@settings(max_examples=25, deadline=None)
@given(script=scripts)
def test_whole_groups_bounded_staleness_and_progress_whatever_happens(partial, share, group_size, script):
    world = GroupWorld(max_lag=2, partial=partial, share=share, group_size=group_size).play(script)
    world.check_conservation()
    world.check_progress()
    world.check_conservation()
