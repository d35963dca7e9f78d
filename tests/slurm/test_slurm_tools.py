"""The scripts that run one command on one node, on a real Slurm."""

from pathlib import Path

import pytest

from tests.benchmark_rows import write_rows
from tests.chat_checkpoint import bigram_checkpoint
from tests.engines.sglang_server import PYTHON, needs_sglang
from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.e2e

SMALL = "--cpus-per-task=2 --mem=2G"


def run(cluster: Cluster, directory: Path, name: str, *words: str) -> jobs.Job:
    """A job of a script, from submission to end; it is called in ``directory``, where its relative paths begin."""
    site = jobs.write_site(directory / "site.env", SBATCH_ARGS=f"--output={directory}/%j.out {SMALL}")
    job = jobs.submitted(cluster, jobs.script(cluster, site, name, *words, cwd=directory), directory)
    job.wait_for("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    return job


def test_a_checkpoint_is_converted_on_a_node(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    job = run(cluster, tmp_path, "convert.sh", "hf-to-megatron", str(model), "converted", "--parallel", "2")
    assert job.state == "COMPLETED", job.output
    assert "converted: " in job.output and (tmp_path / "converted" / "manifest.json").is_file()
    again = run(cluster, tmp_path, "convert.sh", "hf-to-megatron", str(model), "converted")
    assert again.state == "FAILED" and "converted" in again.output, "the tool's own exit code and message"


def test_a_checkpoint_is_measured_on_a_node(cluster: Cluster, tmp_path: Path) -> None:
    bigram_checkpoint(tmp_path / "model", {"\n": ["\\"], "\\": ["<|im_end|>"]})
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data", "gsm8k")
    changes = ["benchmarks.data=data", "benchmarks.samples=1", "benchmarks.max_tokens=256"]
    words = [str(jobs.ROOT / "configs" / "laptop.yaml"), *changes, "--checkpoint", "model", "--benchmarks", "gsm8k"]
    job = run(cluster, tmp_path, "eval.sh", *words, "--out", "results")
    assert job.state == "COMPLETED" and "gsm8k: weights v0" in job.output, job.output
    assert list((tmp_path / "results").rglob("*.arrow"))


@needs_sglang
@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_checkpoint_is_measured_on_a_node_by_a_server(cluster: Cluster, tmp_path: Path) -> None:
    bigram_checkpoint(tmp_path / "model", {"\n": ["\\"], "\\": ["<|im_end|>"]})
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data", "gsm8k")
    changes = ["benchmarks.data=data", "benchmarks.samples=1", "benchmarks.max_tokens=256", "rollout.engine=sglang"]
    config = [str(jobs.ROOT / "configs" / "laptop.yaml"), *changes, f"rollout.sglang.python={PYTHON}"]
    job = run(cluster, tmp_path, "eval.sh", *config, "--checkpoint", "model", "--benchmarks", "gsm8k", "--out", "out")
    assert job.state == "COMPLETED" and "gsm8k: weights v0" in job.output, job.output
    assert list((tmp_path / "out").rglob("*.arrow"))


def test_without_a_site_nothing_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("convert.sh", "eval.sh"):
        done = jobs.script(cluster, tmp_path / "none.env", name, "--help")
        assert done.returncode == 2 and "none.env cannot be read" in done.stderr
        site = jobs.write_site(tmp_path / "site.env", PYTHON="/nowhere/python")
        done = jobs.script(cluster, site, name, "--help")
        assert done.returncode == 2 and "MEGASAO_PYTHON=/nowhere/python is no program" in done.stderr
        done = jobs.script(cluster, jobs.write_site(tmp_path / "site.env"), name)
        assert done.returncode == 2 and "nothing was submitted" in done.stderr and "Usage: megasao" in done.stderr
    assert cluster.call("squeue", "-h") == ""
