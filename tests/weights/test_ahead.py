"""Small versions that ranks send before they are announced, and the sockets over which they come."""

import asyncio
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from share_world import SECRET, Distributed, Wire, cut_in_two, offer, retire
from weight_world import equal, weights

from megasao.weights.ahead import Arrived, Damaged
from megasao.weights.incoming import Link
from megasao.weights.intake import Intake, Stage
from megasao.weights.messages import AnnounceShares, Share
from megasao.weights.serving import nearby
from megasao.weights.shares_download import SharesDownload
from megasao.weights.small_fetching import SmallFetching


@pytest.fixture
def ranks() -> Iterator[Distributed]:
    both = Distributed()
    yield both
    both.close()


@pytest.fixture
def intake() -> Iterator[Intake]:
    kept = Intake()
    yield kept
    kept.close()


def take(intake: Intake, version: int, shares: list[Share], timeout_s: float = 60.0) -> SharesDownload | str:
    """What a receiver has once the version is announced, or why not."""
    one = SharesDownload(AnnounceShares("epoch", version, shares, SECRET), intake)
    return asyncio.run(one.verify(timeout_s)) or one


def begin(ranks: Distributed, intake: Intake, *, ask: bool = True) -> None:
    """Take version 1, and ask for what comes after it."""
    assert equal(take(intake, 1, ranks.offer(1, weights(1))).tensors(), weights(1))
    for server in ranks.servers:
        with server._changed:  # the thread that sent it may not know yet that it has arrived
            assert server._changed.wait_for(lambda server=server: not server._reading, 60)
    if ask:
        intake.ask_ahead()


def peers(ranks: Distributed) -> list[set[socket.socket]]:
    return [set(server._peers) for server in ranks.servers]


def test_the_next_version_comes_before_it_is_announced(ranks: Distributed, intake: Intake) -> None:
    for ask in (True, False):
        begin(ranks, intake, ask=ask)
        shares = ranks.offer(2, weights(2))
        if ask:
            intake._ahead.answered.result(60)
        for server in ranks.servers:
            retire(server)
        taken = take(intake, 2, shares)
        if ask:
            assert equal(taken.tensors(), weights(2))
        else:
            assert "does not have this version any more" in taken


