"""Shares of a version through process groups of gloo: who is in which group, what is refused, what is left behind."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import torch
from share_world import SECRET, Distributed, retire
from weight_world import equal, weights

from megasao.weights.group_serving import GroupShareServer
from megasao.weights.groups import RECEIVER, Group, GroupCall, check_call, finish, under_way
from megasao.weights.intake import LANES, Intake
from megasao.weights.messages import AnnounceShares, Share
from megasao.weights.serving import LENGTH, NONCE_BYTES, bound, proof, receive_into
from megasao.weights.shares_download import SharesDownload


def download(shares: list[Share], intake: Intake, version: int = 1, secret: bytes = SECRET) -> SharesDownload:
    return SharesDownload(AnnounceShares("epoch", version, shares, secret, "gloo"), intake)


def fetched(one: SharesDownload, timeout_s: float = 60.0) -> str | None:
    return asyncio.run(one.verify(timeout_s))


def offered(ranks: Distributed, version: int) -> list[Share]:
    for server in ranks.servers:
        with server._changed:  # receivers have what they asked for, which the threads that sent it may not know yet
            assert server._changed.wait_for(lambda server=server: not server._reading, 60)
        retire(server)
    return ranks.offer(version, weights(version))


def names(ranks: Distributed) -> list[set[str]]:
    """Of the groups that each rank is in."""
    return [{group.name for group in list(server._groups.values())} for server in ranks.servers]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_each_stage_has_a_group_with_each_receiver_that_is_kept(host: str) -> None:
    ranks, intakes = Distributed(host, carrier="gloo", stages=(0, 1)), [Intake("one"), Intake("two")]
    found = []
    for version in (1, 2, 3):
        shares = offered(ranks, version)
        for intake in intakes:
            one = download(shares, intake, version)
            assert fetched(one) is None and equal(one.tensors(), weights(version))
        found.append(names(ranks))
    assert found[0] == found[1] == found[2]
    first, second = found[0]
    assert len(first) == len(second) == 2 and not first & second, "one for each stage and receiver"
    parts = [name.split("/") for name in sorted(first | second)]
    assert [part[2] for part in parts] == ["stage-0", "stage-0", "stage-1", "stage-1"]
    assert {part[3].split(".")[0] for part in parts} == {"one", "two"} and {part[1] for part in parts} == {"epoch"}
    for intake in intakes:
        intake.close()
    ranks.close()


def test_ranks_of_one_stage_share_a_group_and_lost_ones_are_made_anew_under_new_names() -> None:
    ranks, intake = Distributed(carrier="gloo", stages=(3, 3)), Intake()
    assert fetched(download(offered(ranks, 1), intake)) is None
    first = names(ranks)
    assert first[0] == first[1] and len(first[0]) == 1
    with ranks.servers[1]._changed:
        ranks.servers[1]._end(lambda: ranks.servers[1]._peers)
    one = download(offered(ranks, 2), intake, 2)
    assert fetched(one) is None and equal(one.tensors(), weights(2))
    eventually(lambda: names(ranks)[0] == names(ranks)[1])
    assert not names(ranks)[0] & first[0], "no name is used twice"
    again = Intake()
    assert fetched(download(ranks.offer(2, weights(2)), again, 2)) is None
    assert len(names(ranks)[0]) == 2, "the same receiver in another life has its own"
    for one in (intake, again):
        one.close()
    ranks.close()


def test_what_is_not_the_announced_version_is_refused() -> None:
    ranks, intake = Distributed(carrier="gloo"), Intake()
    shares = offered(ranks, 1)
    assert "does not have this version" in fetched(download(shares, intake, version=2))
    assert "rank 0" in fetched(download(shares, intake, secret=b"guessed")), "a stranger gets nothing"
    wrong = [shares[0], msgspec.structs.replace(shares[1], manifest_crc32=1)]
    assert "rank 1" in (reason := fetched(download(wrong, intake))) and "CRC-32" in reason
    assert fetched(download(shares, intake)) is None
    ranks.close()
    assert "of trainer rank" in fetched(download(shares, intake)), "nobody is there"
    intake.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"rank": 0}, "member 0"), ({"rank": -1}, "member -1"), ({"rank": 2}, "member 2"), ({"size": 2**20}, "1048576")],
)
def test_a_group_that_cannot_be_is_not_joined(change: dict, reason: str) -> None:
    call = GroupCall("weights/here", 1, 2, b"there")
    check_call(call)
    with pytest.raises(ValueError, match=reason):
        check_call(msgspec.structs.replace(call, **change))


def test_an_address_of_another_form_is_refused_before_gloo_reads_it() -> None:
    """It would read beyond what it is given, which ends the process."""
    rank, receiver = (Group("weights/here", member, 2, "127.0.0.1", 60) for member in (1, RECEIVER))
    right = receiver.address
    wrong = [b"", b"there", right[:-1], right + b"\0", bytes([right[0] ^ 0xFF]) + right[1:], bytes(len(right))]
    for address in wrong:
        with pytest.raises(ValueError, match=f"member 0 gives {len(address)} bytes that are no address"):
            rank.meet(RECEIVER, address)
    rank.meet(RECEIVER, right)
    receiver.meet(1, rank.address)


@pytest.mark.parametrize("body", [b"no call", b"\x00" * 5000, None])
def test_who_names_no_group_or_cannot_prove_it_gets_only_the_end_of_the_connection(body: bytes | None) -> None:
    server = GroupShareServer("127.0.0.1", SECRET, timeout_s=60)
    server.offer(1, b"manifest", memoryview(b"share"))
    connection = socket.create_connection(("127.0.0.1", server.port))
    bound(connection, 60)
    nonce = bytearray(NONCE_BYTES)
    receive_into(connection, memoryview(nonce))
    asked = LENGTH.pack(1)
    call = msgspec.msgpack.encode(GroupCall("weights/here", 1, 2, b"there")) if body is None else body
    called = LENGTH.pack(len(call)) + call
    proven = proof(SECRET, bytes(nonce), called) if body is not None else bytes(32)
    connection.sendall(asked + proof(SECRET, bytes(nonce), asked) + called + proven)
    with pytest.raises(ConnectionError):
        receive_into(connection, memoryview(bytearray(1)))
    connection.close()
    eventually(lambda: not server._peers and not server._groups)
    server.close()


def left() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settled(most: tuple[int, int]) -> bool:
    return all(now <= before for now, before in zip(left(), most, strict=True))


def test_no_thread_and_no_descriptor_is_left_behind() -> None:
    before = left()
    ranks, intake = Distributed(carrier="gloo", stages=(0, 1)), Intake()
    together = threading.Barrier(LANES)
    for one in [intake.threads.submit(together.wait, 60) for _ in range(LANES)]:
        one.result()  # all threads that it may ever have
    for version in (1, 2):
        assert fetched(download(offered(ranks, version), intake, version)) is None
    running = left()
    for version in range(3, 22):
        assert fetched(download(offered(ranks, version), intake, version)) is None
    eventually(lambda: settled(running))
    shares = offered(ranks, 22)
    ranks.servers[1]._offers[22].share[100] ^= 1
    for _ in range(3):
        assert "is damaged" in fetched(download(shares, intake, 22))
    ranks.servers[1]._offers[22].share[100] ^= 1
    assert fetched(download(shares, intake, 22)) is None
    eventually(lambda: settled(running))
    intake.close()
    ranks.close()
    eventually(lambda: settled(before))


def test_waiting_for_a_rank_that_does_not_send_is_bounded_on_both_sides() -> None:
    ranks, intake = Distributed(carrier="gloo", timeout_s=1.0), Intake()
    shares, before = offered(ranks, 1), threading.enumerate()
    released, send = threading.Event(), ranks.servers[1]._send

    def late(*given) -> None:
        released.wait(120)
        send(*given)

    ranks.servers[1]._send = late
    reason = fetched(download(shares, intake), 1.0)
    assert "of trainer rank" in reason or "from the trainer's ranks took more than 1 s" in reason
    ours = [thread for thread in threading.enumerate() if thread.name == "weight-group" and thread not in before]
    eventually(lambda: not any(thread.is_alive() for thread in ours))
    released.set()  # it finds nobody there any more
    intake.close()
    ranks.close()
    eventually(lambda: not any(server._peers for server in ranks.servers))


def test_a_group_in_which_a_bucket_is_under_way_can_be_left() -> None:
    """What was only forgotten would keep gloo's thread, and whoever waits for it, for ever."""
    receiver, sender = (Group("weights/here", rank, 2, "127.0.0.1", 60) for rank in range(2))
    receiver.meet(1, sender.address)
    sender.meet(RECEIVER, receiver.address)
    lost: list[str] = []

    def send(group: Group) -> None:
        try:
            with under_way() as works:
                for tag in range(3):
                    works.append(group.send(torch.ones(2**20, dtype=torch.uint8), tag))
                while works:
                    finish(works.popleft())
        except ConnectionError as error:
            lost.append(str(error))

    thread = threading.Thread(target=send, args=(sender,))
    thread.start()
    places = [torch.zeros(2**20, dtype=torch.uint8) for _ in range(2)]
    finish(receiver.receive(places[0], 1, 0))
    assert bool((places[0] == 1).all())
    with pytest.raises(KeyError), under_way() as works:
        works.append(receiver.receive(places[1], 1, 1))
        raise KeyError
    works.clear()
    del receiver
    thread.join(60)
    assert len(lost) == 1, "the sender sees it at once"
