"""A directory of safetensors files that appears at once, made by tasks, and resumed where it was interrupted.

Everything is written into ``.NAME.partial`` beside the output. A file there has its final name once all its bytes are
on the disk; when all of them have, and the other documents too, the directory is renamed. ``plan.json`` says which
conversion of which source files it belongs to, so that only the same one goes on with it.
"""

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from megasao.config.errors import UserError
from megasao.conversion.tasks import Advance, Task
from megasao.storage.atomic import sync
from megasao.storage.header import TensorInfo
from megasao.storage.model_parts import damage, is_whole
from megasao.storage.writer import TensorFileWriter, file_bytes

_PLAN = "plan.json"
_LINE = 256
"""Bytes of the header that a tensor has at most, without its name."""
_SPARE = 64 << 20
"""Bytes for everything that is not tensors."""


@dataclass(frozen=True)
class OutputFile:
    """One safetensors file and what makes it."""

    name: str
    tasks: tuple[Task, ...]

    @property
    def infos(self) -> list[TensorInfo]:
        """Its tensors."""
        return [info for task in self.tasks for info in task.outputs]

    @cached_property
    def nbytes(self) -> int:
        """Its size."""
        return file_bytes(self.infos)

    @property
    def read_bytes(self) -> int:
        """What is read for it."""
        return sum(task.nbytes for task in self.tasks)


@dataclass(frozen=True)
class Output:
    """What a conversion makes.

    Attributes:
        path: the directory; it must not exist.
        files: its safetensors files.
        sources: files that are read; a change of one of them makes it another conversion.
        kind: which conversion it is, with everything that changes a byte of its output.
        finished_file: called when the bytes of a file are on the disk, with the place it will have and the place where
            it still is.
        documents: writes everything else into the directory that it is given.
        summed: those of the sources that have a checksum beside them, which is compared before work begins.
    """

    path: Path
    files: Sequence[OutputFile]
    sources: Sequence[Path]
    kind: str
    documents: Callable[[Path], None]
    finished_file: Callable[[Path, Path], None] | None = None
    summed: Sequence[Path] = ()

    @property
    def partial(self) -> Path:
        """Where it is while it is made."""
        return self.path.with_name(f".{self.path.name}.partial")

    def missing(self) -> list[OutputFile]:
        """Files that an earlier attempt did not finish."""
        return [file for file in self.files if not self._is_there(file)]

    def _is_there(self, file: OutputFile) -> bool:
        try:
            return (self.partial / file.name).stat().st_size == file.nbytes
        except FileNotFoundError:
            return False

    def plan(self) -> str:
        """What ``plan.json`` says."""
        stats = [(str(file.resolve()), file.stat()) for file in self.sources]
        return json.dumps(
            {
                "kind": self.kind,
                "sources": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
                "files": {file.name: file.nbytes for file in self.files},
            },
            indent=1,
        )


def check_place(path: Path) -> None:
    """UserError if nothing can be written at ``path``."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists already; remove it, or give another output directory")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.absolute().parent} is not a directory; make it, or give another output directory")


@contextmanager
def reserved(output: Output) -> Iterator[list[OutputFile]]:
    """Take the output's place, check it, and give the files that are still to be made.

    Raises:
        UserError: the place is taken, begun by another conversion, in use by another process, or too small.
    """
    check_place(output.path)
    directory, plan = output.partial, output.plan()
    if os.path.lexists(directory) and not directory.is_dir():
        raise UserError(f"{directory} is in the way of the directory that {output.path} is made in; remove it")
    if not directory.exists():
        _check_disk(output, output.files)
    directory.mkdir(exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{directory} is in use: another process is making {output.path}; wait for it") from None
        if all(file.suffix == ".tmp" for file in directory.iterdir()):
            begun = directory / f"{_PLAN}.tmp"
            begun.write_text(plan, encoding="utf-8")
            sync(begun)
            os.rename(begun, directory / _PLAN)
        elif not (directory / _PLAN).is_file() or (directory / _PLAN).read_text(encoding="utf-8") != plan:
            raise UserError(
                f"{directory} was begun by another conversion, or its source has changed since; remove it to begin anew"
            )
        for begun in directory.glob("*.tmp"):
            begun.unlink()
        missing = output.missing()
        _check_disk(output, missing)
        yield missing
    finally:
        os.close(descriptor)


def _check_disk(output: Output, missing: Sequence[OutputFile]) -> None:
    directory = output.path.absolute().parent
    needed, free = sum(file.nbytes for file in missing) + _SPARE, shutil.disk_usage(directory).free
    if needed > free:
        if len(missing) == len(output.files):
            shutil.rmtree(output.partial, ignore_errors=True)
        raise UserError(
            f"{directory} has {free / 1e9:.2f} GB free, and {needed / 1e9:.2f} GB are needed; free some, or give "
            "another output directory"
        )


def make(output: Output, missing: Sequence[OutputFile], *, parallel: int, advance: Advance) -> None:
    """Make what is missing, ``parallel`` files at a time, and let the directory appear. Inside :func:`reserved`.

    ``advance`` is told of bytes read: those of the files to be made, and those whose checksum is compared.

    Raises:
        UserError: a source is damaged, a tensor cannot be converted, or the disk is full; what is finished is kept.
    """
    try:
        _side_by_side([partial(_check_sum, part) for part in output.summed], parallel, advance)
        _side_by_side([partial(_make_file, output, file) for file in missing], parallel, advance)
        output.documents(output.partial)
        for file in output.partial.rglob("*"):
            sync(file)
        check_place(output.path)
    except (OSError, ValueError) as error:
        raise _told(error, output) from error
    os.rename(output.partial, output.path)
    (output.path / _PLAN).unlink()
    sync(output.path)
    sync(output.path.absolute().parent)


class _StoppedError(Exception):
    """Another job failed."""


def _side_by_side(jobs: Sequence[Callable[[Advance], None]], parallel: int, advance: Advance) -> None:
    """Run jobs in ``parallel`` threads; when one fails, the others stop with their next piece."""
    stop = threading.Event()

    def advance_or_stop(count: int) -> None:
        if stop.is_set():
            raise _StoppedError
        advance(count)

    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(job, advance_or_stop) for job in jobs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_sum(part: Path, advance: Advance) -> None:
    if not is_whole(part, advance):
        raise UserError(damage(part))


def _make_file(output: Output, file: OutputFile, advance: Advance) -> None:
    temporary, final = output.partial / f"{file.name}.tmp", output.partial / file.name
    with TensorFileWriter(temporary, file.infos) as writer:
        for task in file.tasks:
            task.run(writer.write, advance)
        writer.finish()
    if output.finished_file is not None:
        output.finished_file(final, temporary)
    os.rename(temporary, final)
    sync(output.partial)


def _told(error: OSError | ValueError, output: Output) -> UserError:
    """What a user can mend, with how to go on; where nothing was finished, nothing is kept."""
    again = f" (what is finished is kept in {output.partial}, and the same command goes on from there)"
    if len(output.missing()) == len(output.files):
        shutil.rmtree(output.partial)
        again = ""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"the disk of {output.path} is full; free some{again}")
    return UserError(f"{error}{again}")


def split(tasks: Sequence[Task], most_bytes: int) -> list[tuple[Task, ...]]:
    """Tasks in groups, each of which makes a file of at most ``most_bytes``; one that makes more is alone."""
    groups: list[list[Task]] = []
    size = 0
    for task in tasks:
        nbytes = sum(info.nbytes + len(info.name) + _LINE for info in task.outputs)
        if not groups or size + nbytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(task)
        size += nbytes
    return [tuple(group) for group in groups]
