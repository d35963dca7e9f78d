"""What happened to a run over all of its jobs: ``history.jsonl`` in the run directory, a line an event."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megasao.config.rundir import RunDirectory
from megasao.observability.jsonl import read_rows

Happening = Literal["started", "leaving", "requeued", "finished", "failed", "stopped"]


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
    """All events, oldest first; none for a run that never was a job."""
    return [Event(**row) for row in read_rows(history_path(run))]


def latest_step(run: RunDirectory) -> int | None:
    """Steps that the latest checkpoint holds; None without one."""
    pointer = run.checkpoints / "latest"
    if not pointer.exists():
        return None
    return int(pointer.read_text(encoding="utf-8").strip().removeprefix("step_"))
