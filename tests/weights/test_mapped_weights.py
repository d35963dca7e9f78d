"""Weights in memory that ranks and an engine share: who may write it, what is compared, and when it goes."""

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from share_world import two_pairs, write_mapped
from weight_world import RecordingSink, connected, equal, free_address, publisher, receiving, weights

from megasao.config.rollout import TransportConfig
from megasao.weights import mapped, shared
from megasao.weights.intake import Intake
from megasao.weights.mapped import MappedDownload, MappedWeights, Mappings, Segment, SegmentPair, room_for
from megasao.weights.messages import AnnounceMapped, Mapped
from megasao.weights.ownership import this_machine
from megasao.weights.publisher import WeightPublisher

PATIENT = TransportConfig(heartbeat_s=0.05, weights_timeout_s=60.0, dead_after_s=60.0)
_spawn = multiprocessing.get_context("spawn")


def announced(memories: list[Mapped], version: int = 1) -> AnnounceMapped:
    return MappedWeights(version, memories).announcement("epoch")


def taken(announce: AnnounceMapped, mappings: Mappings | None = None) -> tuple[MappedDownload, str | None]:
    intake = Intake()
    one = MappedDownload(announce, mappings or Mappings(), intake.threads)
    found = asyncio.run(one.verify(60.0))
    intake.close()
    return one, found


def views(download: MappedDownload) -> Iterator[torch.Tensor]:
    """Every piece, where it lies."""
    tensors = download.tensors()
    for found in tensors._pieces.values():
        for piece, share in found:
            yield piece.view(tensors._flats[share])


@pytest.fixture(params=[mapped.SMALL_BYTES, 0], ids=["in place", "in threads"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SegmentPair]]:
    """Memory of two ranks, whose versions are compared as small ones are, and as large ones are."""
    monkeypatch.setattr(mapped, "SMALL_BYTES", request.param)
    found = two_pairs(weights(0))
    yield found
    for pair in found:
        pair.close()


def test_a_version_is_mapped_bit_for_bit_and_nothing_is_copied(ranks: list[SegmentPair]) -> None:
    memories = [write_mapped(pair, rank, weights(5)) for rank, pair in enumerate(ranks)]
    one, problem = taken(announced(memories))
    assert problem is None and equal(one.tensors(), weights(5))
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line.split() for line in lines if "megasao-weights" in line]
    private = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps if line[1][3] == "p"]
    places = [view.data_ptr() for view in views(one) if view.numel()]
    assert places and all(any(first <= place < last for first, last in private) for place in places)


def test_what_a_receiver_has_is_not_written_and_its_memory_is_used_again_later(ranks: list[SegmentPair]) -> None:
    def publish(seed: int) -> list[Mapped]:
        return [write_mapped(pair, rank, weights(seed)) for rank, pair in enumerate(ranks)]

    first = publish(1)
    held, _ = taken(announced(first))
    part = held.tensors()["embed"]
    second, third = publish(2), publish(3)
    assert {memory.fd for memory in third}.isdisjoint(memory.fd for memory in second), "the current one stays"
    assert equal(held.tensors(), weights(1)), "two versions later"
    assert equal(taken(announced(third))[0].tensors(), weights(3))
    del held, part
    gc.collect()
    fourth, fifth = publish(4), publish(5)
    assert [memory.fd for memory in fifth] == [memory.fd for memory in third], "nobody has a tensor of it any more"
    assert equal(taken(announced(fourth))[0].tensors(), weights(4))
    assert equal(taken(announced(fifth))[0].tensors(), weights(5))


def test_mappings_are_kept_for_the_next_versions_and_never_of_what_was_damaged(ranks: list[SegmentPair]) -> None:
    mappings = Mappings()

    def publish(seed: int) -> list[Mapped]:
        return [write_mapped(pair, rank, weights(seed)) for rank, pair in enumerate(ranks)]

    def places(memories: list[Mapped], seed: int) -> set[int]:
        one, problem = taken(announced(memories), mappings)
        assert problem is None and equal(one.tensors(), weights(seed))
        return {flat.data_ptr() for flat in one.tensors()._flats}

    first, second = (places(publish(seed), seed) for seed in (1, 2))
    before = dict(mappings._kept)
    assert len(before) == 4 and places(publish(3), 3) == first != second
    assert mappings._kept.keys() == before.keys()
    assert all(mappings._kept[place] is before[place] for place in before), "they were not mapped anew"
    del before
    held, _ = taken(announced(publish(4)), mappings)
    for view in views(held):
        view.fill_(0)  # in this process alone
    del held, view
    gc.collect()
    publish(5)
    sixth = publish(6)
    assert "is damaged" in taken(announced(sixth), mappings)[1]
    places(sixth, 6)
    others = two_pairs(weights(0))
    for seed in (7, 8, 9):
        places([write_mapped(pair, rank, weights(seed)) for rank, pair in enumerate(others)], seed)
    theirs = {os.fstat(segment.fd).st_ino for pair in others for segment in pair._segments}
    assert {inode for _, inode in mappings._kept} == theirs, "of the new ranks alone"
    for pair in others:
        pair.close()


def test_a_receiver_cannot_change_what_others_read(ranks: list[SegmentPair]) -> None:
    memories = [write_mapped(pair, rank, weights(5)) for rank, pair in enumerate(ranks)]
    careless, _ = taken(announced(memories))
    for view in views(careless):
        view.fill_(0)
    other, problem = taken(announced(memories))
    assert problem is None and equal(other.tensors(), weights(5))


