"""What happened to a run over all of its jobs: ``history.jsonl`` in the run directory, a line an event."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megasao.config.errors import UserError
from megasao.config.rundir import RunDirectory
from megasao.observability.jsonl import read_rows

Happening = Literal["started", "requeued", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Event:
    """One line. ``step`` is that of the latest checkpoint, None without one."""

    time: float
    job: str
    restart: int
    event: Happening
    step: int | None
    nodes: list[str]
    detail: str = ""


def history_path(run: RunDirectory) -> Path:
    """The file."""
    return run.path / "history.jsonl"


def record(run: RunDirectory, event: Happening, *, job: str, restart: int, nodes: list[str], detail: str = "") -> None:
    """Add an event; durable when this returns."""
    line = Event(time.time(), job, restart, event, latest_step(run), nodes, detail)
    with history_path(run).open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"  # a line that was cut off must not take this one with it
            file.write(b"\n" if torn else b"")
        file.write(json.dumps(asdict(line)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_history(run: RunDirectory) -> list[Event]:
    """All events, oldest first; none for a run that never was a job. UserError for a line that is no event."""
    path = history_path(run)
    try:
        return [Event(**row) for row in read_rows(path)]
    except TypeError as error:
        raise UserError(f"{path} has a line that is no event of this version ({error}); move the file away") from error


def latest_step(run: RunDirectory) -> int | None:
    """Steps that the latest checkpoint holds; None without one. UserError for a pointer that names none."""
    directory = latest_directory(run)
    return None if directory is None else step_of(directory)


def latest_directory(run: RunDirectory) -> Path | None:
    """What the pointer names, whether it is there or not; None without one. UserError if it names no checkpoint."""
    pointer = run.checkpoints / "latest"
    if not pointer.exists():
        return None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if step_of(directory := run.checkpoints / name) is None:
        raise UserError(
            f"{pointer} names {name!r}, which is no checkpoint (step_000050, say); point it at a directory of "
            f"{run.checkpoints}, or remove it"
        )
    return directory


def step_of(checkpoint: Path) -> int | None:
    """The step in a checkpoint's name; None for another name."""
    step = checkpoint.name.removeprefix("step_")
    return int(step) if step.isascii() and step.isdigit() else None
