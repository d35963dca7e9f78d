"""Weights from the memory of the trainer's ranks, and what may go wrong: processes that die, bytes that change."""

import asyncio
import multiprocessing
import os
import signal
import time

from share_world import SECRET, Distributed, Wire, cut_in_two, large, offer
from weight_world import SHORT, RecordingSink, connected, equal, free_address, publisher, receiving, until, weights

from megasao.weights.messages import Share
from megasao.weights.publisher import WeightPublisher
from megasao.weights.receiver import WeightReceiver
from megasao.weights.serving import ShareServer
from megasao.weights.shared import SharedWeights

_spawn = multiprocessing.get_context("spawn")
HALF_WAY = 1500
"""Bytes after which a wire holds: the manifest and part of a bucket."""


async def publish(ranks: Distributed, sender: WeightPublisher, version: int):
    await asyncio.to_thread(ranks.send, sender, version, weights(version))
    return await asyncio.to_thread(sender.wait)


def _one_rank(rank: int, ports: "multiprocessing.Queue[tuple[int, ...]]") -> None:
    server = ShareServer("127.0.0.1", SECRET, timeout_s=60)
    share = offer(server, rank, 8, cut_in_two(large(8))[rank])
    ports.put((rank, share.port, share.total_bytes, share.manifest_crc32))
    time.sleep(600)


def test_a_rank_killed_in_the_middle_of_a_bucket() -> None:
    """No engine sees the version; the trainer's next life publishes the one it loaded, an older one, first."""

    async def main() -> None:
        ports, address, sink = _spawn.Queue(), free_address(), RecordingSink()
        processes = [_spawn.Process(target=_one_rank, args=(rank, ports)) for rank in range(2)]
        for process in processes:
            process.start()
        places = sorted([await asyncio.to_thread(ports.get, True, 60) for _ in processes])
        shares = [Share(rank, "127.0.0.1", *rest) for rank, *rest in places]
        wire = Wire(shares[1], hold_at=HALF_WAY)
        async with receiving(address, sink) as receiver:
            with publisher(address) as sender:
                await connected(sender, 1)
                sender.publish_elsewhere(SharedWeights(8, [shares[0], wire.share], SECRET))
                assert await asyncio.to_thread(wire.held.wait, 60)
                os.kill(processes[1].pid, signal.SIGKILL)
                wire.close()
                result = await asyncio.to_thread(sender.wait)
                assert result.engines == [] and "rank 1" in result.quarantined["rollout-0"]
            processes[0].kill()
            assert [call for call, _ in sink.log if call != "discard"] == [] and receiver.latest() is None
            ranks = Distributed()
            with publisher(address) as sender:
                await publish(ranks, sender, 5)
                await receiver.wait_for_version(5, 60)
            assert equal(sink.current, weights(5)) and receiver.quarantined is None
            ranks.close()
        for process in processes:
            process.join(60)

    asyncio.run(main())


def _one_engine(address: str) -> None:
    asyncio.run(WeightReceiver(address, RecordingSink(), identity=b"doomed", config=SHORT).run())


def test_an_engine_killed_in_the_middle_of_a_bucket() -> None:
    """The other one commits, the trainer goes on, and the one that comes back under its name catches up alone."""

    async def main() -> None:
        address, sink, again, ranks = free_address(), RecordingSink(), RecordingSink(), Distributed()
        wires: list[Wire] = []
        with publisher(address, SHORT) as sender:
            doomed = _spawn.Process(target=_one_engine, args=(address,))
            doomed.start()
            await until(lambda: "doomed" in sender._seen, "the engine that will die", 60)

            def hold_first(share: Share) -> Share:
                if share.rank == 0:
                    wires.append(Wire(share, hold_at=HALF_WAY))
                    return wires[-1].share
                return share

            ranks.through = hold_first
            await asyncio.to_thread(ranks.send, sender, 1, large(1))
            assert await asyncio.to_thread(wires[0].held.wait, 60)
            os.kill(doomed.pid, signal.SIGKILL)
            doomed.join(60)
            wires[0].close()
            ranks.through = lambda share: share
            result = await asyncio.to_thread(sender.wait)
            assert result.engines == [] and list(result.quarantined) == ["doomed"]
            async with receiving(address, sink, name="healthy"):
                await until(lambda: "healthy" in sender._seen and "doomed" not in sender._seen, "the living alone")
                assert (await publish(ranks, sender, 2)).engines == ["healthy"]
                async with receiving(address, again, name="doomed") as receiver:
                    await receiver.wait_for_version(2, 60)
                    assert equal(again.current, weights(2)) and again.log == [("prepare", 2), ("commit", 2)]
                    assert [call for call in sink.log if call[0] == "commit"] == [("commit", 2)], "it took no part"
        ranks.close()

    asyncio.run(main())


def test_a_damaged_bucket_reaches_no_engine_and_is_fetched_again() -> None:
    damaged: list[int] = []

    def flip(position: int, data: bytearray) -> None:
        if not damaged and position > HALF_WAY:
            damaged.append(position)
            data[0] ^= 1

    async def main() -> None:
        address, sinks, ranks = free_address(), [RecordingSink(), RecordingSink()], Distributed()
        wires: list[Wire] = []

        def through(share: Share) -> Share:
            wires.append(Wire(share, flip if share.rank == 0 else lambda position, data: None))
            return wires[-1].share

        ranks.through = through
        with publisher(address) as sender:
            async with receiving(address, sinks[0], name="one") as one, receiving(address, sinks[1], name="two") as two:
                await connected(sender, 2)
                result = await publish(ranks, sender, 1)
                assert len(damaged) == 1 and len(result.engines) == 1 and len(result.quarantined) == 1
                (reason,) = result.quarantined.values()
                assert "rank 0 at 127.0.0.1" in reason and "is damaged" in reason
                for receiver in (one, two):
                    await receiver.wait_for_version(1, 60)
                assert all(equal(sink.current, weights(1)) for sink in sinks)
        for wire in wires:
            wire.close()
        ranks.close()

    asyncio.run(main())


def test_a_receiver_stuck_in_a_bucket_is_left_behind_and_takes_the_next_version() -> None:
    """The rank that sends to it would wait for an hour; the next version cuts it off."""

    async def main() -> None:
        address, ranks = free_address(), Distributed(timeout_s=3600)
        sinks = {"one": RecordingSink(), "two": RecordingSink()}
        wires: list[Wire] = []

        def hold_one_receiver(share: Share) -> Share:
            if share.rank == 1:
                return share
            wires.append(Wire(share, hold_at=HALF_WAY, only_first=True))
            return wires[-1].share

        with publisher(address, SHORT) as sender:
            async with (
                receiving(address, sinks["one"], name="one", config=SHORT) as one,
                receiving(address, sinks["two"], name="two", config=SHORT) as two,
            ):
                await connected(sender, 2)
                ranks.through = hold_one_receiver
                await asyncio.to_thread(ranks.send, sender, 1, large(1))
                assert await asyncio.to_thread(wires[0].held.wait, 60)
                ranks.through = lambda share: share
                first = await asyncio.to_thread(sender.wait)
                (stuck,) = first.quarantined
                assert first.engines == [name for name in sinks if name != stuck]
                second = await publish(ranks, sender, 2)
                assert second.engines == ["one", "two"] and second.quarantined == {}
                assert one.version == two.version == 2
                assert all(equal(sink.current, weights(2)) for sink in sinks.values())
                assert ("prepare", 1) not in sinks[stuck].log
        for wire in wires:
            wire.close()
        ranks.close()

    asyncio.run(main())
