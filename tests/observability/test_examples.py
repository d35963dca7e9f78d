"""Example trajectories on disk, and the choice of those that are shown."""

import json
import math
import random
from pathlib import Path

import pytest
from synthetic import example

from megasao.config.rundir import RunDirectory
from megasao.observability.examples import read_examples, write_examples
from megasao.observability.report_examples import choose


def test_written_rows_are_read_back_with_step_and_version(tmp_path: Path) -> None:
    run, row = RunDirectory(tmp_path), example(10, 0, 100, random.Random(0))
    path = write_examples(run, 10, 3, [row])
    assert path == run.examples / "step_000010.jsonl"
    assert read_examples(run) == [{"step": 10, "weight_version": 3, **json.loads(json.dumps(row))}]


def test_writing_a_step_again_replaces_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run, rng = RunDirectory(tmp_path), random.Random(0)
    write_examples(run, 10, 3, [example(10, 0, 100, rng), example(10, 1, 100, rng)])
    write_examples(run, 10, 3, [example(10, 1, 100, rng)])
    assert [row["trajectory_id"] for row in read_examples(run)] == ["lease-10-1"]
    assert [path.name for path in run.examples.iterdir()] == ["step_000010.jsonl"]


def test_nonfinite_numbers_are_null(tmp_path: Path) -> None:
    row = {**example(0, 0, 100, random.Random(0)), "reward": math.nan}
    row["ratio"] = [math.inf] * len(row["tokens"])
    text = write_examples(RunDirectory(tmp_path), 0, 0, [row]).read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text)["ratio"][0] is None


def test_a_list_of_the_wrong_length_is_refused_by_name(tmp_path: Path) -> None:
    row = example(0, 0, 100, random.Random(0))
    row["values"] = row["values"][1:]
    with pytest.raises(ValueError, match=r"example 'lease-0-0': 'values' must be a list of 52 entries .* got 51"):
        write_examples(RunDirectory(tmp_path), 0, 0, [row])
    assert not (tmp_path / "examples").exists()
    with pytest.raises(ValueError, match="'tokens' must be a list"):
        write_examples(RunDirectory(tmp_path), 0, 0, [{"trajectory_id": "x"}])


def rows(steps: int, per_step: int) -> list[dict[str, int]]:
    return [{"step": step, "index": index} for step in range(steps) for index in range(per_step)]


def test_ten_are_spread_over_the_run_one_per_step() -> None:
    chosen = choose(rows(100, 2))
    assert [row["step"] for row in chosen] == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]
    assert {row["index"] for row in chosen} == {0, 1}


@pytest.mark.parametrize(("steps", "per_step", "expected"), [(0, 0, 0), (1, 2, 2), (3, 2, 6), (4, 4, 10), (10, 1, 10)])
def test_few_steps_give_more_of_each_and_none_twice(steps: int, per_step: int, expected: int) -> None:
    chosen = choose(rows(steps, per_step))
    assert len(chosen) == expected == len({(row["step"], row["index"]) for row in chosen})
    assert {row["step"] for row in chosen} == set(range(steps))
    assert [row["step"] for row in chosen] == sorted(row["step"] for row in chosen)
