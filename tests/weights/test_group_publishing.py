"""Weights from four trainer ranks (TP2, PP2) through process groups of gloo, to two receivers and a slow one."""

import asyncio
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from weight_world import RecordingSink, equal, free_address, receiving, until

from megasao.weights.groups import Group, finish
from megasao.weights.intake import Intake
from megasao.weights.receiver import WeightReceiver
from megasao.weights.shared import bucket_sum
from megasao.weights.shares_download import GroupsFetching, SharesDownload
from tests.conversion.support import write_family
from tests.megatron.world import run_world
from tests.weights.share_cases import VERSIONS

pytestmark = pytest.mark.world

HELD = 4
"""The first bucket that the slow one does not take."""
PARALLEL = {"ranks": 4, "tensor": 2, "pipeline": 2}


class _Slow:
    """A receiver that takes some buckets of the first version that ``receiver`` is told of, and the next ones only when
    it is ``released``."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self.released = threading.Event()
        self.names: set[str] = set()
        self.expected: dict[tuple[str, int, int], int] = {}
        self.found: dict[tuple[str, int, int], int] = {}
        self.problem: str | None = None
        self._joined = threading.Barrier(PARALLEL["pipeline"] + 1)
        self.thread: threading.Thread | None = None
        self._begin, receiver._begin = receiver._begin, self._follow
        self._receive, self._lanes = Group.receive, GroupsFetching._lanes

    def _follow(self, announce):
        if self.thread is None:
            self.thread = threading.Thread(target=self._fetch, args=(SharesDownload(announce, Intake("slow")),))
            self.thread.start()
            self._joined.wait(60)
        return self._begin(announce)

    def _fetch(self, download: SharesDownload) -> None:
        self.problem = asyncio.run(download.verify(120))

    def receive(self, group: Group, place: torch.Tensor, member: int, tag: int):
        """In place of the one of each group."""
        self.names.add(group.name)
        if "/slow." not in group.name or tag < HELD:
            return self._receive(group, place, member, tag)
        if not self.released.is_set():
            self._joined.wait(60)
            assert self.released.wait(120)
        work = self._receive(group, place, member, tag)
        finish(work, 60)
        self.found[group.name.split("/")[2], member, tag] = bucket_sum(place.numpy())
        return work

    def lanes(self, fetching: GroupsFetching, *arguments):
        """In place of the one of each attempt."""
        lanes = self._lanes(fetching, *arguments)
        if fetching._intake._name.startswith("slow."):
            for lane in lanes:
                place = f"stage-{lane.share.stage}", lane.member
                self.expected |= {(*place, tag): found for tag, found in enumerate(lane.manifest.sums)}
        return lanes


def test_two_receivers_follow_two_stages_and_a_slow_one_finds_its_version_unchanged(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "llama", "float32")

    async def life(address: str, version: int, out: Path, **options: int) -> None:
        out.mkdir()
        payload = {"path": str(source), "parallel": PARALLEL, "address": address, "version": version, "out": str(out)}
        payload |= {"transport": "distributed", "carrier": "gloo", "receivers": 2, **options}
        first, *others = await asyncio.to_thread(run_world, 4, "tests.weights.share_cases:one_life", payload)
        assert first[0] == [["one", "two"]] * VERSIONS and all(other[0] == [] for other in others)
        last = version + VERSIONS - 1
        kept = [last] if "small_bytes" in options else [last - 1, last]
        assert all(rank[2] == kept for rank in (first, *others))

    async def main() -> None:
        address, sinks = free_address(), [RecordingSink(), RecordingSink()]
        async with receiving(address, sinks[0], name="one") as one, receiving(address, sinks[1], name="two"):
            slow = _Slow(one)
            with (
                patch.object(Group, "receive", lambda *given: slow.receive(*given)),
                patch.object(GroupsFetching, "_lanes", lambda *given: slow.lanes(*given)),
            ):
                await life(address, 4, tmp_path / "first")
                exported = load_file(tmp_path / "first" / f"{3 + VERSIONS}.safetensors")
                assert all(equal(sink.current, exported) for sink in sinks)
                before = load_file(tmp_path / "first" / f"{2 + VERSIONS}.safetensors")
                assert not equal(sinks[0].current, before), "the comparison sees the update"
                stages = sorted(name.split("/")[2] for name in slow.names)
                assert stages == ["stage-0"] * 3 + ["stage-1"] * 3, "of three receivers"
                slow.released.set()
                await asyncio.to_thread(slow.thread.join, 120)
                assert "its connection ended" in slow.problem, "its version was taken back"
                await until(lambda: len(slow.found) == 2, "buckets that had been on their way, one of each stage")
                assert slow.found.items() <= slow.expected.items()
                await life(address, 2, tmp_path / "second", small_bytes=0)
            assert len(slow.names) == 10, "each receiver has two more, of the second life"
            exported = load_file(tmp_path / "second" / f"{1 + VERSIONS}.safetensors")
            assert all(sink.version == 1 + VERSIONS and equal(sink.current, exported) for sink in sinks)

    asyncio.run(main())
