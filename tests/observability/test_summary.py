"""The table at the end: its numbers, and what it says of a partial run."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import make_config, make_run, write_lines

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.observability.record import exclusions, load_record, version_label
from megasao.observability.summary import print_summary, summarise


def evaluation(step: int, version: int, success: float, mode: str = "greedy") -> dict[str, object]:
    return {
        "evaluation_id": f"step-{step:06d}/{mode}",
        "step": step,
        "mode": mode,
        "problems": 100,
        "solved": round(100 * success),
        "success": success,
        "failures": 0,
        "oldest_version": version,
        "newest_version": version,
    }


def text_of(run: RunDirectory, config: Config) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_summary(run, config, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def empty(tmp_path: Path) -> tuple[RunDirectory, Config]:
    config = make_config(tmp_path, steps=20)
    run = RunDirectory(tmp_path / config.run.name)
    run.create()
    return run, config


def test_after_is_the_mean_of_the_last_three_without_before(empty: tuple[RunDirectory, Config]) -> None:
    run, _ = empty
    successes = [0.5, 0.6, 0.9, 0.8, 1.0]
    write_lines(run.evaluations, [evaluation(step, step, success) for step, success in enumerate(successes)])
    greedy = summarise(load_record(run)).modes["greedy"]
    assert greedy.before is not None and (greedy.before.success, greedy.before.version) == (0.5, "v0")
    assert [point.success for point in greedy.last] == [0.9, 0.8, 1.0]
    assert greedy.mean == pytest.approx(0.9)
    assert greedy.mean != pytest.approx(sum(successes) / 5)


def test_two_evaluations_after_are_not_filled_up_with_before(empty: tuple[RunDirectory, Config]) -> None:
    run, config = empty
    write_lines(run.evaluations, [evaluation(0, 0, 0.2), evaluation(1, 1, 0.8), evaluation(2, 2, 0.9)])
    summary = summarise(load_record(run))
    assert summary.modes["greedy"].mean == pytest.approx(0.85)
    assert "only 2 of 3 evaluations after training" in summary.missing
    assert "mean of last 2" in text_of(run, config)


def test_before_is_version_0_or_missing(empty: tuple[RunDirectory, Config]) -> None:
    run, config = empty
    write_lines(run.evaluations, [evaluation(5, 5, 0.7)])
    summary = summarise(load_record(run))
    assert summary.modes["greedy"].before is None
    assert "no evaluation of version 0 (before)" in summary.missing
    (line,) = [line for line in text_of(run, config).splitlines() if "before" in line and "│" in line]
    assert "%" not in line


def test_an_evaluation_repeated_after_a_resume_counts_once(empty: tuple[RunDirectory, Config]) -> None:
    run, _ = empty
    write_lines(run.evaluations, [evaluation(2, 2, 0.1), evaluation(3, 3, 0.5), evaluation(2, 2, 0.9)])
    greedy = summarise(load_record(run)).modes["greedy"]
    assert [point.success for point in greedy.last] == [0.9, 0.5]


def test_versions_that_differ_are_both_shown() -> None:
    assert version_label({"oldest_version": 3, "newest_version": 5}) == "v3-5"
    assert version_label({"oldest_version": 3, "newest_version": 3}) == "v3"
    assert version_label({}) == "-"


def test_a_whole_run(tmp_path: Path) -> None:
    run, config = make_run(tmp_path)
    text = text_of(run, config)
    data = json.loads((run.path / "summary.json").read_text())
    assert data["steps"] == data["total_steps"] == 160 and data["missing"] == []
    assert data["trajectories"] == 160 * 64 and data["weight_version"] == 150
    assert data["excluded"] == {"dropped/stale/arithmetic-3": 5, "failures/timeout": 2}
    assert data["sao_seconds"] == pytest.approx(1.45 * 160, rel=0.02)
    for mode in ("greedy", "sampled"):
        assert len(data["modes"][mode]["last"]) == 3
        assert f"{100 * data['modes'][mode]['mean']:.1f} %" in text
    assert "10,240 trajectories" in text and "v150" in text and "max 4" in text and "missing" not in text


@pytest.mark.parametrize(("done", "says"), [(0, "no training step was finished"), (30, "after 30 of 160 steps")])
def test_a_partial_run_says_what_is_missing(tmp_path: Path, done: int, says: str) -> None:
    run, config = make_run(tmp_path, done=done)
    assert says in text_of(run, config)


def test_a_run_without_any_file_still_has_a_summary(empty: tuple[RunDirectory, Config]) -> None:
    run, config = empty
    assert "no training step was finished" in text_of(run, config)
    assert json.loads((run.path / "summary.json").read_text())["modes"]["greedy"]["mean"] is None


def test_exclusions_are_totals_not_sums_of_totals(empty: tuple[RunDirectory, Config]) -> None:
    run, _ = empty
    rows = [{"step": step, "rollout/dropped/stale/add": step * 2, "rollout/tokens_per_s": 9.0} for step in range(4)]
    write_lines(run.metrics / "trainer.jsonl", rows)
    assert exclusions(load_record(run)) == {"dropped/stale/add": 6}
    assert sum(row["rollout/dropped/stale/add"] for row in rows) != 6  # negative control


def test_counters_of_a_restarted_controller_are_added_to_those_before(empty: tuple[RunDirectory, Config]) -> None:
    run, _ = empty
    lives = [[{}, {"failures/x": 1}, {"failures/x": 3}], [{}, {"failures/x": 1}], [{"failures/x": 2}]]
    rows = [{"step": 0, "dropped/stale/a": 2 + life, **row} for life, rows in enumerate(lives) for row in rows]
    write_lines(run.metrics / "controller.jsonl", rows)
    assert exclusions(load_record(run)) == {"failures/x": 3 + 2, "dropped/stale/a": 4}
    assert rows[-1]["failures/x"] == 2  # negative control: the last value alone


def test_no_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run directory at .*nowhere"):
        load_record(RunDirectory(tmp_path / "nowhere"))
