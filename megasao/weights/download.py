"""One version of the weights on its way in.

Invariants, asserted by the tests:
- only buckets that were asked for are stored, once, and only with the right size and checksum;
- at most ``WINDOW`` buckets are under way, so a slow receiver never has more than that in its queue.
"""

import time
import zlib

import torch

from megasao.weights.flat import bucket_count, check_manifest
from megasao.weights.messages import Announce, Bucket

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
    def complete(self) -> bool:
        """Whether every bucket is here."""
        return not self.wanted and not self.asked

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
