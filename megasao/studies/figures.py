"""Curves of a study's runs, one colour an arm: the mean over seeds, and a band from the lowest to the highest."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from megasao.studies.study import Run, curve

COLOURS = ("#2459a7", "#d1495b", "#3c8d5a", "#e09f1f", "#7a4ea3", "#00838f", "#8d6e63", "#c2185b", "#607d8b", "#afb42b")


def colours(arms: Sequence[str]) -> dict[str, str]:
    """A colour for each arm, in order."""
    return {arm: COLOURS[number % len(COLOURS)] for number, arm in enumerate(arms)}


@contextmanager
def figure(path: Path, rows: int, columns: int) -> Iterator[list[Any]]:
    """Axes, row by row, of a figure that is written to ``path`` at the end."""
    drawn, axes = pyplot.subplots(rows, columns, figsize=(5.2 * columns, 3.4 * rows), squeeze=False)
    flat = [one for row in axes for one in row]
    for one in flat:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    yield flat
    drawn.tight_layout()
    drawn.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(drawn)


def draw_curves(
    axes: Any,
    runs: Sequence[Run],
    name: str,
    title: str,
    *,
    arms: Sequence[str],
    scale: Callable[[float], float] = lambda value: value,
    smooth: int = 1,
    legend: bool = False,
) -> None:
    """``name`` over the step for each of ``arms``; ``smooth`` steps are averaged; ``scale`` is applied to the step."""
    for arm, colour in colours(arms).items():
        curves = [dict(curve(run, name)) for run in runs if run.arm == arm]
        steps = sorted({step for one in curves for step in one})
        lines = [[_around(one, step, smooth) for step in steps] for one in curves]
        columns = [[value for value in column if value is not None] for column in zip(*lines, strict=True)]
        shown = [(scale(step), column) for step, column in zip(steps, columns, strict=True) if column]
        places = [place for place, _ in shown]
        axes.plot(places, [fmean(column) for _, column in shown], color=colour, label=arm, linewidth=1.6)
        lowest, highest = [min(column) for _, column in shown], [max(column) for _, column in shown]
        axes.fill_between(places, lowest, highest, color=colour, alpha=0.12, linewidth=0)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    if legend:
        axes.legend(fontsize=7, frameon=False)


def _around(values: dict[float, float], step: float, smooth: int) -> float | None:
    """Mean of the newest ``smooth`` values up to ``step``."""
    newest = [values[one] for one in range(int(step) - smooth + 1, int(step) + 1) if one in values]
    return fmean(newest) if newest else None
