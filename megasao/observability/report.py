"""The report of a run: one self-contained HTML page.

Invariants:
- the page asks for nothing outside itself: no link, image, font or script from elsewhere;
- text from the run (names, config, tokens) is escaped wherever it appears;
- a partial run gives a page that says what is missing; only a run without any metric is an error.
"""

import html
import importlib.metadata
import platform
import time
from pathlib import Path

import yaml

from megasao.config.rundir import RunDirectory, write_atomically
from megasao.observability import charts, report_curves, report_examples, report_tables
from megasao.observability.formats import MISSING, count, duration, number, share
from megasao.observability.jsonl import Row
from megasao.observability.record import RunRecord, column, load_record, require_metrics
from megasao.observability.report_script import JS
from megasao.observability.report_style import CSS
from megasao.observability.summary import ModeSummary, Summary, summarise

PACKAGES = ("megasao", "torch", "megatron-core", "transformers")


def write_report(run: RunDirectory) -> Path:
    """Write ``report.html`` into the run directory and return its path.

    ValueError if the directory is missing or holds no metrics.
    """
    record = load_record(run)
    require_metrics(record)
    path = run.path / "report.html"
    write_atomically(path, render(record))
    return path


def render(record: RunRecord) -> str:
    """The page."""
    summary = summarise(record)
    title = html.escape(f"{summary.run}: megasao run report")
    body = "".join(
        [
            _header(record, summary),
            report_tables.results(record, summary),
            *(_curves(name, note, drawn) for name, note, drawn in report_curves.groups(record)),
            _examples(record.examples()),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{CSS}</style></head>\n<body><main>{body}</main>"
        f'<div id="tip" role="status"></div>\n<script>{JS}</script></body></html>\n'
    )


def _header(record: RunRecord, summary: Summary) -> str:
    complete = summary.total_steps > 0 and summary.steps >= summary.total_steps
    state = "finished" if complete else f"partial: {summary.steps} of {summary.total_steps or '?'} steps"
    times = [time for rows in (record.sft, record.trainer, record.evaluations) for time in column(rows, "time")]
    facts = [_day(min(times)) if times else "", *_layout(record)]
    missing = "".join(f"<li>{html.escape(what)}</li>" for what in summary.missing)
    return (
        f'<header><p class="over">megasao run report</p><h1>{html.escape(summary.run)}</h1>'
        f'<p class="meta"><span class="status{"" if complete else " partial"}">{state}</span>'
        f"{''.join(f'<span>{html.escape(fact)}</span>' for fact in facts if fact)}</p></header>"
        f"{_tiles(summary)}{f'<ul class=missing>{missing}</ul>' if missing else ''}{_config(record)}"
    )


def _tiles(summary: Summary) -> str:
    dropped = sum(total for reason, total in summary.excluded.items() if reason.startswith("dropped"))
    tiles = [
        ("greedy success", _change(summary.modes["greedy"])),
        ("sampled success", _change(summary.modes["sampled"])),
        ("weight version", _text(MISSING if summary.weight_version is None else f"v{summary.weight_version}")),
        ("lag, mean and max", _text(f"{number(summary.lag_mean, 2)} / {count(summary.lag_max)}")),
        ("trajectories", _text(count(summary.trajectories), f"trained on; {count(dropped)} dropped")),
        ("SAO time", _text(duration(summary.sao_seconds), f"+ {duration(summary.fine_tuning_seconds)} fine-tuning")),
    ]
    return (
        '<div class="tiles">'
        + "".join(f"<div class=tile><span>{name}</span>{text}</div>" for name, text in tiles)
        + "</div>"
    )


def _change(mode: ModeSummary) -> str:
    before = share(mode.before.success if mode.before else None)
    under = f"v0 → mean of the last {len(mode.last)}" if mode.last else "v0 → not measured"
    return f"<b><i>{before} →</i> {share(mode.mean)}</b><span>{html.escape(under)}</span>"


def _text(value: str, small: str = "") -> str:
    return f"<b>{html.escape(value)}</b>" + (f"<span>{html.escape(small)}</span>" if small else "")


def _layout(record: RunRecord) -> list[str]:
    """Model, task and process layout, as far as the config says."""
    config = record.config
    parallel, rollout, loop = (config.get(name) or {} for name in ("parallel", "rollout", "loop"))
    facts = [
        f"model: {config['model'].get('path')}" if isinstance(config.get("model"), dict) else "",
        f"task: {config['environment'].get('name')}" if isinstance(config.get("environment"), dict) else "",
        f"trainer ranks: {parallel['ranks']}" if "ranks" in parallel else "",
        f"rollout workers: {rollout['workers']}" if "workers" in rollout else "",
        f"{loop['mode']}, {loop.get('batch_size')} trajectories a step" if "mode" in loop else "",
    ]
    return facts


def _config(record: RunRecord) -> str:
    if not record.config:
        return '<p class="note">No config.yaml in the run directory.</p>'
    text = yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True)
    return (
        f"<details><summary>Configuration and versions</summary><pre>{html.escape(_versions())}</pre>"
        f"<pre>{html.escape(text)}</pre></details>"
    )


def _versions() -> str:
    lines = [f"report written {_day(time.time())} with:", f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} not installed here")
    return "\n".join(lines)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _curves(name: str, note: str, drawn: list[charts.Chart]) -> str:
    figures = "".join(charts.render(chart) for chart in drawn)
    return f'<section><h2>{name}</h2><p class="note">{note}</p><div class="grid">{figures}</div></section>'


def _examples(examples: list[Row]) -> str:
    chosen = report_examples.choose(examples)
    note = (
        f"{len(chosen)} of {len(examples)} saved, spread over the run. Point at a token for its numbers."
        if chosen
        else ""
    )
    return f'<section><h2>Example trajectories</h2><p class="note">{note}</p>{report_examples.render(chosen)}</section>'
