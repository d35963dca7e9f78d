"""Publisher and receivers over real sockets, with everything that can go wrong between them."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from share_world import Distributed, Embedded
from weight_world import (
    FAST,
    Disk,
    RecordingSink,
    Stream,
    TamperedWire,
    connected,
    equal,
    free_address,
    publisher,
    receiving,
    until,
    weights,
)

from megasao.config.rollout import TransportConfig
from megasao.rollout.engines.base import EngineError
from megasao.transport.codec import decode, encode
from megasao.transport.keys import CurveKeys
from megasao.weights.messages import Announce, Bucket, Fetch, FromReceiver, Hello, Refused, ToReceiver
from megasao.weights.publisher import WeightPublisher
from megasao.weights.receiver import WeightReceiver

Way = Stream | Disk | Distributed | Embedded


WAYS = ["stream", "disk", "distributed", "embedded"]
every_way = pytest.mark.parametrize("way", [*WAYS, "gloo"], indirect=True)
"""Also distributed with its other carrier."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    """How a version travels; the protocol around it is one."""
    if request.param in ("distributed", "gloo", "embedded"):
        carrier = "gloo" if request.param == "gloo" else "tcp"
        ranks = Embedded(weights(0)) if request.param == "embedded" else Distributed(carrier=carrier)
        yield ranks
        ranks.close()
    else:
        yield Disk(tmp_path / "published") if request.param == "disk" else Stream()


async def publish(sender: WeightPublisher, version: int, seed: int, way: Way | None = None):
    await asyncio.to_thread((way or Stream()).send, sender, version, weights(seed))
    return await asyncio.to_thread(sender.wait)


@every_way
def test_every_engine_gets_every_version_bit_for_bit(way: Way) -> None:
    async def main() -> None:
        address, sinks = free_address(), [RecordingSink() for _ in range(4)]
        with publisher(address) as sender:
            async with (
                receiving(address, sinks[0], sinks[1], name="two-engines") as first,
                receiving(address, sinks[2], name="one") as second,
                receiving(address, name="none") as third,
            ):
                await connected(sender, 3)
                for version in range(3):
                    result = await publish(sender, version, version, way)
                    assert (result.engines, result.quarantined) == (["none", "one", "two-engines"], {})
                    assert all(sink.version == version and equal(sink.current, weights(version)) for sink in sinks[:3])
                    for receiver in (first, second, third):
                        assert await receiver.wait_for_version(version, 60) == version
                        assert receiver.latest()[0] == version and equal(receiver.latest()[1], weights(version))
                assert sinks[0].log == [(call, version) for version in range(3) for call in ("prepare", "commit")]

    asyncio.run(main())


@every_way
def test_publishing_to_nobody_and_a_late_joiner_that_gets_the_newest(way: Way) -> None:
    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        with publisher(address) as sender:
            assert (await publish(sender, 4, 4, way)).engines == []
            assert (await publish(sender, 7, 7, way)).engines == []
            async with receiving(address, sink) as receiver:
                assert receiver.latest() is None
                assert await receiver.wait_for_version(7, 60) == 7
                assert sink.log == [("prepare", 7), ("commit", 7)] and equal(sink.current, weights(7))

    asyncio.run(main())


@every_way
def test_receiver_that_starts_before_the_publisher(way: Way) -> None:
    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        async with receiving(address, sink) as receiver:
            with pytest.raises(TimeoutError, match=rf"at {address} was last heard never"):
                await receiver.wait_for_version(0, 0.2)
            with publisher(address) as sender:
                await publish(sender, 0, 0, way)
                await receiver.wait_for_version(0, 60)
            assert equal(sink.current, weights(0))

    asyncio.run(main())


def test_damaged_bucket_quarantines_that_engine_and_the_others_commit() -> None:
    damaged = []

    def flip_one_bit(frames: list[bytes]) -> list[bytes]:
        message, payload = decode(frames, ToReceiver)
        if isinstance(message, Bucket) and message.bucket == 1 and not damaged:
            damaged.append(message.version)
            payload = payload[:-1] + bytes([payload[-1] ^ 4])
        return [frames[0], payload]

    async def main() -> None:
        address, good, bad = free_address(), RecordingSink(), RecordingSink()
        with publisher(address) as sender:
            wire = TamperedWire(address, b"bad", flip_one_bit)
            async with receiving(address, good, name="good"), receiving(wire.address, bad, name="bad") as receiver:
                await connected(sender, 2)
                result = await publish(sender, 1, 1)
                assert result.engines == ["good"] and damaged == [1]
                assert list(result.quarantined) == ["bad"]
                assert "bucket 1 is damaged" in result.quarantined["bad"]
                assert equal(good.current, weights(1))
                # It comes back by itself, with the right bits.
                await receiver.wait_for_version(1, 60)
                assert receiver.quarantined is None and equal(bad.current, weights(1))
                assert (await publish(sender, 2, 2)).engines == ["bad", "good"]
            wire.close()

    asyncio.run(main())


def test_lost_messages_are_asked_for_again() -> None:
    seen = []

    def lose_every_third(frames: list[bytes]) -> list[bytes] | None:
        seen.append(frames)
        return None if len(seen) % 3 == 0 else frames

    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        with publisher(address) as sender:
            wire = TamperedWire(address, b"rollout-0", lose_every_third)
            async with receiving(wire.address, sink):
                await connected(sender, 1)
                for version in range(3):
                    assert (await publish(sender, version, version)).engines == ["rollout-0"]
                    assert equal(sink.current, weights(version))
            wire.close()

    asyncio.run(main())


def test_receiver_that_never_answers_delays_by_one_phase_at_most(way: Way) -> None:
    config = FAST.model_copy(update={"weights_timeout_s": 2.0})

    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        with publisher(address, config) as sender, zmq.Context() as context:
            silent = context.socket(zmq.DEALER)
            silent.setsockopt(zmq.IDENTITY, b"silent")
            silent.connect(address)
            silent.send_multipart(encode(Hello(None, None, None)))
            async with receiving(address, sink, name="live"):
                await connected(sender, 2)
                result = await publish(sender, 1, 1, way)
                assert result.engines == ["live"]
                assert result.quarantined == {"silent": "was not ready within 2 s"}
            silent.close(linger=0)

    asyncio.run(main())


def test_receiver_that_falls_silent_is_forgotten(way: Way) -> None:
    config = FAST.model_copy(update={"dead_after_s": 1.5})

    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        with publisher(address, config) as sender, zmq.Context() as context:
            silent = context.socket(zmq.DEALER)
            silent.setsockopt(zmq.IDENTITY, b"silent")
            silent.connect(address)
            silent.send_multipart(encode(Hello(None, None, None)))
            await connected(sender, 1)
            assert (await publish(sender, 1, 1, way)).quarantined == {"silent": "was silent for 1.5 s"}
            await connected(sender, 0)
            async with receiving(address, sink, name="live"):
                await connected(sender, 1)
                assert (await publish(sender, 2, 2, way)).engines == ["live"]
            silent.close(linger=0)

    asyncio.run(main())


class StubbornSink(RecordingSink):
    """Fails, or hangs, in one of its calls while ``trouble`` lasts."""

    def __init__(self, call: str, trouble: str) -> None:
        super().__init__()
        self.call, self.trouble = call, trouble

    async def _stumble(self, call: str) -> None:
        if call != self.call or not self.trouble:
            return
        if self.trouble == "hang":
            await asyncio.sleep(3600)
        raise EngineError("the engine is ill") if self.trouble == "fail" else ValueError("weights do not fit")

    async def prepare_weights(self, version: int, tensors) -> None:
        await self._stumble("prepare")
        await super().prepare_weights(version, tensors)

    async def commit_weights(self, version: int) -> None:
        await self._stumble("commit")
        await super().commit_weights(version)


@pytest.mark.parametrize("call", ["prepare", "commit"])
@pytest.mark.parametrize("trouble", ["fail", "refuse", "hang"])
def test_engine_in_trouble_is_quarantined_by_name_and_heals(call: str, trouble: str, way: Way) -> None:
    config = FAST.model_copy(update={"weights_timeout_s": 2.0}) if trouble == "hang" else FAST

    async def main() -> None:
        address, good, bad = free_address(), RecordingSink(), StubbornSink(call, trouble)
        with publisher(address, config) as sender:
            async with (
                receiving(address, good, name="good", config=config),
                receiving(address, bad, name="bad", config=config) as receiver,
            ):
                await connected(sender, 2)
                result = await publish(sender, 1, 1, way)
                assert result.engines == ["good"] and list(result.quarantined) == ["bad"]
                await until(lambda: receiver.quarantined is not None, "the receiver knows of its quarantine")
                assert bad.version is None and receiver.version is None and good.version == 1
                bad.trouble = ""
                await receiver.wait_for_version(1, 60)
                assert receiver.quarantined is None and equal(bad.current, weights(1))

    asyncio.run(main())


@every_way
def test_overlapping_publications_are_serialised(way: Way) -> None:
    async def main() -> None:
        address, sinks = free_address(), [RecordingSink(), RecordingSink()]
        with publisher(address) as sender:
            async with receiving(address, sinks[0], name="a"), receiving(address, sinks[1], name="b"):
                await connected(sender, 2)

                def burst():
                    for version in range(1, 6):
                        way.send(sender, version, weights(version))
                    return sender.wait()

                result = await asyncio.to_thread(burst)
                assert (result.version, result.engines) == (5, ["a", "b"])
                for sink in sinks:
                    assert sink.log == [(call, v) for v in range(1, 6) for call in ("prepare", "commit")]
                    assert equal(sink.current, weights(5))

    asyncio.run(main())


def test_versions_must_grow_within_one_life() -> None:
    with publisher(free_address()) as sender:
        with pytest.raises(ValueError, match="nothing was published"):
            sender.wait()
        sender.publish(3, weights(0))
        for version in (3, 2):
            with pytest.raises(ValueError, match=f"version {version} cannot follow 3"):
                sender.publish(version, weights(0))
    with pytest.raises(RuntimeError, match="closed"):
        sender.publish(4, weights(0))


@every_way
def test_restarted_publisher_is_followed_to_a_lower_version(way: Way) -> None:
    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        async with receiving(address, sink) as receiver:
            with publisher(address) as sender:
                await publish(sender, 40, 1, way)
                await receiver.wait_for_version(40, 60)
            with publisher(address) as sender:
                await publish(sender, 37, 2, way)
                await until(lambda: receiver.version == 37, "version 37 of the second life")
                assert equal(sink.current, weights(2))
            with publisher(address) as sender:  # the same number again means other weights
                await publish(sender, 37, 3, way)
                await until(lambda: equal(sink.current, weights(3)), "version 37 of the third life")
            assert sink.log == [(call, v) for v in (40, 37, 37) for call in ("prepare", "commit")]

    asyncio.run(main())


def _publish_and_hang(address: str, ready: str) -> None:
    sender = publisher(address)
    sender.publish(8, weights(8))
    Path(ready).touch()
    time.sleep(600)


def test_publisher_killed_in_the_middle_of_a_transfer(tmp_path: Path) -> None:
    """SIGKILL while the receiver has some buckets; the next life sends version 5."""
    buckets = []

    def stop_after_two(frames: list[bytes]) -> list[bytes] | None:
        message, _ = decode(frames, ToReceiver)
        if isinstance(message, Bucket) and message.version == 8:
            buckets.append(message.bucket)
            return frames if len(buckets) <= 2 else None
        return frames

    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        ready = tmp_path / "ready"
        process = multiprocessing.get_context("spawn").Process(target=_publish_and_hang, args=(address, str(ready)))
        process.start()
        wire = TamperedWire(address, b"rollout-0", stop_after_two)
        async with receiving(wire.address, sink) as receiver:
            await until(lambda: len(buckets) > 2, "a transfer half way", 60)
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            assert sink.log == []
            with publisher(address) as sender:
                await publish(sender, 5, 5)
                await receiver.wait_for_version(5, 60)
                assert equal(sink.current, weights(5)) and ("commit", 8) not in sink.log
        wire.close()

    asyncio.run(main())


@every_way
def test_restarted_receiver_takes_over_its_name_and_is_served_again(way: Way) -> None:
    async def main() -> None:
        address, first, second = free_address(), RecordingSink(), RecordingSink()
        with publisher(address) as sender:
            async with receiving(address, first):
                await connected(sender, 1)
                await publish(sender, 1, 1, way)
            async with receiving(address, second) as receiver:
                await receiver.wait_for_version(1, 60)
                assert (await publish(sender, 2, 2, way)).engines == ["rollout-0"]
                assert equal(second.current, weights(2)) and first.version == 1

    asyncio.run(main())


def test_malformed_frames_are_refused_with_a_reason_and_the_publisher_goes_on() -> None:
    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        with publisher(address) as sender, zmq.Context() as context:
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.IDENTITY, b"stranger")
            stranger.connect(address)
            good_fetch = encode(Fetch(sender.epoch, 1, 10**6))
            await publish(sender, 1, 1)
            for frames, reason in (
                ([b"garbage"], "2 frames"),
                ([b"\xff\xff", b""], "not a message"),
                (encode(Announce("x", 1, [], 0, 1)), "not a message"),
                ([b"", b"", b""], "2 frames"),
                (good_fetch, "bucket 1000000 of version 1"),
            ):
                stranger.send_multipart(frames)
                assert stranger.poll(60_000), reason
                message, _ = decode(stranger.recv_multipart(), ToReceiver)
                assert isinstance(message, Refused) and reason in message.reason
            async with receiving(address, sink, name="good") as receiver:
                await receiver.wait_for_version(1, 60)
            stranger.close(linger=0)
            assert isinstance(decode(good_fetch, FromReceiver)[0], Fetch)

    asyncio.run(main())


def test_malformed_messages_do_not_end_the_receiver() -> None:
    injected = []

    def insert_garbage(frames: list[bytes]) -> list[bytes]:
        message, payload = decode(frames, ToReceiver)
        if isinstance(message, Announce) and len(injected) < 3:
            injected.append(message)
            if len(injected) == 1:
                return [b"\xc1 nothing", b""]
            if len(injected) == 2:
                return list(encode(Announce(message.epoch, message.version, message.tensors, 12, 5)))
            return [frames[0]]
        return [frames[0], payload]

    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        with publisher(address) as sender:
            wire = TamperedWire(address, b"rollout-0", insert_garbage)
            async with receiving(wire.address, sink) as receiver:
                await publish(sender, 1, 1)
                await receiver.wait_for_version(1, 60)
                assert receiver.malformed == 3 and equal(sink.current, weights(1))
            wire.close()

    asyncio.run(main())


def test_curve_keys_and_small_queues() -> None:
    keys = CurveKeys.generate()
    config = FAST.model_copy(update={"high_water_mark": 2})

    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        with publisher(address, config, keys=keys) as sender:
            async with (
                receiving(address, sink, keys=keys, config=config, name="ours") as receiver,
                receiving(address, RecordingSink(), keys=CurveKeys.generate(), config=config, name="foreign"),
                receiving(address, RecordingSink(), config=config, name="plain"),
            ):
                await connected(sender, 1)
                result = await publish(sender, 1, 1)
                assert result.engines == ["ours"] and result.quarantined == {}
                assert receiver.version == 1 and equal(sink.current, weights(1))

    asyncio.run(main())


def test_beyond_loopback_without_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="CURVE"):
        WeightPublisher("tcp://0.0.0.0:39999", config=TransportConfig())


def test_engine_error_that_is_not_foreseen_ends_the_receiver() -> None:
    """A bug in a sink must surface in the worker, not vanish in a task."""

    class Buggy(RecordingSink):
        async def prepare_weights(self, version: int, tensors) -> None:
            raise KeyError("bug")

    async def main() -> None:
        address = free_address()
        with publisher(address) as sender:
            await publish(sender, 1, 1)
            receiver = WeightReceiver(address, Buggy(), identity=b"rollout-0", config=FAST)
            with pytest.raises(KeyError, match="bug"):
                await asyncio.wait_for(receiver.run(), 60)

    asyncio.run(main())
