"""Steps in containers: another root for every task, in mount namespaces, by programs that every Debian has.

Apptainer, enroot and the plugin pyxis are not on this machine: what they are told is in golden files.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm import jobs
from tests.slurm.cluster import Cluster, wait_until

pytestmark = pytest.mark.e2e

_SCRIPT = """\
#!/bin/sh
# Runs its arguments in the image: a root directory with nothing but what is mounted here. It ends as they do, and gets
# their signals, for it becomes them.
set -eu
mount --make-rprivate /
mount --bind {image} {image}
for part in {parts}; do mkdir -p {image}$part; mount --rbind $part {image}$part; done
mkdir -p {image}/opt/venv {image}/opt/megasao {image}/tmp
mount --bind {venv} {image}/opt/venv
mount --bind {source} {image}/opt/megasao
export PYTHONPATH=/opt/megasao
exec chroot {image} "$@"
"""


def write_container(directory: Path, *shared: Path) -> str:
    """A command that runs what follows it in a container with ``shared`` directories; the text of STEP_COMMAND."""
    image = directory / "image"
    image.mkdir()
    for link in ("bin", "lib", "lib64", "sbin"):
        (image / link).symlink_to(f"usr/{link}")
    parts = ["/usr", "/etc", "/proc", "/sys", "/dev", sys.base_prefix, *map(str, shared)]
    outer = [part for part in dict.fromkeys(parts) if part == "/usr" or not part.startswith("/usr/")]
    script = directory / "container"
    script.write_text(_SCRIPT.format(image=image, parts=" ".join(outer), venv=sys.prefix, source=jobs.ROOT))
    script.chmod(0o755)
    return f"unshare --mount {script}"


def why_not() -> str | None:
    """Why no step can have another root here; None where it can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return done.stderr.strip() or None


@pytest.mark.full
def test_a_job_in_containers(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Every step runs on the Python of the image, and the signal to leave reaches the trainer there."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    config = jobs.write_config(shared(tmp_path) / "config.yaml", model)
    job = jobs.submit(cluster, write_site(tmp_path, model, shared(tmp_path)), config)
    job.wait_for_steps(1)
    for words in (("trainer", "--stage", "rl"), ("rollout", "--index", "1"), ("controller",)):
        task = job.task(*words)
        assert task.cmdline()[0] == "/opt/venv/bin/python" and Path(f"/proc/{task.pid}/root/opt/venv/bin").exists()
    assert job.task("slurm-job").cmdline()[0] == sys.executable, "the launcher needs no container"
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    wait_until(lambda: "requeued" in job.events, jobs.JOB_S, job.explain)
    assert job.history[-1].step is not None and 1 <= job.history[-1].step <= jobs.STEPS, "no checkpoint from inside"
    job.wait_for("PENDING")
    cluster.call("scancel", job.number)
    job.wait_until_gone()


@pytest.mark.full
def test_what_a_container_lacks_is_named_by_every_node(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """The run directory, which was not mounted; and the plugin that a site counts on."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    config = jobs.write_config(shared(tmp_path) / "config.yaml", model)
    job = jobs.submit(cluster, write_site(tmp_path, model), config)
    job.wait_for("FAILED", "COMPLETED", "CANCELLED")
    assert job.state == "FAILED", job.explain()
    for node in ("n1", "n2", "n3", "n4"):
        assert f"{node}: gave no report" in job.output
        assert f"is not there on {node}: the run directory is not on a file system that all" in " ".join(
            job.output.split()
        ), job.output


def test_a_job_that_needs_pyxis_says_that_it_is_not_there(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    if "--container-image" in cluster.call("srun", "--help"):
        pytest.skip("pyxis is here")
    config = jobs.write_config(tmp_path / "config.yaml", model)
    site = jobs.write_site(tmp_path / "site.env", SRUN_ARGS="--container-image=/shared/megasao.sqsh")
    job = jobs.submit(cluster, site, config)
    job.wait_for("FAILED", "COMPLETED", "CANCELLED")
    assert job.state == "FAILED" and "does not know --container-image: the plugin pyxis" in job.output, job.output
    assert not job.run.path.exists(), "it made a run directory"


def shared(directory: Path) -> Path:
    """What the containers of a test see beside the model."""
    path = directory / "shared"
    path.mkdir(exist_ok=True)
    return path


def write_site(directory: Path, *mounted: Path) -> Path:
    return jobs.write_site(
        shared(directory) / "site.env",
        STEP_PYTHON="/opt/venv/bin/python",
        STEP_COMMAND=write_container(directory, *mounted),
    )