def test_many_versions_come_over_the_same_connections(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    first = peers(ranks)
    for version in range(2, 8):
        shares = ranks.offer(version, weights(version))
        intake._ahead.answered.result(60)
        assert [type(one) for one in intake._ahead.found.values()] == [Arrived, Arrived]
        assert equal(take(intake, version, shares).tensors(), weights(version))
        intake.ask_ahead()
        intake.ask_ahead()  # changes nothing
    assert peers(ranks) == first and all(len(one) == 1 for one in first)


def test_what_has_come_is_not_taken_for_another_version(ranks: Distributed, intake: Intake) -> None:
    """One that was never announced, as when a rank could not copy its share."""
    begin(ranks, intake)
    first = peers(ranks)
    ranks.offer(2, weights(2))
    intake._ahead.answered.result(60)
    assert equal(take(intake, 3, ranks.offer(3, weights(3))).tensors(), weights(3))
    assert peers(ranks) == first, "it was asked for over the connections that there are"


def test_what_has_come_is_not_taken_for_other_weights_of_the_same_version(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    ranks.offer(2, weights(2))
    intake._ahead.answered.result(60)
    shares = ranks.offer(2, weights(9))
    assert "trainer rank 0" in (reason := take(intake, 2, shares)) and "not the announced one" in reason
    assert equal(take(intake, 2, shares).tensors(), weights(9)), "the next attempt has nothing of it"


def test_a_share_that_is_damaged_on_the_way_is_named_and_comes_anew(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    right = cut_in_two(weights(2))
    wrong = [(manifest, data.copy()) for manifest, data in right]
    wrong[1][1][1100] ^= 1
    shares = [offer(server, rank, 2, wrong[rank]) for rank, server in enumerate(ranks.servers)]
    intake._ahead.answered.result(60)
    found = intake._ahead.found
    assert isinstance(found[intake._ahead.places[1]], Damaged)
    assert "trainer rank 1" in (reason := take(intake, 2, shares)) and "bucket 1 is damaged" in reason
    shares = [offer(server, rank, 2, right[rank]) for rank, server in enumerate(ranks.servers)]
    assert equal(take(intake, 2, shares).tensors(), weights(2))


def test_a_damaged_version_that_is_not_announced_stops_nothing(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    wrong = cut_in_two(weights(2))[0]
    wrong[1][0] ^= 1
    offer(ranks.servers[0], 0, 2, wrong)
    offer(ranks.servers[1], 1, 2, cut_in_two(weights(2))[1])
    intake._ahead.answered.result(60)
    assert equal(take(intake, 3, ranks.offer(3, weights(3))).tensors(), weights(3))


def test_a_version_of_another_size_is_not_taken_for_a_damaged_one(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    longer = {"longer": torch.ones(2**13)}
    shares = ranks.offer(2, longer)
    intake._ahead.answered.result(60)
    assert equal(take(intake, 2, shares).tensors(), longer)


def test_a_rank_that_ends_its_connection_is_asked_over_another(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    first = peers(ranks)
    with ranks.servers[0]._changed:
        ranks.servers[0]._end(lambda: ranks.servers[0]._peers)
    shares = ranks.offer(2, weights(2))
    intake._ahead.answered.result(60)
    assert intake._ahead.found.keys() == {intake._ahead.places[1]}
    assert equal(take(intake, 2, shares).tensors(), weights(2))
    assert peers(ranks)[0] != first[0] and peers(ranks)[1] == first[1]


def test_the_same_version_again_does_not_wait_for_the_next(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    assert equal(take(intake, 1, ranks.offer(1, weights(1))).tensors(), weights(1))


def test_waiting_for_a_rank_that_has_not_copied_is_bounded(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    shares = [
        offer(ranks.servers[0], 0, 2, cut_in_two(weights(2))[0]),
        intake._ahead._announce.shares[1],
    ]
    assert take(intake, 2, shares, timeout_s=0.3) == "fetching weights 2 from the trainer's ranks took more than 0.3 s"
    assert equal(take(intake, 2, ranks.offer(2, weights(2))).tensors(), weights(2))


def test_other_ranks_are_asked_themselves(ranks: Distributed, intake: Intake) -> None:
    """As after a restart of the trainer; the connections to those before are gone."""
    begin(ranks, intake)
    others, ahead = Distributed(), intake._ahead
    assert equal(take(intake, 2, others.offer(2, weights(2))).tensors(), weights(2))
    assert not any(link.is_open for link in ahead.links) and ahead.answered.done()
    others.close()


def test_whoever_leaves_lets_the_ranks_go(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    threads = intake._ahead._threads
    intake.close()
    assert not any(thread.is_alive() for thread in threads)
    for server in ranks.servers:
        with server._changed:
            assert server._changed.wait_for(lambda server=server: not server._peers, 60)


def test_a_rank_that_ends_lets_a_receiver_go(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    ranks.close()
    intake._ahead.answered.result(60)
    assert not intake._ahead.found


def test_a_receiver_on_the_machine_of_a_rank_needs_no_network(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    assert {peer.family for one in peers(ranks) for peer in one} == {socket.AF_UNIX}
    wires = [Wire(share) for share in ranks.offer(2, weights(2))]  # at ports at which no rank serves
    elsewhere = Intake()
    assert equal(take(elsewhere, 2, [wire.share for wire in wires]).tensors(), weights(2))
    assert {peer.family for one in peers(ranks) for peer in one} == {socket.AF_UNIX, socket.AF_INET}
    elsewhere.close()
    for wire in wires:
        wire.close()


def test_where_there_can_be_no_more_threads_it_is_asked_for_once_announced(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake, ask=False)
    first, before = peers(ranks), threading.stack_size(2**60)  # no thread starts with such a stack
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=print).start()
        intake.ask_ahead()
    finally:
        threading.stack_size(before)
    assert intake._ahead.answered.done() and not intake._ahead.found
    intake.ask_ahead()  # changes nothing
    assert equal(take(intake, 2, ranks.offer(2, weights(2))).tensors(), weights(2))
    assert peers(ranks) == first, "the connections are as they were"


def test_a_connection_is_closed_only_once_nobody_reads_from_it(ranks: Distributed, intake: Intake) -> None:
    """Whoever reads with a number that was closed may read from what has it next."""
    begin(ranks, intake)
    ahead = intake._ahead
    ranks.close()
    ahead.answered.result(60)
    assert all(link.is_open for link in ahead.links), "a thread that reads closes none"
    assert "trainer rank 0" in take(intake, 2, ahead._announce.shares)
    assert not any(link.is_open for link in ahead.links)


def test_giving_up_ends_the_threads_first(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake)
    ahead = intake._ahead
    shares = ahead._announce.shares
    fetching = SmallFetching(AnnounceShares("epoch", 2, shares, SECRET), intake, 60.0)

    async def cancelled() -> None:
        task = asyncio.create_task(fetching.finish())
        await asyncio.sleep(0)  # it waits for what was asked for ahead
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert not any(thread.is_alive() for thread in ahead._threads)

    asyncio.run(cancelled())
    assert not any(link.is_open for link in ahead.links)


def test_what_is_given_up_while_it_is_read_is_closed_by_the_thread_that_reads(ranks: Distributed) -> None:
    intake = Intake()
    wires = [Wire(share, hold_at=16) for share in ranks.offer(1, weights(1))]
    fetching = SmallFetching(AnnounceShares("epoch", 1, [wire.share for wire in wires], SECRET), intake, 60.0)

    async def cancelled() -> None:
        task = asyncio.create_task(fetching.finish())
        await asyncio.to_thread(wires[0].held.wait, 60)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())  # which waits for the thread
    assert not fetching._open and not fetching._busy
    for wire in wires:
        wire.close()
    intake.close()


def test_who_comes_later_closes_what_is_given_up(intake: Intake) -> None:
    for thread_first in (True, False):
        fetching = SmallFetching(AnnounceShares("epoch", 1, [], SECRET), intake, 60.0)
        near, far = socket.socketpair()
        with fetching._at_work():
            fetching._enter(near)
            if not thread_first:
                fetching._end_all()
            assert near.fileno() >= 0
        if thread_first:
            fetching._end_all()
        assert near.fileno() < 0 and far.recv(1) == b""
        far.close()
        with pytest.raises(ValueError, match="given up"), fetching._at_work():
            raise AssertionError("it begins nothing any more")


def test_a_connection_that_a_rank_has_closed_is_closed_here(ranks: Distributed, intake: Intake) -> None:
    begin(ranks, intake, ask=False)
    links = intake._ahead.links
    with ranks.servers[0]._changed:
        ranks.servers[0]._end(lambda: ranks.servers[0]._peers)
    assert equal(take(intake, 2, ranks.offer(2, weights(2))).tensors(), weights(2))
    assert [link.is_open for link in links] == [False, True]


def test_a_stage_that_is_kept_after_the_end_is_closed() -> None:
    """The thread of an attempt that was given up may be done only then."""
    intake, (near, far) = Intake(), socket.socketpair()
    intake.close()
    intake.keep_stage(Stage([Link(("127.0.0.1", 1), near, b"")]))
    assert near.fileno() < 0 and not intake.has_stages
    far.close()


def test_groups_of_another_carrier_are_left_beside_the_event_loop(ranks: Distributed, intake: Intake) -> None:
    """Which takes a moment, in which nothing else would run."""
    others = Distributed(carrier="gloo")
    one = SharesDownload(AnnounceShares("other", 1, others.offer(1, weights(1)), SECRET, "gloo"), intake)
    assert asyncio.run(one.verify(60.0)) is None
    (stage,) = intake._stages.values()
    left_by: list[threading.Thread] = []
    weakref.finalize(stage.group, lambda: left_by.append(threading.current_thread()))
    assert equal(take(intake, 2, ranks.offer(2, weights(2))).tensors(), weights(2))
    assert len(left_by) == 1 and left_by[0] is not threading.main_thread() and not stage.links
    others.close()


def test_a_rank_that_can_have_no_more_threads_turns_a_receiver_away_and_goes_on(
    ranks: Distributed, intake: Intake
) -> None:
    shares, server = ranks.offer(1, weights(1)), ranks.servers[0]
    before = threading.stack_size(2**60)  # no thread starts with such a stack
    try:
        with socket.create_connection((server.host, server.port), 60) as turned_away:
            assert turned_away.recv(1) == b""
    finally:
        threading.stack_size(before)
    assert equal(take(intake, 1, shares).tensors(), weights(1))


def test_only_who_knows_the_secret_can_tell_where_a_rank_listens() -> None:
    addresses = {nearby(host, port, secret) for host in ("a", "b") for port in (1, 2) for secret in (b"one", b"two")}
    assert len(addresses) == 8 and all(address.startswith(b"\0") for address in addresses)
