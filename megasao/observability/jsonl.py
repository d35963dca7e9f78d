"""Reading JSON-lines files that another process is still writing, or that a crash cut off.

Invariants:
- a torn last line is never half used: ``Tail`` leaves it for its next read, ``read_rows`` skips it;
- a line that is no JSON object is skipped and counted, and reading goes on behind it;
- ``read_metrics`` gives each step once, with the values of the last life that reached it: a line of step s ends the
  earlier life, so that lines of steps >= s written before it (lost by a resume) are gone.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]
log = logging.getLogger(__name__)


class Tail:
    """Reads what was appended to ``path`` since the last call; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self._offset = 0
        self._inode: int | None = None

    def read(self) -> list[Row]:
        """New complete rows, in file order; what cannot be read now comes later.

        A replaced or truncated file is read from its start.
        """
        try:
            with self.path.open("rb") as file:
                size = self._restart_if_replaced(file.fileno())
                file.seek(self._offset)
                data = file.read(size - self._offset)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        rows, skipped = parse_lines(data[:end])
        self.skipped += skipped
        return rows

    def _restart_if_replaced(self, descriptor: int) -> int:
        """Forget the offset if this is another file than before; returns the file's size in bytes."""
        status = os.fstat(descriptor)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
        return status.st_size


def parse_lines(data: bytes) -> tuple[list[Row], int]:
    """JSON objects of the lines of ``data``, and how many other non-empty lines there were."""
    rows: list[Row] = []
    skipped = 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:  # includes bad UTF-8
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            skipped += 1
    return rows, skipped


def read_rows(path: Path) -> list[Row]:
    """All rows of a file in file order; an absent file has none. A last line without newline counts if it parses."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    rows, skipped = parse_lines(data)
    if skipped:
        log.warning("%s: %d line(s) cut off by a killed process were skipped", path, skipped)
    return rows


def last_life(rows: list[Row]) -> list[Row]:
    """One row per step, ascending: rows that a resume from an older step made void are dropped."""
    kept: list[Row] = []
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            continue
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        kept.append(row)
    return kept


def read_metrics(path: Path) -> list[Row]:
    """The metrics of one role by step (see the module's invariants)."""
    return last_life(read_rows(path))
