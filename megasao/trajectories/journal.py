"""The durable log of accepted trajectories: Arrow IPC stream files, each readable by any Arrow library.

Invariants:
- after ``sync`` returns, every row appended before it survives a crash of the process or the machine;
- recovery returns every synced row, in the order of appending, and cuts off a torn tail;
- damage anywhere but in the tail of the newest segment is an error, or told, never a silent loss.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from megasao.storage.atomic import sync
from megasao.trajectories.columns import SCHEMA
from megasao.trajectories.ipc import READ_ERRORS, check_buffers

SEGMENT_BYTES = 64 * 2**20
SEGMENT_ROWS = 4096
"""The index of what an open segment holds is in memory; so many rows, however small, are the most of it."""
_CHECKSUM = b"crc32"
_WRITE_BUFFER = 2**20
_MARKER = b"\xff\xff\xff\xff"
"""What every message of an Arrow stream begins with, at a multiple of _ALIGNMENT bytes."""
_ALIGNMENT = 8
_END_BYTES = 8
"""Length of the end mark of a closed stream."""


@dataclass(frozen=True)
class Location:
    """Where a batch lies: segment file and byte offset of its message."""

    segment: int
    offset: int


class _Damaged(Exception):
    """A segment cannot be read to its end, and a crash does not explain it."""


class Journal:
    """Appends batches, in segments of about ``segment_bytes`` or ``segment_rows``. One process at a time does so."""

    def __init__(
        self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, segment_rows: int = SEGMENT_ROWS
    ) -> None:
        self.directory = directory
        self.discarded_bytes = 0
        """Bytes of a torn tail that recovery cut off: rows that were never acknowledged."""
        self._segment_bytes, self._segment_rows = segment_bytes, segment_rows
        self._rows = 0
        self._current = 0
        self._file: Any = None
        self._writer: Any = None
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self.directory / f"segment-{segment:06d}.arrow"

    def segments(self) -> list[int]:
        """Numbers of the segments on disk, oldest first."""
        return sorted(int(path.stem.removeprefix("segment-")) for path in self.directory.glob("segment-*.arrow"))

    def recover(self, tell: Callable[[str], None] | None = None) -> Iterator[tuple[pa.RecordBatch, Location]]:
        """Every batch on disk, oldest first. Call once, before the first ``append``.

        ValueError where damaged; with ``tell``, that is told it, and the rest of the segment is left out.
        """
        segments = self.segments()
        for segment in segments:
            self._current = segment
            try:
                yield from self._recover_segment(segment, is_newest=segment == segments[-1])
            except _Damaged as damage:
                if tell is None:
                    raise ValueError(
                        f"{damage}: acknowledged trajectories would be lost; restore the file, or start a new run"
                    ) from damage
                tell(str(damage))

    def append(self, batch: pa.RecordBatch) -> Location:
        """Write ``batch`` (columns of SCHEMA). It is durable after the next ``sync``."""
        if self._file is None:
            self._open_segment()
        # The stream writer puts the schema in front of the first batch only when it writes that batch.
        location = Location(self._current, self._file.tell())
        self._writer.write_batch(batch, custom_metadata={_CHECKSUM: _checksum(batch)})
        self._rows += batch.num_rows
        return location

    def sync(self) -> None:
        """Make everything appended so far durable: one fsync, however many batches."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._file.tell() >= self._segment_bytes or self._rows >= self._segment_rows:
            self.close()

    def delete(self, segment: int) -> None:
        """Remove a segment that is no longer written to."""
        if segment == self._current and self._file is not None:
            raise ValueError(f"segment {segment} is still being written")
        self.path(segment).unlink(missing_ok=True)

    def is_open(self, segment: int) -> bool:
        """Whether rows may still be appended to this segment."""
        return self._file is not None and segment == self._current

    def close(self) -> None:
        """End the current segment; the next ``append`` starts another."""
        if self._file is not None:
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = self._writer = None
            self._rows = 0

    def _open_segment(self) -> None:
        self._current = max([self._current, *self.segments()]) + 1
        self._file = self.path(self._current).open("xb", buffering=_WRITE_BUFFER)
        self._writer = pa.ipc.new_stream(self._file, SCHEMA)
        sync(self.directory)

    def _recover_segment(self, segment: int, *, is_newest: bool) -> Iterator[tuple[pa.RecordBatch, Location]]:
        path = self.path(segment)
        size = path.stat().st_size
        good = 0
        try:
            if size == 0:
                raise EOFError("empty file")
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
                good = source.tell()
                while True:
                    offset = source.tell()
                    batch = _read_checked(reader)
                    good = source.tell()
                    yield batch, Location(segment, offset)
        except StopIteration:
            if size - good <= _END_BYTES:
                return
            damage = "the stream ends there"
        except READ_ERRORS as error:
            damage = str(error)
        if not is_newest or _whole_batch_after(path, good):
            raise _Damaged(
                f"{path} is damaged after byte {good} of {size} ({damage}), and that is not the end of the journal"
            )
        self._cut_tail(path, good, size)

    def _cut_tail(self, path: Path, good: int, size: int) -> None:
        """Cut the tail off; its bytes stay beside the segment, for whoever wants to know what they were."""
        self.discarded_bytes += size - good
        path.with_suffix(".torn").write_bytes(path.read_bytes()[good:])
        if good == 0:
            path.unlink()
            return
        with path.open("r+b") as file:
            file.truncate(good)
            os.fsync(file.fileno())


def read_batch(path: Path, offset: int) -> pa.RecordBatch:
    """The batch whose message starts at ``offset``. ValueError where it cannot be read, or is not what was written."""
    try:
        with pa.OSFile(str(path)) as source:
            source.seek(offset)
            message = pa.ipc.read_message(source)
            if message.type == "schema":
                message = pa.ipc.read_message(source)
            batch: pa.RecordBatch = pa.ipc.read_record_batch(message, SCHEMA)
            check_buffers(batch)
            # The message's own text, as its format has it: length, bytes, zero. Read as a stream it would be copied.
            checksum = _checksum(batch)
            if struct.pack("<I", len(checksum)) + checksum + b"\0" not in message.metadata.to_pybytes():
                raise ValueError("it does not match its checksum")
            return batch
    except READ_ERRORS as error:
        raise ValueError(f"{path}: no batch can be read at byte {offset}: {error}") from error


def _whole_batch_after(path: Path, damaged: int) -> bool:
    """Whether a batch can be read behind the damaged one at byte ``damaged``: then this is no torn tail."""
    data = path.read_bytes()
    position = data.find(_MARKER, damaged + 1)
    while position != -1:
        try:
            if position % _ALIGNMENT == 0:
                message = pa.ipc.read_message(pa.BufferReader(memoryview(data)[position:]))
                check_buffers(pa.ipc.read_record_batch(message, SCHEMA))
                return True
        except READ_ERRORS:
            pass
        position = data.find(_MARKER, position + 1)
    return False


def _read_checked(reader: Any) -> pa.RecordBatch:
    entry = reader.read_next_batch_with_custom_metadata()
    batch: pa.RecordBatch = entry.batch
    check_buffers(batch)
    expected = (entry.custom_metadata or {}).get(_CHECKSUM)
    if expected != _checksum(batch):
        raise ValueError("a batch does not match its checksum")
    return batch


def _checksum(batch: pa.RecordBatch) -> bytes:
    return str(zlib.crc32(batch.serialize())).encode()
