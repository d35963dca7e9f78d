"""Whole jobs whose rollouts come from real SGLang servers, each a step of the job, on one node or on two."""

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from megasao.config.load import load_config
from megasao.observability.jsonl import read_metrics
from megasao.observability.status import describe_status
from megasao.transport.keys import load_server_key
from tests.e2e import runs
from tests.engines.sglang_server import PYTHON, ask, needs_sglang
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, wait_until

pytestmark = [pytest.mark.e2e, needs_sglang]

START_S = 400.0
"""Servers and trainer start together on two cores."""
STEPS = 3


def write_config(path: Path, model: Path, **sections: dict[str, Any]) -> Path:
    """One rollout worker with a server for training and one for evaluation."""
    sglang = {"python": str(PYTHON), "silence_timeout_s": 30.0, **sections.pop("sglang", {})}
    changes: dict[str, dict[str, Any]] = {
        "loop": {"steps": STEPS, "batch_size": 16, "batch_timeout_s": START_S},
        "rollout": {"workers": 1, "concurrency": 16, "engine": "sglang", "sglang": sglang},
        "evaluation": {"problems": 4, "every": 0, "sampled": False, "timeout_s": START_S},
        "supervision": {"start_timeout_s": START_S, "hang_timeout_s": START_S},
        "slurm": {"cpus_per_server": 1, "check_timeout_s": 200.0},
    }
    for name, section in sections.items():
        changes[name] = {**changes.get(name, {}), **section}
    return jobs.write_config(path, model, **changes)


def server(job: jobs.Job, index: int = 0, **variables: str) -> psutil.Process:
    """The process that a server's role has started."""
    (child,) = job.task("engine", "--index", str(index), **variables).children()
    return child


def wait_for_steps(job: jobs.Job, count: int) -> None:
    wait_until(lambda: len(job.steps) >= count or job.state != "RUNNING", START_S, job.explain)
    assert len(job.steps) >= count, job.explain()


