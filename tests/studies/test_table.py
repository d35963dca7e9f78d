"""The table of a study: what is averaged over what; what is missing is not 0; prose around the table stays."""

from pathlib import Path

import pytest

from megasao.config.load import load_config
from megasao.studies.study import Arm, Run, Study, curve, first_step, mean_after
from megasao.studies.table import BEGIN, END, markdown_table, write_csv, write_page

CONFIG = load_config("configs/studies/collapse.yaml")


def run_of(arm: str, seed: int, values: list[float | None]) -> Run:
    return Run(arm, seed, [{"step": float(step), "x": value} for step, value in enumerate(values)], CONFIG)


STUDY = Study(
    name="some",
    arms=(Arm("a"), Arm("b")),
    model={},
    numbers=lambda run: {"last": run.records[-1]["x"]},
    draw=lambda runs, path: None,
    quick=(),
)
RUNS = [run_of("a", 0, [1.0]), run_of("b", 0, [None]), run_of("a", 1, [2.0]), run_of("b", 1, [250.0])]


def test_mean_deviation_and_number_of_runs_by_arm():
    lines = markdown_table(STUDY, RUNS).splitlines()
    assert lines[2] == "| `a` | 1.5 ± 0.707 | 2 |"
    assert lines[3] == "| `b` | 250 (n = 1) | 2 |", "a run without a number is left out, not counted as 0"
    assert "| – |" in markdown_table(STUDY, [run_of("b", 0, [None])])


def test_every_run_is_a_line_of_the_csv(tmp_path: Path):
    write_csv(STUDY, RUNS, tmp_path / "some.csv")
    assert (tmp_path / "some.csv").read_text() == "arm,seed,last\na,0,1\nb,0,\na,1,2\nb,1,250\n"


def test_what_stands_around_the_table_is_kept(tmp_path: Path):
    page = write_page(STUDY, RUNS, tmp_path, "megasao study some")
    page.write_text(page.read_text().replace(BEGIN, f"Before.\n\n{BEGIN}").replace(END, f"{END}\n\nAfter.\n"))
    write_page(STUDY, RUNS[:2], tmp_path, "megasao study some --seeds 1")
    text = page.read_text()
    assert text.startswith("# Study: some\n\nBefore.") and text.rstrip().endswith("After.")
    assert "--seeds 1" in text and "± 0.707" not in text


@pytest.mark.parametrize("text", ["no block", f"{END}\n{BEGIN}\n", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_whose_block_is_broken_is_refused(tmp_path: Path, text: str):
    (tmp_path / "some.md").write_text(text)
    with pytest.raises(ValueError, match=r"some\.md: expected the lines"):
        write_page(STUDY, RUNS, tmp_path, "command")
    assert (tmp_path / "some.md").read_text() == text


def test_reading_numbers_off_a_run():
    run = run_of("a", 0, [0.0, None, 4.0, 6.0])
    assert curve(run, "x") == [(0, 0), (2, 4), (3, 6)]
    assert mean_after(run, "x", 0.5) == 5
    assert mean_after(run, "y", 0) is None
    assert first_step(run, "x", 4) == 2 and first_step(run, "x", 7) is None
