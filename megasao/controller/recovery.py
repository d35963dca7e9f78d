"""What the controller finds on disk when it starts, and keeps open while it runs.

Invariants:
- journal, ledger and evaluations file are all there is to recover from; a torn tail of any of them is cut off;
- one controller at a time has a run's files open.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megasao.config import Config
from megasao.config.lock import exclusive
from megasao.config.rundir import RunDirectory
from megasao.controller.leases import granted_version
from megasao.controller.state import ControllerState
from megasao.environments.base import Environment
from megasao.environments.benchmarks.background import BackgroundBenchmark
from megasao.observability.jsonl import parse_lines
from megasao.storage.atomic import append_durably
from megasao.trajectories.buffer import Summary, summarise
from megasao.trajectories.journal import SEGMENT_BYTES, Journal
from megasao.trajectories.ledger import Ledger
from megasao.trajectories.store import JournalStore


class EvaluationsFile:
    """Lines of finished evaluations; each is durable when ``append`` returns."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        rows, _ = parse_lines(whole)
        self.finished = {str(row["evaluation_id"]) for row in rows if "evaluation_id" in row}
        self._file: BinaryIO = path.open("ab", buffering=0)
        if len(whole) < len(data):
            self._file.truncate(len(whole))

    def append(self, line: dict[str, Any]) -> None:
        """Add one evaluation."""
        append_durably(self._file, json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Opened:
    """The open files of a run, and the summaries of the rows that they held."""

    def __init__(self, run: RunDirectory, *, segment_bytes: int = SEGMENT_BYTES, lock_wait_s: float = 0.0) -> None:
        """Raises ValueError where another controller has them open for ``lock_wait_s``, or where they are damaged."""
        run.create()
        self._lock = exclusive(run.journal / "lock", "controller of this run", wait_s=lock_wait_s)
        self.ledger = Ledger.open(run.journal / "ledger.jsonl")
        self.journal = Journal(run.journal, segment_bytes=segment_bytes)
        self.store = JournalStore(self.journal)
        self.evaluations = EvaluationsFile(run.evaluations)
        self._journaled: list[Summary] = []
        for batch, location in self.journal.recover():
            self.store.add(batch, location)
            self._journaled.extend(summarise(batch, granted_version))

    def state(
        self,
        config: Config,
        environment: Environment,
        *,
        now: float,
        benchmarks: Mapping[str, BackgroundBenchmark] | None = None,
    ) -> ControllerState:
        """The controller's state as of the last durable record."""
        return ControllerState(
            config,
            environment,
            records=self.ledger.recovered,
            journaled=self._journaled,
            finished_evaluations=self.evaluations.finished,
            now=now,
            benchmarks=benchmarks,
        )

    def close(self) -> None:
        """Close everything; the lock goes last."""
        self.journal.close()
        self.ledger.close()
        self.evaluations.close()
        self._lock.close()
