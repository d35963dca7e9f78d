"""A version of the weights in memory that the trainer's ranks share with an engine on their machine: nothing travels.

Each rank has two pieces of memory without a name (memfd), for the current version and for the next one. A receiver
opens them under the rank's process, compares every checksum in place, and gives the engine tensors that are views of
them. Who reads a piece holds a lock on it (flock), which the kernel drops with the process. Invariants, asserted by the
tests:
- memory of which a receiver has a tensor is never written: the rank takes new memory instead;
- a receiver reads the announced version, intact, or says what is wrong, and that the trainer is on another machine;
- the memory goes when the last process that has it ends, however that ends; a receiver cannot write into it.
"""

import asyncio
import fcntl
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor

from megasao.weights.messages import AnnounceMapped, Mapped
from megasao.weights.ownership import this_machine
from megasao.weights.shared import SMALL_BYTES, Lease, ShareManifest, ShareTensors, read_manifest

_NAME = "megasao-weights"
_PIECES = 2


# the trainer's side


@dataclass(frozen=True)
class MappedWeights:
    """A version that the trainer's ranks hold ready, as the publisher announces it."""

    version: int
    memories: Sequence[Mapped]

    @property
    def total_bytes(self) -> int:
        """Of all ranks."""
        return sum(memory.total_bytes for memory in self.memories)

    def announcement(self, epoch: str) -> AnnounceMapped:
        """What receivers are told of it."""
        return AnnounceMapped(epoch, self.version, this_machine(), list(self.memories))


class Segment:
    """A piece of memory that other processes may map: ``flat`` is uint8 [nbytes]."""

    def __init__(self, nbytes: int) -> None:
        """OSError if there is no room."""
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, max(nbytes, 1))
            self._mapped = mmap.mmap(self.fd, max(nbytes, 1))
        except OSError:
            os.close(self.fd)
            raise
        self.flat: Tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)[:nbytes]

    def lock(self) -> bool:
        """Have it alone, to write; False if somebody reads it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def show(self, manifest: bytes) -> None:
        """Let others read it from now on, with ``manifest`` behind its bytes."""
        os.pwrite(self.fd, manifest, len(self.flat))
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it; it is there until everyone has."""
        os.close(self.fd)


class SegmentPair:
    """A rank's memory, ``nbytes`` twice: versions lie in the one and the other in turn."""

    def __init__(self, nbytes: int) -> None:
        """OSError if there is no room."""
        self._nbytes = nbytes
        self._segments: list[Segment] = []
        for _ in range(_PIECES):
            self._segments.append(Segment(nbytes))

    def begin(self) -> Segment:
        """Where to write the next version, which nobody reads; the one before stays as it is. OSError without room."""
        oldest = self._segments[0]
        if not oldest.lock():
            fresh = Segment(self._nbytes)
            fresh.lock()
            oldest.close()
            self._segments[0] = oldest = fresh
        return oldest

    def show(self, manifest: bytes) -> int:
        """What was begun is a version now; its descriptor in this process."""
        shown = self._segments.pop(0)
        shown.show(manifest)
        self._segments.append(shown)
        return shown.fd

    def close(self) -> None:
        """Let go of both."""
        while self._segments:
            self._segments.pop().close()


def room_for(share_bytes: Sequence[int]) -> str | None:
    """Why the machine's memory does not hold the shares of all ranks twice; None if it does."""
    needed, free = _PIECES * sum(share_bytes), psutil.virtual_memory().available
    if needed <= free:
        return None
    return (
        f"weights.transport = embedded keeps two versions in shared memory, {needed / 1e9:.2f} GB, and "
        f"{free / 1e9:.2f} GB are free here; use weights.transport = disk"
    )


# the receiver's side


