"""Weights that every node of an SGLang server keeps in a directory of its own, taken from the trainer's ranks there.

    DIRECTORY/7.3f9a1c.../00000.safetensors ...    one version, under its label, at the same path on each node
    MARKER                                         labels that a node has complete, in the run directory

The rollout worker moves no bytes: it reads the markers of a server's nodes, and lets the server load the label.
Invariants, asserted by the tests:
- a label is in the marker only while its files are there, whole and checked: written after them, gone before them;
- a node keeps the committed version, and the one before until the next one comes: a load that has begun may end;
- a server is told to load only what all its nodes have, and a load under which a node let go of it does not count.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasao.config.rundir import write_atomically
from megasao.storage.header import TensorInfo
from megasao.storage.writer import TensorFileWriter
from megasao.weights.directory import cut
from megasao.weights.shared import ShareTensors

WRITERS = 16
"""Files that a node writes at once."""


class NodeWeights(Mapping[str, Tensor]):
    """What a worker hands to its engines: the label of a version, whose tensors are on the nodes."""

    def __init__(self, label: str) -> None:
        self.label = label

    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class NodeDirectory:
    """A node's versions below ``directory``; takes weights as an engine does."""

    def __init__(
        self,
        directory: Path,
        marker: Path,
        layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        file_bytes: int,
    ) -> None:
        """``layout``: shape and dtype of each tensor that the server loads. What an earlier life left is removed."""
        self._directory, self._marker, self._file_bytes = directory, marker, file_bytes
        self._infos = [TensorInfo(name, dtype, shape) for name, (shape, dtype) in layout.items()]
        self._labels: dict[int, str] = {}
        self._committed: int | None = None
        self.clear()
        directory.mkdir(parents=True)
        marker.parent.mkdir(parents=True, exist_ok=True)
        self._mark()

    def clear(self) -> None:
        """Leave nothing behind."""
        self._marker.unlink(missing_ok=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Write a version. ValueError names a tensor that is missing, extra or misshapen; OSError if it has no room."""
        assert isinstance(tensors, ShareTensors), "nodes take versions from the ranks' memory"
        await asyncio.to_thread(self._prepare, version, tensors)

    async def commit_weights(self, version: int) -> None:
        """The servers load it now."""
        self._committed = version

    async def discard_weights(self, version: int) -> None:
        """Remove a version that is not committed."""
        if version != self._committed:
            self._remove([version])

    def _prepare(self, version: int, tensors: ShareTensors) -> None:
        expected = {info.name: info.shape for info in self._infos}
        found = {name: tuple(info.shape) for name, info in tensors.infos.items()}
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        if wrong:
            raise ValueError(f"{len(wrong)} tensors are missing, extra or misshapen for the server: {wrong[:4]}")
        self._remove([held for held in self._labels if held != self._committed])
        label = tensors.label
        unfinished = self._directory / f".{label}"
        try:
            unfinished.mkdir()
            self._write(unfinished, tensors)
            os.rename(unfinished, self._directory / label)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        tensors.release()  # the files are all that is needed here
        self._labels[version] = label
        self._mark()

    def _write(self, directory: Path, tensors: ShareTensors) -> None:
        def write(number: int, infos: Sequence[TensorInfo]) -> None:
            with TensorFileWriter(directory / f"{number:05d}.safetensors", infos) as writer:
                for info in infos:
                    writer.write(info.name, tensors[info.name].to(info.dtype))

        files = cut(self._infos, self._file_bytes)
        with ThreadPoolExecutor(max(1, min(len(files), WRITERS)), thread_name_prefix="weights") as pool:
            list(pool.map(write, range(len(files)), files))

    def _remove(self, versions: Sequence[int]) -> None:
        labels = [self._labels.pop(version) for version in versions if version in self._labels]
        if labels:
            self._mark()
        for label in labels:
            shutil.rmtree(self._directory / label, ignore_errors=True)

    def _mark(self) -> None:
        write_atomically(self._marker, json.dumps(sorted(self._labels.values())))


@dataclass(frozen=True)
class ServerNodes:
    """What a worker knows of the nodes of one server: their directory, and the marker of each of them."""

    directory: Path
    markers: Sequence[Path]

    def lacking(self, label: str) -> str | None:
        """Which node does not have a version, and why; None if all have it."""
        for marker in self.markers:
            try:
                labels = json.loads(marker.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                return f"{marker.stem} has no weights: {error}"
            if label not in labels:
                return f"{marker.stem} does not have weights {label}; it has {', '.join(labels) or 'none'}"
        return None
