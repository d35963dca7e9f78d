"""Versions in a shared directory: what may be seen, what is refused, what is kept; and processes that die meanwhile."""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from safetensors.torch import load_file
from weight_world import (
    BUCKET,
    FAST,
    Disk,
    RecordingSink,
    connected,
    equal,
    free_address,
    opened,
    publisher,
    receiving,
    until,
    weights,
    write_version,
)

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.rollout.engines.sglang_weights import WeightStaging
from megasao.rollout.evaluation import EvaluationGate
from megasao.storage.header import TensorInfo
from megasao.transport.codec import encode
from megasao.weights import directory
from megasao.weights.directory import WeightDirectory
from megasao.weights.messages import Hello
from megasao.weights.publisher import WeightPublisher
from megasao.weights.receiver import _Pauses
from megasao.weights.shares import spread
from tests.engines.engine_checkpoints import load_tensors, make_checkpoint, moe_config


def flip_a_bit(file: Path, place: int = -1) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 4
    file.write_bytes(raw)


def test_a_version_is_read_as_it_was_written(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    found = opened(write_version(disk.root, 3, "life", weights(1)))
    assert equal(found, weights(1)) and not equal(found, weights(2))
    assert len(found.files) > 2, "shards are cut"
    whole = {name: tensor for file in found.files for name, tensor in load_file(file).items()}
    assert equal(whole, weights(1)), "any reader of safetensors can read it"
    with pytest.raises(KeyError):
        found["nothing"]


def test_a_version_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    write_version(disk.root, 1, "life", weights(1))
    unfinished = directory.unfinished_path(disk.root, 2, "life")
    unfinished.mkdir()
    directory.write_share(unfinished, 0, [], [], shard_bytes=BUCKET)
    with pytest.raises(FileNotFoundError):
        directory.complete(disk.root, 2, "life", 2, ["embed"])
    assert [path.name for path in disk.root.iterdir() if not path.name.startswith(".")] == ["000001-life"]
    directory.prepare_root(disk.root)
    assert [path.name for path in disk.root.iterdir()] == ["000001-life"]


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_shares_that_are_not_the_model_are_refused(names: list[str], tmp_path: Path) -> None:
    unfinished = directory.unfinished_path(tmp_path, 1, "life")
    unfinished.mkdir()
    infos = [TensorInfo(name, torch.float32, (1,)) for name in ("a", "b")]
    rows = [(info.name, 0, torch.zeros(1)) for info in infos]
    directory.write_share(unfinished, 0, infos, rows, shard_bytes=BUCKET)
    with pytest.raises(ValueError, match="not those of the model"):
        directory.complete(tmp_path, 1, "life", 1, names)


def test_every_damage_is_found_and_named(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    published = write_version(disk.root, 1, "life", weights(1))
    found = opened(published)
    for place in (0, 20, -1):
        flip_a_bit(found.files[1], place)
        with pytest.raises(ValueError, match=rf"{found.files[1].name} is damaged: its CRC-32"):
            found.verify(threading.Event())
        flip_a_bit(found.files[1], place)
    found.verify(threading.Event())
    os.truncate(found.files[0], found.files[0].stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"{found.files[0].name} is damaged: it has \d+ bytes, expected"):
        found.verify(threading.Event())
    found.files[0].unlink()
    with pytest.raises(ValueError, match=rf"{found.files[0].name} cannot be read"):
        found.verify(threading.Event())
    flip_a_bit(published.path / directory.MANIFEST)
    with pytest.raises(ValueError, match="not the announced one"):
        opened(published)


def test_a_share_that_cannot_be_written_still_takes_part_to_the_end(tmp_path: Path) -> None:
    """Other ranks wait in the collectives of the rows."""
    taken = []

    def rows() -> Iterator[tuple[str, int, torch.Tensor]]:
        for index in range(4):
            taken.append(index)
            yield "a", 4 * index, torch.zeros(1)

    with pytest.raises(OSError):
        directory.write_share(
            tmp_path / "absent", 0, [TensorInfo("a", torch.float32, (4,))], rows(), shard_bytes=BUCKET
        )
    assert taken == [0, 1, 2, 3]


def test_a_damaged_shard_reaches_no_engine_and_the_next_version_heals(tmp_path: Path) -> None:
    async def main() -> None:
        address, sinks, disk = free_address(), [RecordingSink(), RecordingSink()], Disk(tmp_path / "published")
        with publisher(address) as sender:
            async with (
                receiving(address, sinks[0], name="a") as receiver,
                receiving(address, sinks[1], name="b"),
            ):
                await connected(sender, 2)
                await asyncio.to_thread(disk.send, sender, 1, weights(1))
                await asyncio.to_thread(sender.wait)
                damaged = write_version(disk.root, 2, sender.epoch, weights(2))
                flip_a_bit(next(damaged.path.glob("*.safetensors")))
                await asyncio.to_thread(sender.publish_elsewhere, damaged)
                result = await asyncio.to_thread(sender.wait)
                assert result.engines == [] and sorted(result.quarantined) == ["a", "b"]
                assert "is damaged: its CRC-32 does not match" in result.quarantined["a"]
                assert all(equal(sink.current, weights(1)) for sink in sinks) and receiver.version == 1
                assert receiver.quarantined is not None
                await asyncio.to_thread(disk.send, sender, 3, weights(3))
                assert (await asyncio.to_thread(sender.wait)).engines == ["a", "b"]
                assert all(equal(sink.current, weights(3)) for sink in sinks) and receiver.quarantined is None

    asyncio.run(main())


def test_a_directory_that_goes_while_it_is_read_does_not_end_the_receiver(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "published")

    class TooLate(RecordingSink):
        async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
            if version == 1:
                directory.prune(disk.root, [])
            await super().prepare_weights(version, tensors)

    async def main() -> None:
        address, sink = free_address(), TooLate()
        with publisher(address) as sender:
            async with receiving(address, sink) as receiver:
                await connected(sender, 1)
                await asyncio.to_thread(disk.send, sender, 1, weights(1))
                result = await asyncio.to_thread(sender.wait)
                assert "No such file" in result.quarantined["rollout-0"] and sink.current is None
                await asyncio.to_thread(disk.send, sender, 2, weights(2))
                await receiver.wait_for_version(2, 60)
                assert equal(sink.current, weights(2))

    asyncio.run(main())


def test_attempts_at_a_bad_version_become_rare() -> None:
    pauses = _Pauses(0.5)
    for _ in range(20):
        pauses.failed(("life", 1))
    assert pauses.holds(("life", 1)) and pauses._until - time.monotonic() > 50
    assert not pauses.holds(("life", 2)), "another version is tried at once"
    pauses.failed(("life", 2))
    assert pauses._until - time.monotonic() <= 0.5


def test_versions_go_when_nobody_may_need_them(tmp_path: Path) -> None:
    async def main() -> None:
        address, disk = free_address(), Disk(tmp_path / "published")
        config = FAST.model_copy(update={"weights_timeout_s": 1.0})

        async def send(sender: WeightPublisher, version: int) -> None:
            await asyncio.to_thread(disk.send, sender, version, weights(version))
            await asyncio.to_thread(sender.wait)

        with publisher(address, config) as sender, zmq.Context() as context:
            async with receiving(address, RecordingSink(), name="live"):
                await connected(sender, 1)
                for version in range(1, 4):
                    await send(sender, version)
                assert disk.versions() == ["000002", "000003"]
                stuck = context.socket(zmq.DEALER)
                stuck.setsockopt(zmq.IDENTITY, b"stuck")
                stuck.connect(address)
                stuck.send_multipart(encode(Hello(sender.epoch, 3, None)))
                await connected(sender, 2)
                for version in range(4, 7):
                    await send(sender, version)
                assert disk.versions() == ["000003", "000005", "000006"]
                sender._dead_after_s = 1.5
                await connected(sender, 1)
                await send(sender, 7)
                assert disk.versions() == ["000006", "000007"]
                stuck.close(linger=0)

    asyncio.run(main())


def test_engines_keep_what_they_may_load_again(tmp_path: Path) -> None:
    """A server that restarts long after the version was replaced still finds the committed weights."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", moe_config())
    tensors, disk = load_tensors(checkpoint), Disk(tmp_path / "published")
    staging = WeightStaging(tmp_path / "staging", checkpoint)
    published = write_version(disk.root, 1, "life", tensors)
    staging.commit(staging.stage(1, opened(published)))
    directory.prune(disk.root, [])
    assert disk.versions() == [] and staging.committed is not None
    files = sorted(staging.committed.path.glob("*.safetensors"))
    assert equal({name: t for file in files for name, t in load_file(file).items()}, tensors)
    assert (staging.committed.path / "model.safetensors.index.json").is_file()
    before = staging.committed.path
    staging.commit(staging.stage(2, opened(write_version(disk.root, 2, "life", tensors))))
    assert not before.exists()
    with pytest.raises(ValueError, match="1 tensors missing"):
        staging.stage(3, opened(write_version(disk.root, 3, "life", dict(list(tensors.items())[1:]))))


def test_an_evaluation_takes_the_next_version_if_its_own_is_gone(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    versions = [opened(write_version(disk.root, version, "life", weights(version))) for version in (1, 2)]
    directory.prune(disk.root, [("life", 2)])

    class Source:
        """Moves on to the next version between two questions."""

        quarantined, version = None, 2

        def __init__(self, *answers: int) -> None:
            self.answers = list(answers)

        def latest(self) -> tuple[int, WeightDirectory]:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return answer, versions[answer - 1]

        async def wait_for_version(self, version: int, timeout: float) -> int:
            return 2

    async def main(source: Source) -> RecordingSink:
        sink: Any = RecordingSink()
        sink.weight_version = 2
        async with EvaluationGate(source, sink, timeout_s=5.0).admit("step-000001/greedy", 1):
            return sink

    sink = asyncio.run(main(Source(1, 2)))
    assert sink.version == 2 and equal(sink.current, weights(2))
    with pytest.raises(FileNotFoundError):
        asyncio.run(main(Source(1)))


def test_what_cannot_be_linked_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", moe_config())
    published = write_version(Disk(tmp_path / "published").root, 1, "life", load_tensors(checkpoint))
    staging, found = WeightStaging(tmp_path / "staging", checkpoint), opened(published)
    (published.path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="file system of the run directory"):
        staging.stage(1, found)
    assert list((tmp_path / "staging").iterdir()) == [] and staging.staged is None


def _write_and_hang(root: str, mark: str) -> None:
    """A trainer that dies in the middle of a shard."""
    unfinished = directory.unfinished_path(Path(root), 8, "first")
    unfinished.mkdir()

    def rows() -> Iterator[tuple[str, int, torch.Tensor]]:
        yield "embed", 0, torch.zeros(8, 16)
        Path(mark).touch()
        time.sleep(600)

    directory.write_share(unfinished, 0, [TensorInfo("embed", torch.float32, (32, 16))], rows(), shard_bytes=BUCKET)


def test_a_trainer_killed_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    """SIGKILL; nothing of the version was seen, and the next life publishes what it has loaded."""

    async def main() -> None:
        address, sink, disk, mark = free_address(), RecordingSink(), Disk(tmp_path / "published"), tmp_path / "mark"
        async with receiving(address, sink) as receiver:
            with publisher(address) as sender:
                await asyncio.to_thread(disk.send, sender, 7, weights(7))
                await receiver.wait_for_version(7, 60)
            process = multiprocessing.get_context("spawn").Process(
                target=_write_and_hang, args=(str(disk.root), str(mark))
            )
            process.start()
            await until(mark.exists, "half a shard", 60)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
            assert disk.versions() == [".000008", "000007"]
            assert sink.log == [("prepare", 7), ("commit", 7)]
            again = Disk(disk.root)
            assert again.versions() == ["000007"], "what was not finished is removed, and nothing else"
            with publisher(address) as sender:
                await asyncio.to_thread(again.send, sender, 5, weights(5))
                await until(lambda: receiver.version == 5, "version 5 of the second life")
                assert equal(sink.current, weights(5)) and again.versions() == ["000005", "000007"]

    asyncio.run(main())


def test_work_is_spread_evenly_and_everywhere_alike() -> None:
    sizes = [7, 7, 1, 30, 2, 2, 2, 9, 0]
    for writers in (1, 2, 5, 20):
        chosen = spread(sizes, writers)
        loads = [sum(s for s, w in zip(sizes, chosen, strict=True) if w == writer) for writer in range(writers)]
        assert sum(loads) == sum(sizes) and max(loads) <= sum(sizes) / writers + max(sizes)
    assert spread(sizes, 2) == spread(list(sizes), 2)
    assert sorted(set(spread([5] * 8, 4))) == [0, 1, 2, 3]


def test_an_old_reader_refuses_another_format(tmp_path: Path) -> None:
    published = write_version(Disk(tmp_path).root, 1, "life", weights(1))
    file = published.path / directory.MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": "other"}))
    with pytest.raises(ValueError, match="format 'other' is not supported"):
        WeightDirectory(published.path, zlib.crc32(file.read_bytes()))


def test_the_writer_takes_pieces_in_any_order(tmp_path: Path) -> None:
    whole = weights(4)["embed"]
    rows = [("embed", 64 * start, whole[start : start + 8]) for start in (16, 0, 24, 8)]
    directory.write_share(tmp_path, 0, [TensorInfo("embed", whole.dtype, (32, 16))], rows, shard_bytes=BUCKET)
    assert torch.equal(load_file(tmp_path / "rank-00000-00000.safetensors")["embed"], whole)
    with pytest.raises(AssertionError, match="not complete"):
        directory.write_share(tmp_path, 0, [TensorInfo("embed", whole.dtype, (32, 16))], rows[1:], shard_bytes=BUCKET)


def test_files_that_are_no_versions_do_no_harm(tmp_path: Path) -> None:
    """A network file system leaves such names where something is still open."""
    disk = Disk(tmp_path)
    write_version(disk.root, 1, "life", weights(1))
    for name in (".nfs0001", "note"):
        (disk.root / name).write_text("x", encoding="utf-8")
    directory.prune(disk.root, [])
    directory.prepare_root(disk.root)
    assert sorted(path.name for path in disk.root.iterdir()) == [".nfs0001", "note"]


def test_runs_of_one_name_do_not_share_versions(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "one"},
            "model": {"path": "none"},
            "actor": {"optimizer": {"lr": 1e-4}},
            "critic": {"optimizer": {"lr": 1e-4}},
            "loop": {"steps": 100},
            "weights": {"transport": "disk", "directory": str(tmp_path / "shared")},
        }
    )
    places = {RunDirectory(tmp_path / name / "one").published(config) for name in ("a", "b")}
    assert len(places) == 2 and all(place.parent == tmp_path / "shared" for place in places)
