"""Writing metrics: JSON lines always, TensorBoard and Weights & Biases when asked; importable without torch.

Invariants:
- one call of ``log`` is one complete line, also with several threads and after a line that a crash cut off;
- NaN and inf never reach a file: they are written as null, counted in ``metrics/nonfinite`` of the same line, and
  the first one of each name is a warning in the log;
- a name with no value (None) is null in the JSON line and absent in TensorBoard and W&B.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megasao.config.rundir import RunDirectory
from megasao.observability.jsonl import read_metrics

__all__ = ["MetricsWriter", "read_metrics"]
log = logging.getLogger(__name__)


class MetricsWriter:
    """Metrics of one process role; ``role`` names the file ``metrics/<role>.jsonl``.

    ``wandb_project`` turns on Weights & Biases (ValueError if it is not installed); ``run_name`` and ``config`` are
    what it shows. Use as a context manager, or call ``close``.
    """

    def __init__(
        self,
        run: RunDirectory,
        role: str,
        *,
        tensorboard: bool,
        wandb_project: str | None = None,
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = run.metrics / f"{role}.jsonl"
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        name = run_name or run.path.name
        self._wandb = _start_wandb(wandb_project, name, role, config) if wandb_project is not None else None
        self._tensorboard = _TensorBoard(run.tensorboard / role) if tensorboard else None
        self._file: BinaryIO | None = _open_for_append(self.path)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Append the line ``{"time", "step", **values}``; ``time`` is seconds since the epoch."""
        finite, nonfinite = _split_finite(values)
        row: dict[str, Any] = {"time": round(time.time(), 3), "step": int(step), **finite}
        if nonfinite:
            row["metrics/nonfinite"] = len(nonfinite)
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._file is None:
                raise ValueError(f"MetricsWriter of {self.path} was closed; it cannot log step {step}")
            self._warn(step, nonfinite)
            self._file.write(line)
            self._file.flush()
            shown = {key: value for key, value in finite.items() if value is not None}
            if self._tensorboard is not None:
                self._tensorboard.add(int(step), row["time"], shown)
            if self._wandb is not None:
                self._wandb.log(shown, step=int(step))

    def close(self) -> None:
        """Flush and close everything; may be called twice."""
        with self._lock:
            if self._file is None:
                return
            self._file.close()
            self._file = None
            if self._tensorboard is not None:
                self._tensorboard.close()
            if self._wandb is not None:
                self._wandb.finish()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn(self, step: int, names: list[str]) -> None:
        for name in names:
            if name not in self._warned:
                self._warned.add(name)
                log.warning("step %d: metric %s is not finite; written as null (told once per name)", step, name)


def _split_finite(values: Mapping[str, float | None]) -> tuple[dict[str, float | int | None], list[str]]:
    """Plain Python numbers with non-finite ones as None, and the names of those."""
    finite: dict[str, float | int | None] = {}
    nonfinite = []
    for name, value in values.items():
        number = None if value is None else value if isinstance(value, int) else float(value)
        if number is not None and not math.isfinite(number):
            nonfinite.append(name)
            number = None
        finite[name] = int(number) if isinstance(number, bool) else number
    return finite, nonfinite


def _open_for_append(path: Path) -> BinaryIO:
    """Open for appending, and end the line that an earlier process may have left torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+")
    if file.tell() > 0:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
            file.flush()
    return file


class _TensorBoard:
    """Scalars through TensorBoard's own event writer, which needs neither torch nor TensorFlow."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._event, self._summary, self._session = Event, Summary, SessionLog
        self._started = False
        self._writer = EventFileWriter(str(directory), flush_secs=5)

    def add(self, step: int, wall_time: float, values: Mapping[str, float]) -> None:
        if not self._started:  # tells TensorBoard to forget what an earlier life wrote from this step on
            self._started = True
            start = self._session(status=self._session.START)
            self._writer.add_event(self._event(wall_time=wall_time, step=step, session_log=start))
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(self._event(wall_time=wall_time, step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        self._writer.close()


def _start_wandb(project: str, name: str, role: str, config: Mapping[str, Any] | None) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            f"observability.wandb_project = {project!r}, but Weights & Biases is not installed: "
            "pip install 'megasao[wandb]', or set it to null"
        ) from error
    settings = dict(config) if config is not None else None
    return wandb.init(project=project, name=f"{name}-{role}", group=name, config=settings)
