"""One row a response, as Arrow files in the directory of a result: ``OUT/BENCHMARK/records-000000.arrow`` and on.

Invariants:
- a file is whole or not there; an interrupted evaluation goes on behind the last one;
- the manifest says what was measured; rows of other weights, data or sampling are never mixed with it;
- a row has a reward or the reason why it has none, and there is one for each sample of a problem.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from megasao.config.errors import UserError
from megasao.config.rundir import write_atomically
from megasao.trajectories.ipc import READ_ERRORS

SCHEMA = pa.schema(
    [
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("reward", pa.float32()),
        pa.field("excluded", pa.string()),
        pa.field("answer", pa.string()),
        pa.field("response", pa.string()),
        pa.field("tokens", pa.int32()),
        pa.field("finish_reason", pa.string()),
        pa.field("weight_version", pa.int64(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Record:
    """One response to one problem. ``excluded``: why there is no reward."""

    problem_id: str
    sample: int
    weight_version: int
    seed: int
    reward: float | None = None
    excluded: str | None = None
    answer: str | None = None
    response: str | None = None
    tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a result measures; two with equal manifests may be continued, with equal benchmark and data compared."""

    benchmark: str
    data_sha256: str
    problems: int
    checkpoint: str
    checkpoint_id: str
    weight_version: int
    temperature: float
    max_tokens: int
    chat: bool
    template: str
    answer: str
    seed: int
    template_variables: dict[str, Any] = field(default_factory=dict)
    """Of the chat template, where there is one."""


class ResultDirectory:
    """The rows of one benchmark."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether something was measured here."""
        return (self.path / "manifest.json").is_file()

    def begin(self, manifest: Manifest) -> None:
        """Make the directory, or go on in it. UserError names what differs from what it was begun with."""
        if self.exists:
            before, now = asdict(self.manifest()), asdict(manifest)
            changed = [f"{name}: {before[name]!r}, now {now[name]!r}" for name in now if before[name] != now[name]]
            if changed:
                raise UserError(f"{self.path} was begun with other settings ({'; '.join(changed)}); use another --out")
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "manifest.json", json.dumps(asdict(manifest), indent=2))
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error}; choose another --out") from error

    def manifest(self) -> Manifest:
        """What was measured. UserError if the file is not one."""
        path = self.path / "manifest.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (OSError, ValueError) as error:  # msgspec's errors derive from ValueError
            raise UserError(
                f"{path} is no manifest of an evaluation: {error}; without it nobody can tell what its rows "
                "measure, so measure again with another --out"
            ) from error

    def read(self) -> list[Record]:
        """All rows, in the order in which they were written. UserError names a file that cannot be read, or holds a
        sample that another has."""
        found: dict[tuple[str, int], Record] = {}
        for file in self._files():
            try:
                with pa.OSFile(str(file)) as source, pa.ipc.open_file(source) as reader:
                    if not reader.schema.equals(SCHEMA):
                        raise ValueError(f"its columns are {', '.join(f'{c.name}: {c.type}' for c in reader.schema)}")
                    rows: list[dict[str, Any]] = reader.read_all().to_pylist()
                for record in (Record(**row) for row in rows):
                    sample = (record.problem_id, record.sample)
                    if sample in found:
                        raise ValueError(f"sample {sample[1]} of problem {sample[0]!r} is there already")
                    found[sample] = record
            except READ_ERRORS as error:
                raise UserError(
                    f"{file} holds no records of this version, or is cut off: {error}; remove it, and `megasao eval` "
                    "measures what it held again"
                ) from error
        return list(found.values())

    def append(self, records: Sequence[Record]) -> None:
        """Write the next file, behind the last one also where one before it was removed."""
        number = max((int(file.stem.rpartition("-")[2]) + 1 for file in self._files()), default=0)
        path = self.path / f"records-{number:06d}.arrow"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write_table(pa.Table.from_pylist([asdict(record) for record in records], schema=SCHEMA))
        os.replace(temporary, path)

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("records-[0-9]*[0-9].arrow"))
