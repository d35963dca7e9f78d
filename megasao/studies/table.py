"""The numbers of a study as CSV, one line a run, and as a Markdown table, one line an arm.

Invariants:
- the table shows mean, sample standard deviation and n of what was measured; a run without a number does not count
  as 0, it is left out of n;
- what stands outside the generated block of a page is never touched.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from megasao.config.rundir import write_atomically
from megasao.studies.study import Numbers, Run, Study

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def write_csv(study: Study, runs: Sequence[Run], path: Path) -> None:
    """One line a run: arm, seed, and the study's numbers (empty where there is none)."""
    rows = [(run, study.numbers(run)) for run in runs]
    columns = list(rows[0][1])
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "seed", *columns])
        for run, numbers in rows:
            writer.writerow([run.arm, run.seed, *(_plain(numbers[column]) for column in columns)])


def markdown_table(study: Study, runs: Sequence[Run]) -> str:
    """One line an arm, in the study's order."""
    by_arm: dict[str, list[Numbers]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(study.numbers(run))
    columns = list(next(iter(by_arm.values()))[0])
    lines = ["| arm | " + " | ".join(columns) + " | runs |", "|---" * (len(columns) + 2) + "|"]
    for arm, numbers in by_arm.items():
        cells = [_summary([one[column] for one in numbers]) for column in columns]
        lines.append(f"| `{arm}` | " + " | ".join(cells) + f" | {len(numbers)} |")
    return "\n".join(lines)


def _summary(values: Sequence[float | None]) -> str:
    """Mean ± deviation, with n where some runs have no number."""
    found = [value for value in values if value is not None]
    if not found:
        return "–"
    text = _shown(fmean(found))
    if len(found) > 1:
        text += f" ± {_shown(stdev(found))}"
    return text if len(found) == len(values) else f"{text} (n = {len(found)})"


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def write_page(study: Study, runs: Sequence[Run], directory: Path, command: str) -> Path:
    """Put table, figure and command into the generated block of the study's page; make the page if there is none."""
    page = directory / f"{study.name}.md"
    seeds = len({run.seed for run in runs})
    block = "\n".join(
        [
            BEGIN,
            f"`{command}`, {seeds} seed{'s' if seeds > 1 else ''}: mean ± standard deviation over the runs of an arm; "
            f"every run is a line of [{study.name}.csv]({study.name}.csv).",
            "",
            markdown_table(study, runs),
            "",
            f"![{study.name}]({study.name}.png)",
            END,
        ]
    )
    text = page.read_text(encoding="utf-8") if page.is_file() else f"# Study: {study.name}\n\n{BEGIN}\n{END}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{page}: expected the lines {BEGIN} and {END} once each, in this order, around the table")
    before, after = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    write_atomically(page, before + block + after)
    return page