@pytest.fixture(scope="module")
def served(cluster: Cluster, sparse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> jobs.Job:
    """A job under way; the first test sees it to its end, and a later one compares with it."""
    directory = tmp_path_factory.mktemp("served")
    config = write_config(directory / "config.yaml", sparse_model)
    return jobs.submit(cluster, jobs.write_site(directory / "site.env"), config)


@pytest.mark.timeout(1200)
def test_a_job_with_servers_and_one_that_is_killed(served: jobs.Job, cluster: Cluster) -> None:
    """In a synchronous run every token is of the step's own weights: servers that miss an update would be seen."""
    job = served
    wait_until(lambda: job.state == "RUNNING", 30, job.explain)
    wait_for_steps(job, 1)
    url, key = job.run.read_endpoints().engines["engine-0-0"], load_server_key(job.run.keys)
    assert (ask(url, "/model_info"), ask(url, "/model_info", key)) == (401, 200)
    server(job).kill()
    job.wait_for("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", seconds=START_S)
    assert job.state == "COMPLETED" and job.events == ["started", "finished"], job.explain()
    assert "restarting engine-0-0 (1 of 3)" in job.output, "a dead server was not replaced"
    assert [line["step"] for line in job.steps] == list(range(STEPS)), "the trainer did not go on"
    runs.check_books(job.run, STEPS)
    assert all(line["data/lag_max"] == 0 for line in job.steps)
    off = [line["actor/current_log_ratio_abs_max"] for line in job.steps[1:]]
    moved = [abs(line["actor/grad_norm"]) for line in job.steps[1:]]
    assert max(off) < 1e-4 and min(moved) > 0, (off, moved)
    shown = describe_status(job.run, load_config(job.run.config))
    assert "of 2 SGLang servers show signs of life; engine-0-0 started again 1x" in shown
    first, *_, last = read_metrics(job.run.evaluations)
    assert (first["newest_version"], last["oldest_version"], last["newest_version"]) == (0, STEPS - 1, STEPS - 1)
    job.wait_until_gone()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_preempted_job_with_servers_ends_alike(
    served: jobs.Job, cluster: Cluster, sparse_model: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", sparse_model)
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    wait_until(lambda: job.state == "RUNNING", 30, job.explain)
    wait_for_steps(job, 1)
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    wait_until(lambda: "requeued" in job.events, START_S, job.explain)
    job.wait_for("PENDING")
    assert job.history[-1].step is not None and 1 <= job.history[-1].step < STEPS, "it did not leave in the middle"
    job.start_again_now()
    job.wait_for("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", seconds=START_S)
    assert job.state == "COMPLETED", job.explain()
    assert job.events == ["started", "requeued", "started", "finished"]
    runs.check_books(job.run, STEPS)
    served.wait_for("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", seconds=START_S)
    assert jobs.batches(job) == jobs.batches(served)
    for ours, theirs in zip(job.steps, served.steps, strict=True):
        assert jobs.results(ours) == pytest.approx(jobs.results(theirs), rel=2e-3, abs=2e-4)
    last, before = jobs.results(job.steps[-1]), jobs.results(served.steps[-2])
    assert last != pytest.approx(before, rel=2e-3, abs=2e-4), "any step would do"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_dead_nodes_of_a_server_and_of_a_trainer(cluster: Cluster, sparse_model: Path, tmp_path: Path) -> None:
    """Each time the job goes on elsewhere, from the checkpoint of the step before, with servers of its weights."""
    config = write_config(
        tmp_path / "config.yaml",
        sparse_model,
        loop={"steps": 1000},
        checkpoint={"every": 1},
    )
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    dead: list[str] = []
    try:
        for number, role in enumerate(("engine", "trainer"), start=1):
            wait_for_steps_of_start(job, number)
            dead.append(job.node(role))
            cluster.kill_node(dead[-1])
            job.wait_for("PENDING")
            job.start_again_now()
        wait_for_steps_of_start(job, 3)
        assert not {*dead} & {*job.history[-1].nodes}, "a dead node was used again"
        off = [line.get("actor/current_log_ratio_abs_max") for line in job.steps]
        assert max(each for each in off if each is not None) < 1e-4, "servers did not have the step's weights"
        cluster.call("scancel", job.number)
        job.wait_for("CANCELLED")
        wait_until(lambda: not [one for one in job.left_over() if on_node(one) not in dead], 30, job.explain)
        runs.check_books(job.run, len(jobs.batches(job)))
    finally:
        for left in job.left_over():  # what Slurm cannot end on a node whose daemon is dead
            left.send_signal(signal.SIGKILL)
        for node in dead:
            cluster.start_node(node)
    wait_until(lambda: cluster.idle() == len(cluster.nodes), 120, lambda: cluster.call("sinfo", "-N", "-l"))


def wait_for_steps_of_start(job: jobs.Job, number: int) -> None:
    """Until a step was trained after the job's start ``number``."""
    wait_until(lambda: job.events.count("started") == number, START_S, job.explain)
    began = [event.time for event in job.history if event.event == "started"][-1]
    wait_until(lambda: bool(job.steps) and job.steps[-1]["time"] > began, START_S, job.explain)


def on_node(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("SLURMD_NODENAME")
    except psutil.Error:
        return None


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_servers_of_two_nodes(cluster: Cluster, sparse_model: Path, tmp_path: Path) -> None:
    """One of a server's nodes dies and takes the server down, which is replaced; scancel leaves nothing."""
    config = write_config(
        tmp_path / "config.yaml",
        sparse_model,
        sglang={"server_args": {"tp_size": 2}},
        loop={"steps": 1000},
        slurm={"ranks_per_node": 2, "rollout_nodes": 4, "nodes_per_server": 2},
    )
    family = "ipv6" if Path("/proc/net/if_inet6").exists() else "ipv4"
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env", ADDRESS_FAMILY=family), config)
    wait_until(lambda: job.state == "RUNNING", 30, job.explain)
    wait_for_steps(job, 2)
    endpoints = job.run.read_endpoints()
    assert ("[::1]" in endpoints.engines["engine-0-0"]) is (family == "ipv6")
    assert ("[::1]" in endpoints.meetings["engine-0-0"]) is (family == "ipv6")
    first, second = server(job, SLURM_PROCID="0"), server(job, SLURM_PROCID="1")
    assert first.environ()["SLURMD_NODENAME"] != second.environ()["SLURMD_NODENAME"]
    second.kill()
    wait_until(lambda: "restarting engine-0-0 (1 of 3)" in job.output, 60, job.explain)
    reached = len(job.steps)
    wait_for_steps(job, reached + 2)
    cluster.call("scancel", job.number)
    job.wait_for("CANCELLED")
    job.wait_until_gone()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_launcher_that_is_killed_leaves_no_server(cluster: Cluster, sparse_model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", sparse_model, loop={"steps": 1000})
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    wait_until(lambda: job.state == "RUNNING", 30, job.explain)
    beats = [job.run.heartbeat(name) for name in ("engine-0-0", "engine-0-evaluation")]
    wait_until(lambda: all(beat.exists() for beat in beats), START_S, job.explain)
    left = [process for index in range(2) for process in (server(job, index), *server(job, index).children())]
    assert len(left) > 3, "a server is more than one process"
    job.task("slurm-job").send_signal(signal.SIGKILL)
    job.wait_for("FAILED", "CANCELLED", "COMPLETED")
    job.wait_until_gone()
    assert not [process for process in left if alive(process)]


def alive(process: psutil.Process) -> bool:
    """Whether it runs; what has ended may stay as a zombie until its new parent looks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
