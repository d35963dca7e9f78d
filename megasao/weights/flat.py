"""A set of named tensors as one flat byte buffer and a manifest: what travels, and never pickle.

Invariants, asserted by the tests:
- ``unpack(pack(tensors))`` gives the same names, dtypes, shapes and bits;
- a manifest that does not describe its buffer exactly is refused before any tensor is made from it.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megasao.weights.messages import Announce, TensorSpec

_ALIGNMENT = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
}
"""What travels."""


@dataclass(frozen=True)
class FlatWeights:
    """One version of the weights. ``buffer``: uint8 [total bytes], on the CPU."""

    version: int
    specs: list[TensorSpec]
    buffer: torch.Tensor
    bucket_bytes: int

    @property
    def total_bytes(self) -> int:
        """Length of the buffer."""
        return len(self.buffer)

    def announcement(self, epoch: str) -> Announce:
        """What receivers are told of it."""
        return Announce(epoch, self.version, self.specs, self.total_bytes, self.bucket_bytes)

    @property
    def buckets(self) -> int:
        """How many buckets it travels in."""
        return bucket_count(len(self.buffer), self.bucket_bytes)

    def bucket(self, index: int) -> memoryview:
        """The bytes of one bucket, without a copy."""
        start = index * self.bucket_bytes
        return self.buffer[start : start + self.bucket_bytes].numpy().data

    @cached_property
    def checksums(self) -> list[int]:
        """CRC-32 of each bucket."""
        return [zlib.crc32(self.bucket(index)) for index in range(self.buckets)]


def bucket_count(total_bytes: int, bucket_bytes: int) -> int:
    """Number of buckets of a buffer."""
    return -(-total_bytes // bucket_bytes)


def pack(version: int, tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> FlatWeights:
    """Copy ``tensors`` (on any device) into one buffer. ValueError names a dtype that does not travel."""
    specs, offset = [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"weights to publish: {name} has dtype {dtype}; expected one of {sorted(DTYPES)}")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), offset))
        offset += _padded(tensor.numel() * tensor.element_size())
    buffer = torch.zeros(offset, dtype=torch.uint8)
    for (_, target), tensor in zip(_views(specs, buffer), tensors.values(), strict=True):
        target.copy_(tensor.detach())
    return FlatWeights(version, specs, buffer, bucket_bytes)


def unpack(specs: Sequence[TensorSpec], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Named views into ``buffer``, which ``check_manifest`` has accepted."""
    return dict(_views(specs, buffer))


def check_manifest(specs: Sequence[TensorSpec], total_bytes: int, bucket_bytes: int) -> None:
    """ValueError saying what is wrong with a manifest received from outside."""
    if bucket_bytes < 1:
        raise ValueError(f"manifest: bucket_bytes is {bucket_bytes}, expected at least 1")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("manifest: a tensor name appears twice")
    offset = 0
    for spec in specs:
        if spec.dtype not in DTYPES:
            raise ValueError(f"manifest: {spec.name} has dtype {spec.dtype!r}, expected one of {sorted(DTYPES)}")
        if any(size < 0 for size in spec.shape):
            raise ValueError(f"manifest: {spec.name} has a negative size in {spec.shape}")
        if spec.offset != offset:
            raise ValueError(f"manifest: {spec.name} starts at byte {spec.offset}, expected {offset}")
        offset += _padded(_bytes(spec))
    if offset != total_bytes:
        raise ValueError(f"manifest: tensors fill {offset} bytes, but {total_bytes} are announced")


def _views(specs: Sequence[TensorSpec], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in specs:
        piece = buffer[spec.offset : spec.offset + _bytes(spec)]
        yield spec.name, piece.view(DTYPES[spec.dtype]).view(spec.shape)


def _bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
