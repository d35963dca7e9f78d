"""Trajectories at hand: Arrow files in the trajectory schema, those of a run or any others. Only read.

Invariants:
- every row of every file is valid, or the error names file, row and column: nothing is left out silently;
- rows keep the order of the paths, the files' names and the rows in them, the same for every reader.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from megasao.trajectories.columns import conform
from megasao.trajectories.ipc import READ_ERRORS, check_buffers
from megasao.trajectories.schema import Trajectory, from_batch
from megasao.trajectories.validation import select_rows, validate_rows

_FILE_MAGIC = b"ARROW1"
_SUFFIX = "*.arrow"
_OF_A_RUN = (f"journal/{_SUFFIX}", f"payload/*/{_SUFFIX}")
"""In the controller's journal, or with the rollout workers (``buffer.payload``)."""


def trajectory_files(paths: Sequence[str | Path]) -> list[Path]:
    """The Arrow files that ``paths`` name: a file itself, a directory's ``*.arrow``, a run directory's journals.

    ValueError names a path that is not there or holds no such file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"{path} does not exist")
        found = sorted(path.glob(_SUFFIX)) or [file for place in _OF_A_RUN for file in sorted(path.glob(place))]
        if not found:
            raise ValueError(
                f"{path} holds no Arrow files ({_SUFFIX}), nor does a directory journal or payload in it; of a run "
                "with buffer.payload_directory name the directories of its workers there"
            )
        files += found
    return files


class StoredTrajectories:
    """The rows of all files, in memory as Arrow; a row is known by its position among all of them."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        """``batches``: valid ones, with the columns of SCHEMA."""
        self._batches = list(batches)
        self._places = [(batch, row) for batch in range(len(self._batches)) for row in range(batches[batch].num_rows)]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def prompt_ids(self) -> list[str]:
        """Of every row."""
        return [name for batch in self._batches for name in batch.column("prompt_id").to_pylist()]

    @property
    def largest_token(self) -> int:
        """The largest token id of all rows."""
        return max(int(batch.column("tokens").flatten().to_numpy().max()) for batch in self._batches if len(batch))

    def fetch(self, rows: Sequence[int]) -> list[Trajectory]:
        """These rows, in this order. Their ids are their positions: runs may have given the same name twice."""
        return [replace(self._row(row), trajectory_id=f"row-{row}") for row in rows]

    def _row(self, row: int) -> Trajectory:
        batch, place = self._places[row]
        return from_batch(select_rows(self._batches[batch], [place]))[0]


def read_trajectories(paths: Sequence[str | Path]) -> StoredTrajectories:
    """Every row of the files that ``paths`` name (see ``trajectory_files``): Arrow IPC files or streams.

    ValueError: a path is missing, a file cannot be read to its end, has other columns or an invalid row, or there is
    no row at all.
    """
    files = trajectory_files(paths)
    stored = StoredTrajectories([batch for path in files for batch in _read(path)])
    if not len(stored):
        raise ValueError(f"there is no trajectory in {', '.join(map(str, files))}")
    return stored


def _read(path: Path) -> Iterator[pa.RecordBatch]:
    rows = 0
    for batch in _batches(path):
        try:
            batch = conform(batch)
            bad = validate_rows(batch)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        for row, reason in bad.items():
            raise ValueError(f"{path}, row {rows + row}: {reason}")
        rows += batch.num_rows
        yield batch


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow IPC file or stream; a stream may lack its end mark (a run that goes on), no more."""
    try:
        with pa.memory_map(str(path)) as source:
            if source.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
                reader = pa.ipc.open_file(source)
                yield from _checked(reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                source.seek(0)
                yield from _checked(pa.ipc.open_stream(source))
    except READ_ERRORS as error:
        raise ValueError(
            f"{path} is no Arrow file, or is cut off or damaged: {error}; a journal that a crash cut off is mended by "
            "resuming its run"
        ) from error


def _checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        check_buffers(batch)
        yield batch
