"""What cannot work ends at once, and says where and why."""

import signal
from pathlib import Path

import msgspec
import pytest

from tests.slurm import jobs
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.e2e

CHECK_S = 30.0


def test_a_trainer_that_dies_takes_the_job_down(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = jobs.write_config(tmp_path / "config.yaml", model, loop={"steps": 1000})
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    job.wait_for_steps(1)
    job.task("trainer", "--stage", "rl", SLURM_PROCID="1").send_signal(signal.SIGABRT)
    job.wait_for("FAILED", "COMPLETED", "CANCELLED")
    assert job.state == "FAILED" and job.events == ["started", "failed"], job.explain()
    assert "Rank 1 died first; the last lines of" in job.output
    assert "Fatal Python error: Aborted" in job.output, "the log's last lines are not in the job's output"
    job.wait_until_gone()


def test_a_critic_that_dies_takes_the_job_down(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """In a world of its own, on a node of its own: its log is the one that is shown."""
    critic = {"placement": "separate", "parallel": {"ranks": 1}}
    config = jobs.write_config(tmp_path / "config.yaml", model, loop={"steps": 1000}, critic=critic)
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    job.wait_for_steps(1)
    job.task("critic", SLURM_PROCID="0").send_signal(signal.SIGABRT)
    job.wait_for("FAILED", "COMPLETED", "CANCELLED")
    assert job.state == "FAILED" and job.events == ["started", "failed"], job.explain()
    assert "Rank 0 died first; the last lines of" in job.output and "logs/critic-0.log" in job.output
    assert "Fatal Python error: Aborted" in job.output, "the log's last lines are not in the job's output"
    job.wait_until_gone()


def test_bad_nodes_are_named_before_anything_starts(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """One has another package; on another Python does not come to its first line, within a bound below a minute."""
    other = tmp_path / "other" / "msgspec-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: msgspec\nVersion: 0.0.1\n")
    hang = tmp_path / "hang"
    hang.mkdir()
    (hang / "sitecustomize.py").write_text("import time\n\ntime.sleep(600)\n")
    faults = {cluster.root / "faults" / "n3": other.parent, cluster.root / "faults" / "n4": hang}
    for fault, directory in faults.items():
        fault.write_text(f"export PYTHONPATH={directory}:{jobs.ROOT}\n")
    config = jobs.write_config(tmp_path / "config.yaml", model, slurm={"check_timeout_s": CHECK_S})
    try:
        job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
        job.wait_for("FAILED", "COMPLETED", "CANCELLED")
    finally:
        for fault in faults:
            fault.unlink()
    assert job.state == "FAILED", job.explain()
    assert f"n3: msgspec 0.0.1, but {msgspec.__version__} on 2 of 3 nodes" in job.output
    assert "n4: gave no report" in job.output
    assert f"nodes-rollout: not ended within {CHECK_S:g} s" in job.output, job.output
    assert not any(f"{node}: {what}" in job.output for node in ("n1", "n2") for what in ("msgspec", "gave no"))
    assert not list(job.run.logs.glob("trainer*")) and job.events == ["started", "failed"]


def test_a_site_with_a_wrong_interface_is_told_by_every_node(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = jobs.write_config(tmp_path / "config.yaml", model)
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env", INTERFACE="ib9"), config)
    job.wait_for("FAILED", "COMPLETED", "CANCELLED")
    assert job.state == "FAILED", job.explain()
    for node in ("n1", "n2", "n3", "n4"):
        assert f"{node}: no network interface 'ib9'; there are" in job.output, job.explain()


def test_a_site_that_cannot_be_is_refused_before_submitting(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = jobs.write_config(tmp_path / "config.yaml", model)
    for changes, reason in (
        ({"PYTHON": "/nowhere/python"}, "MEGASAO_PYTHON=/nowhere/python is no program"),
        ({"INTERFCE": "lo"}, "did you mean MEGASAO_INTERFACE"),
    ):
        done = jobs.command(cluster, jobs.write_site(tmp_path / "site.env", **changes), config)
        assert done.returncode == 2 and reason in " ".join(done.stderr.split()), done.stderr
    done = jobs.command(cluster, tmp_path / "none.env", config)
    assert done.returncode == 2 and "none.env cannot be read" in done.stderr
    assert cluster.call("squeue", "-h") == ""


def test_an_allocation_that_is_too_small_is_refused(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = jobs.write_config(tmp_path / "config.yaml", model)
    site = jobs.write_site(tmp_path / "site.env")
    # sbatch's own options, in place of the #SBATCH lines of the script.
    small = ["--nodes=1", "--cpus-per-task=2", "--mem=1G"]
    with_gpus = [":", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=1G", "--gres=gpu:1"]
    job = jobs.submit_with(cluster, site, config, [*small, *with_gpus, *with_gpus])
    job.wait_for("FAILED", "COMPLETED", "CANCELLED")
    assert job.state == "FAILED", job.output
    assert "trainer: 1 nodes, the config needs 2" in job.output and "--arguments" in job.output
    assert not job.run.path.exists(), "it made a run directory"
