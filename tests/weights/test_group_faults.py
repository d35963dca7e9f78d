"""What may go wrong with weights that travel through process groups of gloo: processes that die or hang in a bucket,
bytes that change."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import torch
from share_world import SECRET, Distributed, cut_in_two, large, offer
from weight_world import SHORT, RecordingSink, connected, equal, free_address, publisher, receiving, until, weights

from megasao.weights.group_serving import GroupShareServer
from megasao.weights.groups import Group
from megasao.weights.messages import Share
from megasao.weights.publisher import WeightPublisher
from megasao.weights.receiver import WeightReceiver
from megasao.weights.shared import SharedWeights

_spawn = multiprocessing.get_context("spawn")
BUCKET = 16 * 2**20
"""More than sockets keep on their way."""
PART = 2**20
"""Bytes of a bucket after which a process stops."""


async def publish(ranks: Distributed, sender: WeightPublisher, version: int, tensors: dict[str, torch.Tensor]):
    await asyncio.to_thread(ranks.send, sender, version, tensors)
    return await asyncio.to_thread(sender.wait)


def _moved(kind: str) -> int:
    """Bytes that this process has ever read or written."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines[kind])


def _stop_in_a_bucket(kind: str) -> None:
    """The whole process, once a part of the bucket has gone, as far as it can: nothing of it moves any more."""
    before, deadline = _moved(kind), time.monotonic() + 60
    while _moved(kind) < before + PART and time.monotonic() < deadline:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)


async def _stopped(pid: int) -> None:
    def state() -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    await until(lambda: state() == "T", "the process stops in a bucket")


def _one_rank(rank: int, ports: "multiprocessing.Queue[tuple[int, ...]]") -> None:
    server, send = GroupShareServer("127.0.0.1", SECRET, timeout_s=600), Group.send

    def stopping(group: Group, bucket: torch.Tensor, tag: int):
        work = send(group, bucket, tag)
        if rank == 1:
            _stop_in_a_bucket("wchar")
        return work

    Group.send = stopping
    share = offer(server, rank, 8, cut_in_two(large(8), BUCKET)[rank])
    ports.put((rank, share.port, share.total_bytes, share.manifest_crc32))
    time.sleep(600)


def test_a_rank_killed_in_the_middle_of_a_bucket() -> None:
    """It is noticed at once, not when a wait of minutes is over; the trainer's next life publishes an older version."""

    async def main() -> None:
        ports, address, sink = _spawn.Queue(), free_address(), RecordingSink()
        processes = [_spawn.Process(target=_one_rank, args=(rank, ports)) for rank in range(2)]
        for process in processes:
            process.start()
        places = sorted([await asyncio.to_thread(ports.get, True, 120) for _ in processes])
        shares = [Share(rank, "127.0.0.1", *rest) for rank, *rest in places]
        async with receiving(address, sink) as receiver:
            with publisher(address) as sender:
                await connected(sender, 1)
                sender.publish_elsewhere(SharedWeights(8, shares, SECRET, "gloo"))
                await _stopped(processes[1].pid)
                os.kill(processes[1].pid, signal.SIGKILL)
                result = await asyncio.to_thread(sender.wait)
                assert result.engines == []
                reason = result.quarantined["rollout-0"]
                assert "trainer rank 1" in reason and "bucket" in reason
                assert "connection ended" in reason or "closed by peer" in reason or "reset" in reason
            processes[0].kill()
            assert [call for call, _ in sink.log if call != "discard"] == [] and receiver.latest() is None
            ranks = Distributed(carrier="gloo")
            with publisher(address) as sender:
                await publish(ranks, sender, 5, weights(5))
                await receiver.wait_for_version(5, 60)
            assert equal(sink.current, weights(5)) and receiver.quarantined is None
            ranks.close()
        for process in processes:
            process.join(60)

    asyncio.run(main())


def _one_engine(address: str) -> None:
    receive = Group.receive

    def stopping(group: Group, place: torch.Tensor, member: int, tag: int):
        work = receive(group, place, member, tag)
        _stop_in_a_bucket("rchar")
        return work

    Group.receive = stopping
    asyncio.run(WeightReceiver(address, RecordingSink(), identity=b"doomed", config=SHORT).run())


