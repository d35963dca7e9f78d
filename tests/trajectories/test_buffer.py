"""The buffer: first in, first out; stale ones leave when a batch is asked for."""

from trajectory_samples import sample

from megasao.trajectories.buffer import TrajectoryBuffer, summarise
from megasao.trajectories.schema import to_batch


def summaries(**versions: int):
    batch = to_batch([sample(name, weight_versions=[(0, version)]) for name, version in versions.items()])
    return summarise(batch)


def filled(**versions: int) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer()
    for summary in summaries(**versions):
        buffer.add(summary)
    return buffer


def names(chosen):
    return [summary.trajectory_id for summary in chosen]


def test_a_summary_holds_what_a_manifest_needs():
    [done, cut] = summarise(to_batch([sample("a"), sample("b", finish_reason="max_tokens")]))
    assert (done.tokens, done.action_tokens, done.oldest_version, done.newest_version) == (4, 2, 3, 5)
    [untagged] = summarise(to_batch([sample("c", weight_versions=None)]), {"c": 9}.__getitem__)
    assert (untagged.oldest_version, untagged.newest_version, untagged.lag(11)) == (9, None, 2)
    assert (done.reward, done.truncated, cut.truncated) == (1.25, False, True)
    assert 100 < done.nbytes < 400


ANY = 10**9


def test_first_come_first_trained_and_stale_ones_leave():
    buffer = filled(a=5, b=1, c=4, d=3)
    assert names(buffer.take_stale(version=5, max_lag=2)) == ["b"]
    assert names(buffer.assemble(version=5, groups=2, most_stale=ANY).chosen) == ["a", "c"]
    assert len(buffer) == 1 and "d" in buffer


def test_too_few_give_no_batch_and_stay():
    buffer = filled(a=0, b=3)
    assert names(buffer.take_stale(version=3, max_lag=2)) == ["a"]
    assert buffer.assemble(version=3, groups=2, most_stale=ANY).chosen is None
    assert len(buffer) == 1
    assert buffer.nbytes == summaries(b=3)[0].nbytes


def test_a_trajectory_from_later_weights_is_fresh():
    buffer = filled(a=9)
    assert buffer.take_stale(version=3, max_lag=0) == []
    outcome = buffer.assemble(version=3, groups=1, most_stale=0)
    assert names(outcome.chosen) == ["a"]
    assert outcome.chosen[0].lag(3) == 0


def test_no_more_stale_ones_than_the_quota():
    buffer = filled(a=1, b=1, c=2, d=1, e=2)
    outcome = buffer.assemble(version=2, groups=4, most_stale=2)
    assert names(outcome.chosen) == ["a", "b", "c", "e"] and names(outcome.passed_over) == ["d"]
    buffer = filled(a=1, b=1, c=2)
    outcome = buffer.assemble(version=2, groups=3, most_stale=1)
    assert outcome.chosen is None and names(outcome.passed_over) == ["b"] and len(buffer) == 3


def test_groups_leave_whole_in_the_order_of_their_last_member():
    buffer = TrajectoryBuffer()
    for name in ("a1", "b1", "b2", "c1", "a2", "c2"):
        buffer.add(summarise(to_batch([sample(name, group_id=name[0])]))[0])

    def expected(group: str) -> int:
        return 1 if group == "c" else 2

    assert names(buffer.of_group("a")) == ["a1", "a2"]
    outcome = buffer.assemble(version=3, groups=2, most_stale=ANY, expected=expected)
    assert names(outcome.chosen) == ["b1", "b2", "c1"]
    assert names(buffer.waiting()) == ["a1", "a2", "c2"]
    assert buffer.assemble(version=3, groups=3, most_stale=ANY, expected=expected).chosen is None
