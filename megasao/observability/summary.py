"""The table at the end of a run, and the same numbers for machines in ``summary.json``.

Invariants:
- "before" is the evaluation of weight version 0; where there is none it is missing, never another version's;
- "after" is the mean of the last three evaluations of a mode, "before" not among them, with each of them beside it;
- a partial run gives a partial table that says what is missing.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megasao.config import Config
from megasao.config.rundir import RunDirectory, write_atomically
from megasao.observability.formats import MISSING, count, duration, number, share
from megasao.observability.jsonl import Row
from megasao.observability.record import (
    RunRecord,
    by_mode,
    column,
    exclusions,
    load_record,
    mean,
    seconds_of,
    version_label,
)

LAST = 3
MODES = ("greedy", "sampled")


@dataclass(frozen=True)
class Point:
    """One evaluation: success is a fraction of ``problems`` minus ``failures``."""

    step: int
    version: str
    success: float
    problems: int
    failures: int


@dataclass(frozen=True)
class ModeSummary:
    """Before and after of one decoding mode. ``mean`` is over ``last``."""

    before: Point | None
    last: list[Point]
    mean: float | None


@dataclass(frozen=True)
class Summary:
    """The numbers of a run; times in seconds, lags in weight versions."""

    run: str
    steps: int
    total_steps: int
    weight_version: int | None
    modes: dict[str, ModeSummary]
    fine_tuning_seconds: float | None
    sao_seconds: float | None
    trajectories: int
    excluded: dict[str, float]
    lag_mean: float | None
    lag_max: float | None
    missing: list[str]


def summarise(record: RunRecord) -> Summary:
    """Compute the summary of a finished or partial run."""
    steps = int(record.trainer[-1]["step"]) + 1 if record.trainer else 0
    modes = {mode: _mode_summary(by_mode(record.evaluations, mode)) for mode in MODES}
    return Summary(
        run=record.run.path.name,
        steps=steps,
        total_steps=record.total_steps,
        weight_version=record.trainer[-1].get("weight_version") if record.trainer else None,
        modes=modes,
        fine_tuning_seconds=seconds_of(record.sft),
        sao_seconds=seconds_of(record.trainer),
        trajectories=int(sum(column(record.trainer, "data/trajectories"))),
        excluded=exclusions(record),
        lag_mean=mean(column(record.trainer, "data/lag_mean")),
        lag_max=max(column(record.trainer, "data/lag_max"), default=None),
        missing=_missing(record, steps, modes),
    )


def print_summary(run: RunDirectory, config: Config, console: Console | None = None) -> Summary:
    """Print the table and write ``summary.json``; ValueError where there is no run directory."""
    summary = summarise(load_record(run))
    write_summary(run, summary)
    console = console or Console()
    console.print(_table(summary, want_sampled=config.evaluation.sampled))
    for line in _lines(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return summary


def write_summary(run: RunDirectory, summary: Summary) -> Path:
    """Write ``summary.json``."""
    path = run.path / "summary.json"
    write_atomically(path, json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n")
    return path


def table_rows(summary: Summary, *, want_sampled: bool = True) -> list[tuple[str, ...]]:
    """The table's text: (what, weights, step, greedy[, sampled]) for before, each of the last three, and their mean."""
    modes = MODES if want_sampled else MODES[:1]
    rows = [_row("before", {mode: summary.modes[mode].before for mode in modes})]
    steps = sorted({point.step for mode in modes for point in summary.modes[mode].last})
    for step in steps:
        rows.append(_row("after", {mode: _at(summary.modes[mode].last, step) for mode in modes}))
    numbers = [len(summary.modes[mode].last) for mode in modes]
    if any(numbers):
        means = [share(summary.modes[mode].mean) for mode in modes]
        rows.append((f"after, mean of last {max(numbers)}", "", "", *means))
    return rows


def reason_label(reason: str) -> str:
    """A counter's name in words: ``dropped/stale/sums`` is "dropped, stale (sums)"."""
    kind, *rest = reason.split("/")
    what = {"failures": "failed attempts", "given_up": "prompts given up", "refused": "refused rows"}.get(kind, kind)
    return what + (f", {rest[0]}" if rest else "") + (f" ({'/'.join(rest[1:])})" if rest[1:] else "")


def _row(what: str, points: dict[str, Point | None]) -> tuple[str, ...]:
    known = [point for point in points.values() if point is not None]
    versions = " / ".join(dict.fromkeys(point.version for point in known)) or MISSING
    step = str(known[0].step) if known else MISSING
    return (what, versions, step, *(share(point.success if point else None) for point in points.values()))


def _at(points: list[Point], step: int) -> Point | None:
    return next((point for point in points if point.step == step), None)


def _mode_summary(rows: list[Row]) -> ModeSummary:
    before = [row for row in rows if row.get("newest_version") == 0]
    last = [_point(row) for row in rows if row not in before][-LAST:]
    return ModeSummary(_point(before[0]) if before else None, last, mean([point.success for point in last]))


def _point(row: Row) -> Point:
    problems, failures = int(row.get("problems", 0)), int(row.get("failures", 0))
    return Point(row["step"], version_label(row), float(row["success"]), problems, failures)


def _missing(record: RunRecord, steps: int, modes: dict[str, ModeSummary]) -> list[str]:
    missing = []
    if not record.trainer:
        missing.append("no training step was finished")
    elif steps < record.total_steps:
        missing.append(f"the run ended after {steps} of {record.total_steps} steps")
    if modes["greedy"].before is None:
        missing.append("no evaluation of version 0 (before)")
    if len(modes["greedy"].last) < LAST:
        missing.append(f"only {len(modes['greedy'].last)} of {LAST} evaluations after training")
    return missing


def _table(summary: Summary, *, want_sampled: bool) -> Table:
    table = Table(title=f"{summary.run}: success on held-out problems", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("weights", justify="right")
    table.add_column("step", justify="right")
    table.add_column("greedy", justify="right", style="bold")
    if want_sampled:
        table.add_column("sampled, T = 1", justify="right")
    rows = table_rows(summary, want_sampled=want_sampled)
    for index, row in enumerate(rows):
        table.add_row(*row, end_section=index in (0, len(rows) - 2), style="green" if "mean" in row[0] else None)
    return table


def _lines(summary: Summary) -> list[str]:
    """What the table does not hold, one fact a line."""
    excluded = ", ".join(f"{reason_label(why)} {count(n)}" for why, n in summary.excluded.items()) or "none lost"
    problems = {point.problems for mode in summary.modes.values() for point in mode.last}
    lines = [
        f"wall time     fine-tuning {duration(summary.fine_tuning_seconds)}, SAO {duration(summary.sao_seconds)} "
        f"({summary.steps} of {summary.total_steps} steps)",
        f"trained on    {count(summary.trajectories)} trajectories; {excluded}",
        f"staleness     mean {number(summary.lag_mean, 2)}, max {count(summary.lag_max)} versions when trained on",
    ]
    if problems:
        lines.append(f"evaluated on  {' / '.join(str(n) for n in sorted(problems))} held-out problems each")
    return lines + [f"missing       {what}" for what in summary.missing]