class Mappings:
    """What a receiver has mapped, for the versions to come: touching pages anew takes longer than reading them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], np.ndarray] = {}
        self._used: list[set[tuple[int, int]]] = []

    def open(self, memory: Mapped) -> tuple[ShareManifest, np.ndarray]:
        """A rank's manifest and its share, uint8 [total_bytes], which nobody writes as long as there is a view of it.

        ValueError or OSError if the version is not there.
        """
        path = Path(f"/proc/{memory.pid}/fd/{memory.fd}")
        try:
            found = os.readlink(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is not there: the rank has ended, or has newer versions by now") from None
        if not found.startswith(f"/memfd:{_NAME}"):
            raise ValueError(f"{path} is not memory of weights; is that process of another run?")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            manifest = _manifest(fd, memory)
            mapped = self._map(path, fd, memory.total_bytes)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise ValueError("it does not have this version any more") from None
            raise
        lease = Lease(mapped)
        weakref.finalize(lease, _let_go, fd, mapped)
        return manifest, np.asarray(lease)

    def _map(self, path: Path, locked: int, nbytes: int) -> np.ndarray:
        """As it was mapped for an earlier version, or anew, by a descriptor of its own, so that it holds no lock."""
        place = os.fstat(locked).st_dev, os.fstat(locked).st_ino
        if place not in self._kept:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Private: what is written into it by mistake stays in this process.
                mapped = mmap.mmap(fd, max(nbytes, 1), access=mmap.ACCESS_COPY)
            finally:
                os.close(fd)
            self._kept[place] = np.frombuffer(mapped, dtype=np.uint8)
        self._used[-1].add(place)
        return self._kept[place][:nbytes]

    def begin(self) -> None:
        """A version comes: let go of what neither of the two before it was in."""
        needed = set().union(*self._used)
        self._kept = {place: mapped for place, mapped in self._kept.items() if place in needed}
        self._used = [*self._used[-1:], set()]

    def clear(self) -> None:
        """Let go of everything."""
        self._kept, self._used = {}, []


def _manifest(fd: int, memory: Mapped) -> ShareManifest:
    raw = os.pread(fd, memory.manifest_bytes, memory.total_bytes)
    if zlib.crc32(raw) != memory.manifest_crc32:
        raise ValueError("its manifest is not the announced one: its CRC-32 is another")
    return read_manifest(raw, memory.total_bytes)


def _let_go(fd: int, mapped: np.ndarray) -> None:
    """The lock goes; ``mapped`` had to be there until now."""
    os.close(fd)


class MappedDownload:
    """The announced version in the memory of the trainer's ranks, of which nothing is copied."""

    complete = True
    idle_s = 0.0

    def __init__(self, announce: AnnounceMapped, mappings: Mappings, threads: ThreadPoolExecutor) -> None:
        """ValueError if it lies on another machine."""
        if announce.machine != this_machine():
            raise ValueError(
                f"weights {announce.version} lie in the memory of another machine; with weights.transport = embedded "
                "trainer and engines are on one: use distributed"
            )
        self.epoch, self.version = announce.epoch, announce.version
        self._announce, self._mappings, self._threads = announce, mappings, threads
        self._tensors: ShareTensors | None = None
        self._stopped = threading.Event()
        self.staged = False

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors, once verified; to be read only."""
        assert self._tensors is not None, "verify() comes first"
        return self._tensors

    async def verify(self, timeout_s: float) -> str | None:
        """Compare every bucket; what is wrong with one, or that it took too long."""
        small = sum(memory.total_bytes for memory in self._announce.memories) <= SMALL_BYTES
        try:
            if small:
                self._tensors = self._map(map)
            else:
                mapping = asyncio.to_thread(self._map, self._threads.map)
                self._tensors = await asyncio.wait_for(mapping, timeout_s)
        except TimeoutError:
            problem = f"comparing the checksums of weights {self.version} took more than {timeout_s:g} s"
        except (ValueError, OSError) as error:
            problem = str(error)
        else:
            return None
        self._stopped.set()
        self._mappings.clear()  # the next attempt begins with what is there
        return problem

    def _map(self, on_each: Callable[..., Iterable[None]]) -> ShareTensors:
        """``on_each``: as ``map``, here or in threads."""
        self._mappings.begin()
        found, buckets = [], []
        for memory in self._announce.memories:
            try:
                manifest, data = self._mappings.open(memory)
            except (OSError, ValueError, msgspec.DecodeError) as error:
                raise ValueError(
                    f"weights {self.version} of trainer rank {memory.rank}, process {memory.pid}: {error}"
                ) from error
            found.append((manifest, data))
            buckets += [(memory.rank, number, manifest, data) for number in range(len(manifest.sums))]

        def check(which: tuple[int, int, ShareManifest, np.ndarray]) -> None:
            rank, number, manifest, data = which
            if self._stopped.is_set():
                return
            try:
                manifest.check(data, number)
            except ValueError as error:
                raise ValueError(f"weights {self.version} of trainer rank {rank}: {error}") from None

        for _ in on_each(check, buckets):
            pass
        return ShareTensors(found)
