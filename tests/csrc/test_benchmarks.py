"""The benchmarks run; what they measure is nobody's business here."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megasao.ops.extension import load_extension

ROOT = Path(__file__).parents[2]


QUICK: dict[str, tuple[str, ...]] = {
    "kernels.py": ("--quick",),
    "conversion.py": ("--gb=0.01",),
    "logprobs.py": ("--tokens=16", "--hidden=8", "--vocabulary=500", "--chunks", "4"),
    "weights.py": ("--gb=0.005", "--repeats=1"),
    "training_step.py": ("--quick", "--repeats=1"),
    "background_evaluation.py": ("--seconds=2", "--turn=0.1", "--repeats=1"),
    "evaluation_share.py": ("--steps=20",),
    "controller.py": ("--megabytes=1",),
    "modes.py": ("--steps=7", "--repeats=1"),
}
Ran = tuple[str, Any]
"""What a benchmark printed, and its report."""


def run(script: str, directory: Path) -> Ran:
    report = (directory / script).with_suffix(".json")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *QUICK[script], "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(report.read_text())


@pytest.fixture(scope="module")
def begun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, "Future[Ran]"]]:
    """The benchmarks of the tests that were chosen, two at a time: most of each is its start."""
    chosen = {each.name.removeprefix("test_") + ".py" for each in request.session.items if each.path == request.path}
    directory = tmp_path_factory.mktemp("reports")
    with ThreadPoolExecutor(2) as pool:
        yield {script: pool.submit(run, script, directory) for script in QUICK if script in chosen}


@pytest.fixture
def ran(request: pytest.FixtureRequest, begun: dict[str, "Future[Ran]"]) -> Ran:
    """The benchmark that the test is named after."""
    return begun[request.node.name.removeprefix("test_") + ".py"].result()


@pytest.mark.skipif(load_extension().problem is not None, reason="no compiled operators")
def test_kernels(ran: Ran) -> None:
    said, report = ran
    assert "memory bound" in said and report["dis/20000"]["fused"] > 0


def test_conversion(ran: Ran) -> None:
    said, report = ran
    assert "hf-to-megatron, 2 at a time" in said and report["rows"]["verify"]["gb"] > 0.01


def test_logprobs(ran: Ran) -> None:
    rows = ran[1]["rows"]
    assert rows["plain"]["loss"] == pytest.approx(rows["4"]["loss"], rel=1e-5)


def test_weights(ran: Ran) -> None:
    said, [report] = ran
    assert "paused: embedded" in said
    assert set(report["rows"]) == {
        *("stream", "disk", "distributed", "distributed, gloo", "distributed, TCP", "embedded"),
        *("bare gloo broadcast", "bare file write"),
    }
    assert set(report["parts"]) == {"collectives", "copy and checksums", "receiver's checksums", "messages"}


def test_training_step(ran: Ran) -> None:
    said, report = ran
    assert "times the packed step" in said and report["padded"]["tokens"] > 2 * report["packed"]["tokens"]
    assert 0 < report["packed"]["share"] < 1


def test_background_evaluation(ran: Ran) -> None:
    said, report = ran
    assert "beside evaluations / alone" in said
    assert report["evaluation_turns"] > 0 and min(report["alone"] + report["beside evaluations"]) > 0


@pytest.mark.full
def test_evaluation_share(ran: Ran) -> None:
    _, report = ran
    assert report["0"][0]["evaluations"] == 0 < report["1"][0]["evaluations"]
    assert all(min(one["processors"].values()) > 0 for every in "01" for one in report[every])


def test_controller(ran: Ran) -> None:
    said, report = ran
    assert "131072 controller" in said and report["1024"]["trajectories"] > 2


@pytest.mark.full
def test_modes(ran: Ran) -> None:
    assert ran[1]["sync"][0]["lag"] == 0
