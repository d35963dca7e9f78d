"""`megasao study`: grids of runs, and the pages that are made of them."""

import os
from collections.abc import Callable
from pathlib import Path

from megasao.studies.grid import Grid, run_grid
from megasao.studies.registry import STUDIES, study_named
from megasao.studies.study import Study
from megasao.studies.table import write_csv, write_page

ALL = "all"
WORK = Path("build/studies")
PAGES, QUICK_PAGES = Path("docs/studies"), Path("build/quick")


def run_studies(
    name: str, *, seeds: int, quick: bool, jobs: int | None, out: Path | None, say: Callable[[str], None]
) -> None:
    """Run the study ``name``, or ``all``, and write its page. Nothing runs if a name or a config is wrong."""
    studies = list(STUDIES.values()) if name == ALL else [study_named(name)]
    pages = out or (QUICK_PAGES if quick else PAGES)
    for study in studies:
        work = WORK / (f"{study.name}-quick" if quick else study.name)
        runs = run_grid(Grid(study.name, seeds, quick, work), jobs=jobs or len(os.sched_getaffinity(0)), say=say)
        pages.mkdir(parents=True, exist_ok=True)  # after the configs were found
        write_csv(study, runs, pages / f"{study.name}.csv")
        study.draw(runs, pages / f"{study.name}.png")
        say(f"{study.name}: {write_page(study, runs, pages, command(study, seeds, quick))}")


def command(study: Study, seeds: int, quick: bool) -> str:
    """The command that makes the study again."""
    return f"megasao study {study.name} --seeds {seeds}" + (" --quick" if quick else "")
