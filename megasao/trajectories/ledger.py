"""What became of trajectories and prompts: an append-only file of JSON lines beside the journal.

Invariants:
- a record is durable when ``append`` returns;
- reading returns the records in order; a torn last line is cut off, damage before it is an error;
- with the journal, the ledger is all that the controller needs to rebuild itself.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from megasao.storage.atomic import append_durably, sync
from megasao.trajectories.buffer import Summary


class Started(msgspec.Struct, tag=True, frozen=True):
    """The controller started for the ``generation``-th time (from 1)."""

    generation: int


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """Training prompts below ``below`` may have been leased."""

    below: int


class HostedAt(msgspec.Struct, tag=True, frozen=True):
    """Trajectories whose payload is in the journal of the rollout host ``host``."""

    host: str
    summaries: list[Summary]


class Batch(msgspec.Struct, tag=True, frozen=True):
    """The trajectories of a training step, in order; assembled for weight ``version``.

    A later record of the same step replaces an earlier one: of that, payload was lost with its host. ``tasks`` says how
    many are of each, for when the trajectories themselves are deleted.
    """

    step: int
    version: int
    trajectory_ids: list[str]
    tasks: dict[str, int] = {}


class Dropped(msgspec.Struct, tag=True, frozen=True):
    """Trajectories of one task that will not be trained on; ``step`` was the next step."""

    step: int
    version: int
    task: str
    reason: str
    trajectory_ids: list[str]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """One attempt at a training prompt failed, for a reason outside the policy."""

    prompt_index: int
    reason: str


class GaveUp(msgspec.Struct, tag=True, frozen=True):
    """A training prompt that failed too often."""

    prompt_index: int
    reason: str


class EvaluationStarted(msgspec.Struct, tag=True, frozen=True):
    """An evaluation was asked for; its end is in the run's evaluations file."""

    evaluation_id: str
    step: int
    mode: str
    version: int


class Checkpointed(msgspec.Struct, tag=True, frozen=True):
    """The checkpoint after ``step`` finished steps is complete."""

    step: int


Record = Started | Reserved | HostedAt | Batch | Dropped | Failed | GaveUp | EvaluationStarted | Checkpointed

_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Record)


class Ledger:
    """The file. ``Ledger.open`` reads what is there and continues behind it."""

    def __init__(self, path: Path, records: list[Record], file: Any) -> None:
        self.path = path
        self.recovered = records
        """What the file held when it was opened."""
        self._file = file

    @classmethod
    def open(cls, path: Path) -> "Ledger":
        """Read and continue. ValueError naming the line where the file is damaged before its last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        records, good = _parse(data, path)
        file = path.open("ab", buffering=0)
        if good < len(data):
            file.truncate(good)
        os.fsync(file.fileno())
        sync(path.parent)
        return cls(path, records, file)

    def append(self, records: list[Record]) -> None:
        """Write all of ``records`` with one fsync."""
        if not records:
            return
        append_durably(self._file, b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _parse(data: bytes, path: Path) -> tuple[list[Record], int]:
    """Records, and the length of the part of ``data`` that holds them."""
    records: list[Record] = []
    good = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("the line has no end")
            records.append(_decoder.decode(line))
        except (msgspec.MsgspecError, ValueError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: damaged ({error}); restore the file") from error
            break
        good += len(line)
    return records, good
