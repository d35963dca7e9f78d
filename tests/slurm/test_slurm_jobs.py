"""Whole jobs on a real Slurm: from the script to the summary, preempted and resumed, killed and resumed."""

import dataclasses
import signal
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megasao.config.load import load_config
from megasao.observability.status import describe_status
from megasao.transport.client import ControllerClient
from megasao.transport.keys import CurveKeys, load_keys
from megasao.transport.messages import Status, StatusRequest
from tests.e2e import runs
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.jobs import batches, results

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def whole(cluster: Cluster, steady_model: Path, tmp_path_factory: pytest.TempPathFactory) -> jobs.Job:
    """A job under way; the first test sees it to its end, and a later one compares with it."""
    directory = tmp_path_factory.mktemp("whole")
    config = jobs.write_config(directory / "config.yaml", steady_model)
    return jobs.submit(cluster, jobs.write_site(directory / "site.env"), config)


def test_a_whole_job(whole: jobs.Job, cluster: Cluster) -> None:
    whole.wait_for_steps(1)
    check_strangers(whole)
    check_environment(whole)
    victim = whole.task("rollout", "--index", "1")
    victim.kill()
    whole.wait_for("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    assert whole.state == "COMPLETED", whole.explain()
    assert whole.events == ["started", "finished"]
    assert [line["step"] for line in whole.steps] == list(range(jobs.STEPS))
    runs.check_books(whole.run, jobs.STEPS)
    assert "restarting rollout-1 (1 of 3)" in whole.output, "a dead worker was not replaced"
    assert "policy:" in whole.output and (whole.run.path / "summary.json").exists()
    whole.wait_until_gone()
    shown = describe_status(whole.run, load_config(whole.run.config))
    assert f"{jobs.STEPS} of {jobs.STEPS}, weight version {jobs.STEPS - 1}" in shown
    assert f"{whole.number}: finished" in shown and "restarting rollout-1" in shown
    assert "2 embedded in rollout workers show signs of life; rollout-1 started again 1x" in shown


def check_environment(job: jobs.Job) -> None:
    """A task has what it was given by name, and nothing else of the batch script's."""
    task = job.task("trainer", "--stage", "rl", SLURM_PROCID="1").environ()
    assert (task["GLOO_SOCKET_IFNAME"], task["NCCL_SOCKET_IFNAME"], task["OMP_NUM_THREADS"]) == ("lo", "lo", "1")
    assert task["MASTER_ADDR"] == "127.0.0.1" and task["SLURM_STEP_NUM_TASKS"] == "2"
    batch = job.task("slurm-job").environ()
    assert "MEGASAO_INTERFACE" in batch and not [name for name in task if name.startswith("MEGASAO_")]


def check_strangers(job: jobs.Job) -> None:
    """While the run is on: nobody without its keys gets an answer from its controller."""
    assert [stat.S_IMODE(file.stat().st_mode) for file in job.run.keys.iterdir()] == [0o600]
    keys, own = load_keys(job.run.keys), CurveKeys.generate()
    address = job.run.read_endpoints().controller
    with ControllerClient(address, keys=keys, identity="friend") as friend:
        answer, _ = friend.request(StatusRequest(), timeout_s=60)
        assert isinstance(answer, Status)
    for stranger in (None, own, dataclasses.replace(own, server_public=keys.server_public)):
        client = ControllerClient(address, keys=stranger, identity="stranger", resend_s=0.5)
        with client, pytest.raises(TimeoutError):
            client.request(StatusRequest(), timeout_s=1.0)


def test_a_job_that_is_preempted_goes_on_and_ends_alike(
    whole: jobs.Job, cluster: Cluster, steady_model: Path, tmp_path: Path
) -> None:
    """The signal before the time limit, sent by hand; the whole job of before is what it must end like.

    This one runs on IPv6, where there is any.
    """
    config = jobs.write_config(tmp_path / "config.yaml", steady_model)
    family = "ipv6" if Path("/proc/net/if_inet6").exists() else "ipv4"
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env", ADDRESS_FAMILY=family), config)
    job.wait_for_steps(2)
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    wait_until(lambda: "requeued" in job.events, jobs.JOB_S, job.explain)
    assert ("tcp://[::1]:" in job.run.read_endpoints().controller) is (family == "ipv6")
    job.wait_for("PENDING")
    left = int((job.run.checkpoints / "latest").read_text().removeprefix("step_"))
    assert 2 <= left < jobs.STEPS, "it did not leave in the middle"
    before = batches(job)
    job.start_again_now()
    job.wait_for("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    assert job.state == "COMPLETED", job.explain()
    assert job.events == ["started", "requeued", "started", "finished"]
    starts = [event.restart for event in job.history if event.event == "started"]
    assert starts == [0, 1] and job.history[1].step == left
    runs.check_books(job.run, jobs.STEPS)
    assert before == {step: names for step, names in batches(job).items() if step in before}

    assert batches(job) == batches(whole)
    for ours, theirs in zip(job.steps, whole.steps, strict=True):
        assert results(ours) == pytest.approx(results(theirs), rel=2e-3, abs=2e-4)
    assert results(job.steps[-1]) != pytest.approx(results(whole.steps[-2]), rel=2e-3, abs=2e-4), "any step would do"
    trained = distance(job.run.final_policy, steady_model)
    assert trained > 1e-4 and distance(job.run.final_policy, whole.run.final_policy) < 0.01 * trained


@pytest.mark.full
def test_a_separate_critic_on_its_own_node_ends_alike(
    whole: jobs.Job, cluster: Cluster, steady_model: Path, tmp_path: Path
) -> None:
    """Preempted on the way: its part of the checkpoint is loaded again, and the numbers are those of the whole job."""
    critic = {"placement": "separate", "parallel": {"ranks": 1}}
    config = jobs.write_config(tmp_path / "config.yaml", steady_model, critic=critic)
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    job.wait_for_steps(2)
    assert job.task("critic").environ()["SLURM_STEP_NUM_TASKS"] == "1"
    assert job.node("critic") not in {job.node("trainer"), job.node("rollout")}
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)
    wait_until(lambda: "requeued" in job.events, jobs.JOB_S, job.explain)
    job.wait_for("PENDING")
    job.start_again_now(components=4)
    job.wait_for("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED")
    assert job.state == "COMPLETED", job.explain()
    assert job.events == ["started", "requeued", "started", "finished"]
    assert batches(job) == batches(whole)
    for ours, theirs in zip(job.steps, whole.steps, strict=True):
        assert ours["critic/seconds"] > 0
        compared = {name: value for name, value in results(ours).items() if name != "critic/seconds"}
        assert compared == pytest.approx(results(theirs), rel=2e-3, abs=2e-4)
    job.wait_until_gone()


@pytest.mark.full
def test_a_run_that_is_longer_than_its_jobs(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Nobody but Slurm sends the signal before the limit of two minutes, as often as the run needs."""
    path, limits = tmp_path / "config.yaml", {"time_limit_minutes": 2, "leave_before_limit_s": 40}
    config = jobs.write_config(path, model, loop={"steps": 100_000}, slurm=limits)
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    wait_until(lambda: "requeued" in job.events, jobs.JOB_S, job.explain)
    job.wait_for("PENDING")
    started, requeued = job.history
    assert requeued.step is not None and requeued.step >= 1, "it left without a checkpoint"
    assert requeued.time - started.time < 60 * limits["time_limit_minutes"] and requeued.detail == "asked to leave"
    steps = requeued.step + 4  # the end comes into sight; a run may change it between two jobs
    jobs.write_config(path, model, loop={"steps": steps}, slurm=limits)
    while job.state != "COMPLETED":
        job.start_again_now()
        job.wait_for("RUNNING")
        job.wait_for("COMPLETED", "PENDING", "FAILED", "TIMEOUT")
        assert job.state in ("COMPLETED", "PENDING"), job.explain()
    assert job.events == [*["started", "requeued"] * (len(job.events) // 2 - 1), "started", "finished"]
    starts = [event.restart for event in job.history if event.event == "started"]
    assert starts == list(range(len(starts))) and job.history[-1].step == steps
    assert [line["step"] for line in job.steps] == list(range(steps)) and "TIME LIMIT" not in job.output
    runs.check_books(job.run, steps)
    job.wait_until_gone()


def distance(one: Path, other: Path) -> float:
    """Mean absolute difference of two checkpoints' weights."""
    mine, theirs = (
        {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for directory in (one, other)
    )
    assert mine.keys() == theirs.keys()
    differences = [(mine[name] - theirs[name]).abs().flatten() for name in mine]
    return float(torch.cat(differences).mean())


def test_a_dead_node_requeues_the_job_and_scancel_leaves_nothing(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = jobs.write_config(tmp_path / "config.yaml", model, loop={"steps": 1000}, checkpoint={"every": 1})
    job = jobs.submit(cluster, jobs.write_site(tmp_path / "site.env"), config)
    job.wait_for_steps(2)
    node = job.node("rollout")
    try:
        cluster.kill_node(node)
        job.wait_for("PENDING")
        job.start_again_now()
        job.wait_for("RUNNING")
        reached = len(job.steps)
        wait_until(lambda: job.events.count("started") == 2, jobs.JOB_S, job.explain)
        assert node not in job.history[-1].nodes, "the dead node was used again"
        assert job.history[-1].step is not None and job.history[-1].step >= 1
        job.wait_for_steps(reached + 1)
        cluster.call("scancel", job.number)
        job.wait_for("CANCELLED")
        job.wait_until_gone(except_on=node)
        runs.check_books(job.run, len(batches(job)))
        assert job.events[-1] in ("started", "stopped")
    finally:
        for left in job.left_over():  # what Slurm cannot end on a node whose daemon is dead
            left.send_signal(signal.SIGKILL)
        cluster.start_node(node)
    wait_until(lambda: cluster.idle() == len(cluster.nodes), 120, lambda: cluster.call("sinfo", "-N", "-l"))
