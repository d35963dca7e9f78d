"""The tables of the report: before and after, every evaluation, and what was not trained on."""

import html
from collections.abc import Sequence

from megasao.observability.formats import count, duration, number, share
from megasao.observability.record import RunRecord, accept_rates, version_label
from megasao.observability.summary import Summary, reason_label, table_rows


def results(record: RunRecord, summary: Summary) -> str:
    """The section with all tables."""
    return (
        '<section><h2>Results</h2><p class="note">Success on held-out problems, labelled with the weight version that '
        f'produced the tokens.</p><div class="pair">{_before_after(summary)}{_excluded(record, summary)}</div>'
        f"{_evaluations(record)}</section>"
    )


def _before_after(summary: Summary) -> str:
    rows = table_rows(summary)
    strong = {index for index, row in enumerate(rows) if "mean" in row[0]}
    return table("Before and after", ("", "weights", "after step", "greedy", "sampled, T = 1"), rows, strong=strong)


def _excluded(record: RunRecord, summary: Summary) -> str:
    rows = [("trained on", count(summary.trajectories))]
    rows += [(reason_label(reason), count(total)) for reason, total in summary.excluded.items()]
    rows += [] if summary.excluded else [("dropped or failed", "0")]
    rows += [(f"accept rate, {task}", share(rate, 2)) for task, rate in accept_rates(record).items()]
    return table("Trajectories", ("", "in the whole run"), rows)


def _evaluations(record: RunRecord) -> str:
    rows = [
        (
            str(row["mode"]),
            version_label(row),
            count(row["step"]),
            share(row.get("success")),
            f"{count(row.get('solved'))} of {count(row.get('problems'))}",
            count(row.get("failures")),
            share(row.get("truncated")),
            number(row.get("response_tokens"), 1),
            duration(row.get("seconds")),
        )
        for row in record.evaluations
    ]
    heads = ("mode", "weights", "after step", "success", "solved", "failed", "truncated", "action tokens", "time")
    inner = table("", heads, rows) if rows else '<p class="none">No evaluation was finished.</p>'
    return (
        f"<details{' open' if len(rows) <= 6 else ''}><summary>All {len(rows)} evaluations</summary>{inner}</details>"
    )


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], strong: set[int] | None = None) -> str:
    """An HTML table of texts; rows in ``strong`` stand out."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    lines = []
    for index, row in enumerate(rows):
        css = ' class="strong"' if strong and index in strong else ""
        lines.append(f"<tr{css}>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>")
    caption = f"<h3>{html.escape(title)}</h3>" if title else ""
    return (
        f'<div class="box">{caption}<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></div>"
    )
