"""A figure of held-out success over the steps of runs, one panel for each run, with each task's greedy curve.

python tools/plot_evaluations.py RUN [RUN ...] --out FILE.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MODES = {"greedy": "greedy", "sampled": "T = 1"}


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(steps, success) by name: each mode, and each task's greedy success where there are several."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        if row["mode"] not in MODES or row["success"] is None:
            continue
        found.setdefault(MODES[row["mode"]], []).append((row["step"], row["success"]))
        tasks = row.get("success_by_task") or {}
        if row["mode"] == "greedy" and len(tasks) > 1:
            for task, success in tasks.items():
                found.setdefault(f"greedy, {task}", []).append((row["step"], success))
    return found


def draw(directories: Sequence[Path], out: Path) -> None:
    """Write the figure. ValueError for a directory without evaluations."""
    figure, axes = plt.subplots(1, len(directories), figsize=(4.2 * len(directories), 3.4), sharey=True, squeeze=False)
    for axis, directory in zip(axes[0], directories, strict=True):
        file = directory / "evaluations.jsonl"
        if not file.is_file():
            raise ValueError(f"{directory}: no evaluations.jsonl; the directory of a run is expected")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for name, points in curves(rows).items():
            dashed = "," in name
            axis.plot(
                *zip(*points, strict=True),
                "--" if dashed else "-",
                marker=".",
                linewidth=1 if dashed else 2,
                label=name,
            )
        axis.set(title=directory.name, xlabel="step", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].set_ylabel("success on held-out problems")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=Path, required=True, help="image to write")
    given = parser.parse_args(arguments)
    draw(given.runs, given.out)


if __name__ == "__main__":
    main()
