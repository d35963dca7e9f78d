"""Reading tensors by name over several safetensors files, whole or in slices.

Files are read with positioned reads and not mapped: a rank that needs a slice asks the file system for the slice's
bytes, and what was read is not counted as this process's memory. A file is open only while it is read, so there may be
any number of them, and any number of threads.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megasao.storage.header import Place, TensorInfo, read_header


class TensorFiles:
    """Tensors by name, read lazily. ValueError names a file that is damaged, or a tensor that two files have."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = list(files)
        self._places: dict[str, Place] = {}
        for file in self.files:
            for place in read_header(file):
                if (other := self._places.setdefault(place.info.name, place)) is not place:
                    raise ValueError(f"{place.info.name} is in two files, {other.file} and {file}; remove one of them")

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._places)

    def infos(self) -> list[TensorInfo]:
        """All tensors, file by file in the order of their bytes: the order in which reading is fastest."""
        return [place.info for place in self._places.values()]

    def info(self, name: str) -> TensorInfo:
        """One tensor's dtype and shape."""
        return self._places[name].info

    def file(self, name: str) -> Path:
        """The file that has a tensor."""
        return self._places[name].file

    def read_whole(self, name: str) -> Tensor:
        """A whole tensor."""
        return self._read(name, self.info(name).shape, [0])

    def read_slice(self, name: str, dimension: int, start: int, stop: int) -> Tensor:
        """Entries ``start`` to ``stop`` of one dimension, in a new tensor; nothing else is read."""
        shape = self.info(name).shape
        inner = math.prod(shape[dimension + 1 :])
        runs = [(outer * shape[dimension] + start) * inner for outer in range(math.prod(shape[:dimension]))]
        return self._read(name, (*shape[:dimension], stop - start, *shape[dimension + 1 :]), runs)

    def _read(self, name: str, shape: tuple[int, ...], runs: list[int]) -> Tensor:
        """A tensor from equally long runs of elements; ``runs`` says with which element of the file each begins."""
        place = self._places[name]
        tensor = torch.empty(shape, dtype=place.info.dtype)
        if not tensor.numel():
            return tensor
        target = tensor.reshape(-1).view(torch.uint8).numpy().data
        each, width = len(target) // len(runs), place.info.dtype.itemsize
        descriptor = os.open(place.file, os.O_RDONLY)
        try:
            for number, run in enumerate(runs):
                _read_fully(descriptor, target[number * each : (number + 1) * each], place.start + run * width, place)
        finally:
            os.close(descriptor)
        return tensor


def _read_fully(descriptor: int, target: memoryview, offset: int, place: Place) -> None:
    while target:
        count = os.preadv(descriptor, [target], offset)
        if not count:
            raise ValueError(f"{place.file} ended while {place.info.name} was read: it was changed meanwhile")
        target, offset = target[count:], offset + count
