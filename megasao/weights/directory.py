"""A version of the weights as a directory that trainer and workers see: safetensors shards, an index, a manifest.

    DIRECTORY/000007-3f9a1c.../rank-00000-00000.safetensors ...   every rank's share, cut into files of bounded size
                              model.safetensors.index.json        which file has which tensor
                              manifest.json                       bytes and CRC-32 of each file

Invariants, asserted by the tests:
- a version has its name only when every rank has written its share: it grows under a hidden name and is renamed;
- a file that is not what its writer wrote is refused by name, before any engine is given the directory;
- a version goes only when it is not current, and no live receiver runs or loads it; engines that may load it again hold
  hard links of their own.
"""

import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megasao.storage.atomic import sync
from megasao.storage.header import TensorInfo
from megasao.storage.hf_directory import INDEX, index_of
from megasao.storage.model_parts import write_json
from megasao.storage.reader import TensorFiles
from megasao.storage.writer import TensorFileWriter, checksum
from megasao.weights.messages import AnnounceDirectory

logger = logging.getLogger(__name__)

FORMAT = "megasao-weights-1"
MANIFEST = "manifest.json"
MOST_READERS = 16
"""Threads that read files for their checksums; a CRC-32 is about 1 GB/s on a core."""


@dataclass(frozen=True)
class PublishedWeights:
    """A complete version, as the publisher announces it."""

    version: int
    path: Path
    total_bytes: int
    manifest_crc32: int

    def announcement(self, epoch: str) -> AnnounceDirectory:
        """What receivers are told of it."""
        return AnnounceDirectory(epoch, self.version, str(self.path), self.total_bytes, self.manifest_crc32)


# the trainer's side


def version_name(version: int, epoch: str) -> str:
    """Name of a version's directory in one life of the publisher."""
    return f"{version:06d}-{epoch}"


def unfinished_path(root: Path, version: int, epoch: str) -> Path:
    """Where a version is while it grows."""
    return root / f".{version_name(version, epoch)}"