def test_an_engine_killed_in_the_middle_of_a_bucket() -> None:
    """The other one commits, the trainer goes on, and the one that comes back under its name catches up alone."""

    async def main() -> None:
        address, sink, again = free_address(), RecordingSink(), RecordingSink()
        ranks = Distributed(carrier="gloo", timeout_s=600, stages=(0, 1))
        with publisher(address, SHORT) as sender:
            doomed = _spawn.Process(target=_one_engine, args=(address,))
            doomed.start()
            await until(lambda: "doomed" in sender._seen, "the engine that will die", 120)
            await asyncio.to_thread(ranks.send, sender, 1, large(1))
            await _stopped(doomed.pid)
            os.kill(doomed.pid, signal.SIGKILL)
            doomed.join(60)
            result = await asyncio.to_thread(sender.wait)
            assert result.engines == [] and list(result.quarantined) == ["doomed"]
            async with receiving(address, sink, name="healthy"):
                await until(lambda: "healthy" in sender._seen and "doomed" not in sender._seen, "the living alone")
                assert (await publish(ranks, sender, 2, weights(2))).engines == ["healthy"]
                async with receiving(address, again, name="doomed") as receiver:
                    await receiver.wait_for_version(2, 60)
                    assert equal(again.current, weights(2)) and again.log == [("prepare", 2), ("commit", 2)]
                    assert [call for call in sink.log if call[0] == "commit"] == [("commit", 2)], "it took no part"
        ranks.close()

    asyncio.run(main())


def test_a_damaged_bucket_reaches_no_engine_and_is_fetched_again() -> None:
    async def main() -> None:
        address, sinks = free_address(), [RecordingSink(), RecordingSink()]
        ranks, send, damaged = Distributed(carrier="gloo"), Group.send, list[str]()

        def damaging(group: Group, bucket: torch.Tensor, tag: int):
            if tag == 1 and not damaged:
                damaged.append(group.name)
                bucket = bucket.clone()
                bucket[7] ^= 1
            return send(group, bucket, tag)

        with patch.object(Group, "send", damaging), publisher(address) as sender:
            async with receiving(address, sinks[0], name="one") as one, receiving(address, sinks[1], name="two") as two:
                await connected(sender, 2)
                result = await publish(ranks, sender, 1, weights(1))
                (reason,) = result.quarantined.values()
                assert len(damaged) == 1 and len(result.engines) == 1
                assert "trainer rank" in reason and "bucket 1 is damaged" in reason
                for receiver in (one, two):
                    await receiver.wait_for_version(1, 60)
                assert all(equal(sink.current, weights(1)) for sink in sinks)
        ranks.close()

    asyncio.run(main())


def test_a_receiver_stuck_in_a_bucket_is_left_behind_and_takes_the_next_version() -> None:
    """The ranks that send to it would wait for an hour; the next version does not wait for them."""

    async def main() -> None:
        address, ranks = free_address(), Distributed(carrier="gloo", timeout_s=3600, stages=(0, 1))
        sinks, receive = {"one": RecordingSink(), "two": RecordingSink()}, Group.receive
        stuck, released = list[str](), threading.Event()

        def sticking(group: Group, place: torch.Tensor, member: int, tag: int):
            if tag == 5:
                name = group.name.split("/")[3].split(".")[0]
                if not stuck:
                    stuck.append(name)
                if stuck == [name]:
                    released.wait(120)
            return receive(group, place, member, tag)

        with publisher(address, SHORT) as sender:
            async with (
                receiving(address, sinks["one"], name="one", config=SHORT) as one,
                receiving(address, sinks["two"], name="two", config=SHORT) as two,
            ):
                await connected(sender, 2)
                with patch.object(Group, "receive", sticking):
                    first = await publish(ranks, sender, 1, large(1))
                assert list(first.quarantined) == stuck
                assert first.engines == [name for name in sinks if name not in stuck]
                second = await publish(ranks, sender, 2, weights(2))
                assert second.engines == ["one", "two"] and second.quarantined == {}
                assert one.version == two.version == 2
                assert all(equal(sink.current, weights(2)) for sink in sinks.values())
                released.set()
                await until(lambda: not any(server._reading for server in ranks.servers), "nobody hangs any more")
        ranks.close()

    asyncio.run(main())
