"""The benchmarks run; what they measure is nobody's business here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megasao.ops.extension import load_extension

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(load_extension().problem is not None, reason="no compiled operators")
def test_kernels(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert "memory bound" in run("kernels.py", "--quick", "--json", str(report))
    assert json.loads(report.read_text())["dis/20000"]["fused"] > 0


def test_conversion(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert "hf-to-megatron, 2 at a time" in run("conversion.py", "--gb=0.01", "--json", str(report))
    assert json.loads(report.read_text())["rows"]["verify"]["gb"] > 0.01


def test_logprobs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--tokens=16", "--hidden=8", "--vocabulary=500", "--chunks", "4")
    run("logprobs.py", *sizes, "--json", str(report))
    rows = json.loads(report.read_text())["rows"]
    assert rows["plain"]["loss"] == pytest.approx(rows["4"]["loss"], rel=1e-5)


def test_weights(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert "paused: embedded" in run("weights.py", "--gb=0.005", "--repeats=1", "--json", str(report))
    found = json.loads(report.read_text())[0]
    assert set(found["rows"]) == {"stream", "disk", "distributed", "embedded", "bare gloo broadcast", "bare file write"}
    assert set(found["parts"]) == {"collectives", "copy and checksums", "receiver's checksums", "messages"}


def test_training_step(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert "times the packed step" in run("training_step.py", "--quick", "--repeats=1", "--json", str(report))
    found = json.loads(report.read_text())
    assert found["padded"]["tokens"] > 2 * found["packed"]["tokens"]
    assert 0 < found["packed"]["share"] < 1


def test_background_evaluation(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    quick = ("--seconds=1", "--turn=0.1", "--repeats=1")
    assert "beside evaluations / alone" in run("background_evaluation.py", *quick, "--json", str(report))
    found = json.loads(report.read_text())
    assert found["evaluation_turns"] > 0 and min(found["alone"] + found["beside evaluations"]) > 0


@pytest.mark.full
def test_evaluation_share(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run("evaluation_share.py", "--steps=20", "--json", str(report))
    found = json.loads(report.read_text())
    assert found["0"][0]["evaluations"] == 0 < found["1"][0]["evaluations"]
    assert all(min(one["processors"].values()) > 0 for every in "01" for one in found[every])


def test_controller(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert "131072 controller" in run("controller.py", "--megabytes=1", "--json", str(report))
    assert json.loads(report.read_text())["1024"]["trajectories"] > 2


@pytest.mark.full
def test_modes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run("modes.py", "--steps=7", "--repeats=1", "--json", str(report))
    assert json.loads(report.read_text())["sync"][0]["lag"] == 0
