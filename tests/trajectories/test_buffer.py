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
    assert (done.reward, done.truncated, cut.truncated) == (1.25, False, True)
    assert 100 < done.nbytes < 400


def test_first_come_first_trained_and_stale_ones_leave():
    buffer = filled(a=5, b=1, c=4, d=3)
    outcome = buffer.assemble(version=5, max_lag=2, count=2)
    assert names(outcome.chosen) == ["a", "c"]
    assert names(outcome.stale) == ["b"]
    assert len(buffer) == 1 and "d" in buffer


def test_too_few_fresh_ones_give_no_batch_but_stale_ones_still_leave():
    buffer = filled(a=0, b=3)
    outcome = buffer.assemble(version=3, max_lag=2, count=2)
    assert outcome.chosen is None
    assert names(outcome.stale) == ["a"]
    assert len(buffer) == 1
    assert buffer.nbytes == summaries(b=3)[0].nbytes


def test_a_trajectory_from_later_weights_is_fresh():
    outcome = filled(a=9).assemble(version=3, max_lag=0, count=1)
    assert names(outcome.chosen) == ["a"]
    assert outcome.chosen[0].lag(3) == 0
