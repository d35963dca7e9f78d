"""`megasao study all --quick` as a person runs it, and the invariants of what comes out (not who wins)."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megasao.studies.registry import STUDIES
from megasao.studies.study import Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def study(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megasao", "study", *words], capture_output=True, text=True, timeout=880
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages")
    done = study("all", "--quick", "--out", str(out))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


def records(name: str, arm: str) -> list[dict]:
    return json.loads(Path(f"build/studies/{name}-quick/{arm}-0.json").read_text())["records"]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_writes_its_page_its_numbers_and_its_figure(pages, name):
    rows = list(csv.DictReader((pages / f"{name}.csv").open()))
    assert [row["arm"] for row in rows] == [arm.name for arm in STUDIES[name].arms]
    text = (pages / f"{name}.md").read_text()
    assert f"megasao study {name} --seeds 1 --quick" in text and all(f"`{row['arm']}`" in text for row in rows)
    assert (pages / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", STUDIES)
def test_every_number_of_every_step_is_finite(pages, name):
    for arm in STUDIES[name].arms:
        for record in records(name, arm.name):
            assert all(value is None or math.isfinite(value) for value in record.values()), (arm.name, record)


def test_arms_of_a_seed_start_from_one_policy(pages):
    for name in ("collapse", "ablation", "staleness"):
        assert len({records(name, arm.name)[0]["evaluation/sampled"] for arm in STUDIES[name].arms}) == 1


def test_spo_with_alpha_one_is_the_naive_loss_bit_for_bit(pages):
    assert records("collapse", "spo_alpha_1") == records("collapse", "naive")
    assert records("collapse", "spo_alpha_0") != records("collapse", "naive")


def test_asympo_is_balanced_at_every_step_and_the_naive_loss_is_not(pages):
    def worst(arm: str) -> float:
        steps = records("collapse", arm)
        return max(abs(one["actor/positive_loss"] + one["actor/negative_loss"]) for one in steps)

    assert worst("asympo") < 1e-6
    assert worst("naive") > 1e-3


def test_no_rollout_is_older_than_the_bound_and_the_oldest_reach_it(pages):
    for arm in STUDIES["staleness"].arms:
        bound = int(arm.name.rpartition("_")[2])
        oldest = [record["data/lag_max"] for record in records("staleness", arm.name)]
        assert max(oldest) == min(bound, max(record["version"] for record in records("staleness", arm.name)) // 2)


def test_fresh_rollouts_are_never_masked(pages):
    assert all(record.get("actor/masked_high") in (None, 0.0) for record in records("staleness", "sao_lag_0"))


def test_the_wanted_style_switches_where_the_config_says(pages):
    newest = [record["fleet/newest"] for record in records("online", "sao")]
    assert newest == sorted(newest) and newest[-1] > 640, "both switches lie inside the run"
    run = Run("sao", 0, records("online", "sao"), STUDIES["online"].config(("sao",), seed=0, work=Path(), quick=True))
    numbers = STUDIES["online"].numbers(run)
    assert {"steps to recover 1", "steps to recover 2"} <= set(numbers)


def test_what_is_finished_is_not_run_again_and_what_was_made_with_something_else_is(pages, tmp_path):
    """With another config, or with another model; it comes out the same."""
    directory = Path("build/studies/staleness-quick")
    finished, config, model = (directory / f"{arm}-0.json" for arm in ("sao_lag_0", "no_dis_lag_4", "no_dis_lag_0"))
    before, old = finished.stat().st_mtime_ns, {file: json.loads(file.read_text()) for file in (config, model)}
    other_config = old[config]["config"].replace("steps: 14", "steps: 15")
    for file, other in ((config, {"config": other_config}), (model, {"model": {"hidden": 1}})):
        assert old[file] | other != old[file]
        file.write_text(json.dumps(old[file] | other))
    done = study("staleness", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0 and "7 of 9 runs are there, 2 to go" in done.stdout
    assert {file: json.loads(file.read_text()) for file in (config, model)} == old, "the same numbers, bit for bit"
    assert finished.stat().st_mtime_ns == before
    assert (tmp_path / "staleness.csv").read_text() == (pages / "staleness.csv").read_text()


def test_a_study_that_does_not_exist_is_refused_with_the_nearest():
    done = study("colapse")
    assert done.returncode == 2 and "collapse" in done.stderr and "Traceback" not in done.stderr
