"""Everything a run left behind that the summary and the report show, read once.

Invariants:
- an evaluation that was run again after a resume counts once, with its last result;
- an evaluation of a step that the trainer's metrics (after a resume) no longer reach is still listed: its label is
  the weight version that produced its tokens, which stays true;
- drops and failures are totals of the whole run by reason; counters that begin again at 0 with a restarted
  controller are added up over its lives.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from megasao.config.rundir import RunDirectory
from megasao.observability.examples import read_examples
from megasao.observability.formats import finite
from megasao.observability.jsonl import Row, read_metrics, read_rows

EXCLUDED = ("dropped", "failures", "refused", "given_up")
"""First part of the names of the controller's counters of what was not trained on."""


@dataclass(frozen=True)
class RunRecord:
    """The files of one run, parsed. Rows are plain dictionaries with ``step`` and ``time``."""

    run: RunDirectory
    config: dict[str, Any]
    trainer: list[Row]
    controller: list[Row]
    sft: list[Row]
    evaluations: list[Row]

    def examples(self) -> list[Row]:
        """Example trajectories, by step (read when asked: they are the largest part)."""
        return read_examples(self.run)

    @property
    def total_steps(self) -> int:
        """Steps the run was asked for; 0 if its config is missing."""
        loop = self.config.get("loop")
        return int(loop.get("steps", 0)) if isinstance(loop, dict) else 0


def load_record(run: RunDirectory) -> RunRecord:
    """Read a run directory, finished or not, empty or not; ValueError if it is not there."""
    if not run.path.is_dir():
        raise ValueError(f"no run directory at {run.path}: expected the directory <run.directory>/<run.name> of a run")
    return RunRecord(
        run,
        _read_config(run),
        read_metrics(run.metrics / "trainer.jsonl"),
        read_rows(run.metrics / "controller.jsonl"),
        read_metrics(run.metrics / "sft.jsonl"),
        read_evaluations(run),
    )


def require_metrics(record: RunRecord) -> None:
    """ValueError if the run left no number at all."""
    run = record.run
    if not (record.trainer or record.sft or record.evaluations):
        raise ValueError(
            f"{run.path} has no metrics: expected {run.metrics / 'trainer.jsonl'} (written from the first training "
            f"step on), {run.metrics / 'sft.jsonl'} or {run.evaluations}. "
            "Is this a run directory, and did the run start?"
        )


def read_evaluations(run: RunDirectory) -> list[Row]:
    """Finished evaluations by step, greedy before sampled, each id once (its last line)."""
    rows = read_rows(run.evaluations)
    rows = [row for row in rows if isinstance(row.get("step"), int) and isinstance(row.get("mode"), str)]
    last = {str(row.get("evaluation_id", f"{row['step']}/{row['mode']}")): row for row in rows}
    return sorted(last.values(), key=lambda row: (row["step"], row["mode"]))


def by_mode(evaluations: list[Row], mode: str) -> list[Row]:
    """Evaluations of one mode with a known success."""
    return [row for row in evaluations if row["mode"] == mode and finite(row.get("success")) is not None]


def version_label(row: Row) -> str:
    """``v12``, or ``v12-13`` where an evaluation's tokens came from more than one version."""
    oldest, newest = row.get("oldest_version"), row.get("newest_version")
    if oldest is None and newest is None:
        return "-"
    return f"v{newest}" if oldest in (None, newest) else f"v{oldest}-{newest}"


def exclusions(record: RunRecord) -> dict[str, float]:
    """What was not trained on, by counter: ``dropped/<reason>/<task>``, ``failures/<reason>`` (attempts), ..."""
    rows, prefix = (record.controller, "") if record.controller else (record.trainer, "rollout/")
    names = {name for row in rows for name in row if name.removeprefix(prefix).split("/")[0] in EXCLUDED}
    totals = {name.removeprefix(prefix): _total(rows, name) for name in sorted(names) if name.startswith(prefix)}
    return {reason: total for reason, total in totals.items() if total}


def accept_rates(record: RunRecord) -> dict[str, float]:
    """Share of each task's trajectories that were trained on, of those trained on or dropped: as last reported."""
    rows, prefix = (record.controller, "") if record.controller else (record.trainer, "rollout/")
    start = f"{prefix}accept_rate/"
    last = rows[-1] if rows else {}
    return {name.removeprefix(start): value for name, value in sorted(last.items()) if name.startswith(start)}


def _total(rows: list[Row], name: str) -> float:
    """Sum of a counter over the lives of its process; a fall, or a line without it, is a new life."""
    total = previous = 0.0
    for row in rows:
        value = finite(row.get(name)) or 0.0
        total += value if value < previous else value - previous
        previous = value
    return total


def column(rows: list[Row], name: str) -> list[float]:
    """Values of one metric in order, without nulls."""
    return [row[name] for row in rows if isinstance(row.get(name), int | float)]


def mean(values: list[float]) -> float | None:
    """Arithmetic mean, None of nothing."""
    return sum(values) / len(values) if values else None


def seconds_of(rows: list[Row]) -> float | None:
    """Wall time from the first to the last line, plus the first step's own duration where known."""
    times = column(rows, "time")
    if not times:
        return None
    first = rows[0].get("time/step")
    return times[-1] - times[0] + (first if isinstance(first, int | float) else 0.0)


def _read_config(run: RunDirectory) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return loaded if isinstance(loaded, dict) else {}
