"""A whole job on a real Slurm, from the script to the summary."""

from pathlib import Path

from tests.slurm import jobs
from tests.slurm.cluster import Cluster


def test_a_whole_job(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = jobs.write_config(tmp_path / "config.yaml", model)
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    job.wait_for("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    assert job.state == "COMPLETED", job.explain()
    assert job.events == ["started", "finished"]
    assert [line["step"] for line in job.steps] == list(range(jobs.STEPS))
    print(job.explain())