def prepare_root(root: Path) -> None:
    """Make the directory of versions, and remove what was not finished in an earlier life of the trainer."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".*"):
        _remove(left)


def prune(root: Path, needed: Collection[tuple[str, int]]) -> None:
    """Remove the versions that are not in ``needed``, pairs of epoch and version."""
    keep = {version_name(version, epoch) for epoch, version in needed}
    for path in root.iterdir():
        if path.is_dir() and path.name not in keep:
            # Renamed first: what is half removed must not look like a version.
            _remove(path if path.name.startswith(".") else path.rename(path.with_name(f".old-{path.name}")))


def _remove(directory: Path) -> None:
    """Remove a directory; what is still open on another node stays, and goes with a later version."""
    if not directory.is_dir():
        return
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning("%s is left for later: %s", directory, error)


def write_share(
    directory: Path,
    rank: int,
    infos: Sequence[TensorInfo],
    rows: Iterable[tuple[str, int, Tensor]],
    *,
    shard_bytes: int,
) -> None:
    """Write one rank's share: ``rows`` are (tensor, place in it in bytes, numbers) of the announced tensors.

    ``rows`` is iterated to its end even if the disk fails, which is an OSError afterwards: other ranks take part in it.
    """
    shards = cut(infos, shard_bytes)
    names = [f"rank-{rank:05d}-{number:05d}.safetensors" for number in range(len(shards))]
    rows = iter(rows)
    try:
        with ExitStack() as stack:
            writers = [
                stack.enter_context(TensorFileWriter(directory / name, shard))
                for name, shard in zip(names, shards, strict=True)
            ]
            writer_of = {info.name: w for w, shard in zip(writers, shards, strict=True) for info in shard}
            for name, offset, data in rows:
                writer_of[name].write_at(name, offset, data.cpu())
                del data  # before the next bucket is made
            with _threads(len(writers)) as pool:
                files = list(pool.map(partial(_sealed, directory), names, shards, writers))
        write_json(_share_file(directory, rank), {"files": files})
    finally:
        for _ in rows:
            pass


def _sealed(directory: Path, name: str, shard: Sequence[TensorInfo], writer: TensorFileWriter) -> dict[str, Any]:
    """Bring a written shard to the disk, and read it back for its checksum."""
    writer.finish()
    file = directory / name
    sums = {"bytes": file.stat().st_size, "crc32": checksum(file)}
    return {"name": name, **sums, "tensors": [info.name for info in shard]}


def _threads(files: int) -> ThreadPoolExecutor:
    workers = max(1, min(files, os.cpu_count() or 1, MOST_READERS))
    return ThreadPoolExecutor(workers, thread_name_prefix="weights")


def cut(infos: Sequence[TensorInfo], shard_bytes: int) -> list[list[TensorInfo]]:
    """Tensors in groups of at most ``shard_bytes``, or of a single tensor."""
    shards: list[list[TensorInfo]] = []
    filled = 0
    for info in infos:
        if not shards or filled + info.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += info.nbytes
    return shards


def collect_shares(directory: Path, ranks: int, names: Collection[str]) -> list[dict[str, Any]]:
    """The files of all ranks' shares: ``name``, ``bytes``, ``crc32`` and ``tensors`` of each.

    Once every rank has written its share. ValueError if they do not have the tensors ``names``, each once.
    """
    files: list[dict[str, Any]] = []
    for rank in range(ranks):
        share = _share_file(directory, rank)
        files += json.loads(share.read_text(encoding="utf-8"))["files"]
        share.unlink()
    found = [name for file in files for name in file["tensors"]]
    if sorted(found) != sorted(names):
        wrong = sorted(set(found) ^ set(names)) or "a tensor was written twice"
        raise ValueError(f"weights in {directory} are not those of the model: {wrong[:4]}")
    return files


def complete(root: Path, version: int, epoch: str, ranks: int, names: Collection[str]) -> PublishedWeights:
    """Give the version its name, once every rank has written its share. ValueError if the shares are not ``names``."""
    unfinished = unfinished_path(root, version, epoch)
    files = collect_shares(unfinished, ranks, names)
    places = {name: file["name"] for file in files for name in file["tensors"]}
    total = sum(file["bytes"] for file in files)
    write_json(unfinished / INDEX, index_of(places, total))
    sums = [{key: file[key] for key in ("name", "bytes", "crc32")} for file in files]
    write_json(unfinished / MANIFEST, {"format": FORMAT, "version": version, "epoch": epoch, "files": sums})
    crc = checksum(unfinished / MANIFEST)
    sync(unfinished)
    final = root / version_name(version, epoch)
    os.rename(unfinished, final)
    sync(root)
    return PublishedWeights(version, final.resolve(), total, crc)


def _share_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


# the workers' side


class WeightDirectory(Mapping[str, Tensor]):
    """The tensors of a published version, each read when it is asked for."""

    def __init__(self, path: Path, manifest_crc32: int) -> None:
        """ValueError if it is not there, or its manifest is not the one that was announced."""
        self.path = path
        try:
            raw = (path / MANIFEST).read_bytes()
        except OSError as error:
            raise ValueError(f"{path} is no published version of the weights: {error}") from None
        if zlib.crc32(raw) != manifest_crc32:
            raise ValueError(f"{path / MANIFEST} is damaged: its CRC-32 is not the announced one")
        manifest = json.loads(raw)
        if manifest["format"] != FORMAT:
            raise ValueError(f"{path / MANIFEST}: format {manifest['format']!r} is not supported; expected {FORMAT!r}")
        self._sums: list[dict[str, Any]] = manifest["files"]
        self._files: TensorFiles | None = None

    @property
    def files(self) -> list[Path]:
        """Its shards."""
        return [self.path / file["name"] for file in self._sums]

    def verify(self, stopped: threading.Event) -> None:
        """Compare every shard with its checksum. ValueError names a damaged one; returns early when ``stopped``."""
        with _threads(len(self._sums)) as pool:
            for reason in pool.map(lambda sums: self._damage(sums, stopped), self._sums):
                if reason is not None:
                    stopped.set()
                    raise ValueError(reason)
        self._files = TensorFiles(self.files)

    def _damage(self, sums: Mapping[str, Any], stopped: threading.Event) -> str | None:
        """What is wrong with one shard."""
        file = self.path / sums["name"]
        try:
            if file.stat().st_size != sums["bytes"]:
                return f"{file} is damaged: it has {file.stat().st_size} bytes, expected {sums['bytes']}"
            if checksum(file, _unless(stopped)) != sums["crc32"]:
                return f"{file} is damaged: its CRC-32 does not match"
        except OSError as error:
            return f"{file} cannot be read: {error}"
        except _Stopped:
            return None
        return None

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Dtype and shape of every tensor. Once verified."""
        return {info.name: info for info in self._verified.infos()}

    @property
    def _verified(self) -> TensorFiles:
        assert self._files is not None, "verify() comes first"
        return self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._verified.names():
            raise KeyError(name)
        return self._verified.read_whole(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._verified.names())

    def __len__(self) -> int:
        return len(self._verified.names())

    def link_into(self, directory: Path) -> None:
        """Hard links to its shards and index in ``directory``, which then outlive the version. ValueError if it cannot.

        A link costs nothing, and the bytes are kept as long as someone has one.
        """
        try:
            for file in [*self.files, self.path / INDEX]:
                os.link(file, directory / file.name)
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be linked into {directory}: {error}; weights.directory must be on the file system "
                "of the run directory, and that must have hard links; else use weights.transport = stream"
            ) from None


def _unless(stopped: threading.Event) -> Callable[[int], None]:
    """Told of bytes as they are read; ends the reading once ``stopped``."""

    def check(_: int) -> None:
        if stopped.is_set():
            raise _Stopped

    return check


class _Stopped(Exception):
    """Nobody waits for the checksum any more."""
