"""One version of the weights on its way in, in buckets or from a directory.

Invariants, asserted by the tests:
- only buckets that were asked for are stored, once, and only with the right size and checksum;
- at most ``WINDOW`` buckets are under way, so a slow receiver never has more than that in its queue.
"""

import asyncio
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from megasao.weights.directory import WeightDirectory
from megasao.weights.flat import bucket_count, check_manifest, unpack
from megasao.weights.messages import Announce, AnnounceDirectory, Bucket

WINDOW = 4
"""Buckets asked for and not yet here."""


class Download:
    """The flat buffer of the announced version while it fills."""

    def __init__(self, announce: Announce) -> None:
        """ValueError if the manifest does not describe its buffer."""
        check_manifest(announce.tensors, announce.total_bytes, announce.bucket_bytes)
        self.epoch, self.version, self.specs = announce.epoch, announce.version, announce.tensors
        self.bucket_bytes = announce.bucket_bytes
        self.buffer = torch.empty(announce.total_bytes, dtype=torch.uint8)
        self.wanted = list(reversed(range(bucket_count(announce.total_bytes, announce.bucket_bytes))))
        self.asked: set[int] = set()
        self.progress_at = time.monotonic()
        self.staged = False

    @property
    def idle_s(self) -> float:
        """Seconds since a bucket arrived."""
        return time.monotonic() - self.progress_at

    @property
    def complete(self) -> bool:
        """Whether every bucket is here."""
        return not self.wanted and not self.asked

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors, once complete."""
        return unpack(self.specs, self.buffer)

    def next_buckets(self) -> list[int]:
        """Buckets to ask for now."""
        asking = [self.wanted.pop() for _ in range(min(len(self.wanted), WINDOW - len(self.asked)))]
        self.asked.update(asking)
        return asking

    def take(self, bucket: Bucket, payload: bytes) -> None:
        """Store a bucket that was asked for. ValueError if it is damaged."""
        if bucket.bucket not in self.asked:
            return
        start = bucket.bucket * self.bucket_bytes
        place = self.buffer[start : start + self.bucket_bytes]
        if len(payload) != len(place):
            raise ValueError(f"bucket {bucket.bucket} has {len(payload)} bytes, expected {len(place)}")
        if zlib.crc32(payload) != bucket.crc32:
            raise ValueError(f"bucket {bucket.bucket} is damaged: its CRC-32 does not match")
        place.numpy()[:] = memoryview(payload)
        self.asked.discard(bucket.bucket)
        self.progress_at = time.monotonic()


class DirectoryDownload:
    """The announced version in its directory: nothing travels, its checksums are compared."""

    complete = True
    idle_s = 0.0

    def __init__(self, announce: AnnounceDirectory) -> None:
        """ValueError if there is no such version."""
        self.epoch, self.version = announce.epoch, announce.version
        self.directory = WeightDirectory(Path(announce.path), announce.manifest_crc32)
        self.staged = False

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors, once verified."""
        return self.directory

    async def verify(self, timeout_s: float) -> str | None:
        """What is wrong with a shard, or that the comparison took too long."""
        stopped = threading.Event()
        try:
            await asyncio.wait_for(asyncio.to_thread(self.directory.verify, stopped), timeout_s)
        except TimeoutError:
            return f"comparing the checksums of {self.directory.path} took more than {timeout_s:g} s"
        except (ValueError, OSError) as error:
            return str(error)
        finally:
            stopped.set()
        return None