def test_an_older_version_and_one_that_is_being_written_are_refused(ranks: list[SegmentPair]) -> None:
    old = [write_mapped(pair, rank, weights(1)) for rank, pair in enumerate(ranks)]
    for seed in (2, 3):
        for rank, pair in enumerate(ranks):
            write_mapped(pair, rank, weights(seed))
    assert "rank 0" in taken(announced(old))[1] and "is not the announced one" in taken(announced(old))[1]
    current = [write_mapped(pair, rank, weights(4)) for rank, pair in enumerate(ranks)]
    for pair in ranks:
        pair.begin()
        pair.show(b"")
    for pair in ranks:
        pair.begin()
    assert "does not have this version any more" in taken(announced(current))[1]


def test_damage_and_strange_memory_are_named(ranks: list[SegmentPair]) -> None:
    memories = [write_mapped(pair, rank, weights(5)) for rank, pair in enumerate(ranks)]
    ranks[1]._segments[-1].flat[3] ^= 1
    assert "trainer rank 1: bucket 0 is damaged" in taken(announced(memories))[1]
    ranks[1]._segments[-1].flat[3] ^= 1
    assert taken(announced(memories))[1] is None
    with open("/proc/self/status") as other:
        strange = msgspec.structs.replace(memories[0], fd=other.fileno())
        assert "is not memory of weights" in taken(announced([strange, memories[1]]))[1]
    assert "has newer versions by now" in taken(announced([msgspec.structs.replace(memories[0], fd=10**6)]))[1]
    assert "do not make it whole once" in taken(announced(memories[:1]))[1]


def test_another_machine_is_refused_by_the_receiver_and_told_to_the_publisher() -> None:
    with pytest.raises(ValueError, match=r"memory of another machine.*use distributed"):
        taken(msgspec.structs.replace(announced([]), machine="another"))

    class Elsewhere(MappedWeights):
        def announcement(self, epoch: str) -> AnnounceMapped:
            return msgspec.structs.replace(super().announcement(epoch), machine="another")

    async def main() -> None:
        address, sink = free_address(), RecordingSink()
        with publisher(address, PATIENT) as sender:
            async with receiving(address, sink, config=PATIENT) as receiver:
                await connected(sender, 1)
                sender.publish_elsewhere(Elsewhere(1, []))
                result = await asyncio.to_thread(sender.wait)
                assert result.engines == [] and "another machine" in result.quarantined["rollout-0"]
                assert receiver.version is None and sink.log == []

    asyncio.run(main())


def test_too_little_memory_is_said_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()
    monkeypatch.setattr(mapped.psutil, "virtual_memory", lambda: free._replace(available=1000))
    assert room_for([200, 300]) is None
    assert "0.00 GB" in room_for([200, 301]) and "use weights.transport = disk" in room_for([200, 301])


def test_memory_that_cannot_be_had_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(mapped.os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            Segment(4096)
    assert len(os.listdir("/proc/self/fd")) == before
    assert Segment(0).flat.shape == (0,)


def _both_ranks(memories: "multiprocessing.Queue[list[Mapped]]") -> None:
    ranks = two_pairs(weights(0))
    memories.put([write_mapped(pair, rank, weights(8)) for rank, pair in enumerate(ranks)])
    signal.pause()


def test_a_trainer_that_was_killed_leaves_the_engine_its_version_and_gives_no_other() -> None:
    """The version lives on where it is used; the trainer's next life publishes an older one first."""

    async def main() -> None:
        queue, address, sink = _spawn.Queue(), free_address(), RecordingSink()
        process = _spawn.Process(target=_both_ranks, args=(queue,))
        process.start()
        memories = await asyncio.to_thread(queue.get, True, 120)
        async with receiving(address, sink, config=PATIENT) as receiver:
            with publisher(address, PATIENT) as sender:
                await connected(sender, 1)
                assert (await publish(sender, 8, memories)).engines == ["rollout-0"]
                os.kill(process.pid, signal.SIGKILL)
                process.join(60)
                assert equal(receiver.latest()[1], weights(8))
                result = await publish(sender, 9, memories)
                assert result.engines == [] and "of trainer rank" in result.quarantined["rollout-0"]
                assert receiver.version == 8 and sink.version == 8
            ranks = two_pairs(weights(0))
            with publisher(address, PATIENT) as sender:
                await connected(sender, 1)
                older = [write_mapped(pair, rank, weights(5)) for rank, pair in enumerate(ranks)]
                assert (await publish(sender, 5, older)).engines == ["rollout-0"]
            assert equal(sink.current, weights(5)) and equal(receiver.latest()[1], weights(5))
            for pair in ranks:
                pair.close()

    async def publish(sender: WeightPublisher, version: int, memories: list[Mapped]):
        sender.publish_elsewhere(MappedWeights(version, memories))
        return await asyncio.to_thread(sender.wait)

    asyncio.run(main())


def test_the_machine_has_one_name() -> None:
    assert len(this_machine()) == 36 and this_machine() == this_machine()


def test_a_comparison_that_takes_too_long_is_given_up(
    ranks: list[SegmentPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = [write_mapped(pair, rank, weights(5)) for rank, pair in enumerate(ranks)]
    goes_on = threading.Event()
    monkeypatch.setattr(mapped, "SMALL_BYTES", 0)
    monkeypatch.setattr(shared, "bucket_sum", lambda bucket: goes_on.wait(60) and 0)

    async def main() -> None:
        intake = Intake()
        assert "took more than 0.1 s" in await MappedDownload(announced(memories), Mappings(), intake.threads).verify(
            0.1
        )
        goes_on.set()
        intake.close()

    asyncio.run(main())
