"""A real worker process between the real controller process and a trainer's connections in the test.

The test plays the trainer: it publishes weights, asks for batches and evaluations, and kills what it likes.
"""

import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megasao.config import Config
from megasao.config.load import dump_config
from megasao.config.rundir import RunDirectory
from megasao.launch.prepare import new_endpoints
from megasao.trajectories.ipc import from_ipc
from megasao.trajectories.schema import from_batch
from megasao.transport.client import ControllerClient
from megasao.transport.messages import (
    BatchRequest,
    EvaluateRequest,
    FetchRequest,
    FinishRequest,
    Manifest,
    StatusRequest,
)
from megasao.weights.publisher import WeightPublisher

pytestmark = pytest.mark.e2e

WAIT_S = 120.0
TOOL = Path(__file__).parents[2] / "tools" / "make_laptop_model.py"


class World:
    """The run directory, its processes, and the trainer's connections."""

    def __init__(self, root: Path) -> None:
        model = root / "model"
        runpy.run_path(str(TOOL))["main"]([str(model), "--hidden", "32", "--moe-hidden", "16", "--experts", "4"])
        self.config = Config.model_validate(
            {
                "run": {"name": "worker", "directory": str(root)},
                "model": {"path": str(model)},
                "actor": {"optimizer": {"lr": 1e-4}},
                "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 0},
                "loop": {"steps": 10, "batch_size": 16},
                "rollout": {"concurrency": 16, "embedded": {"slots": 16}},
                "evaluation": {"problems": 20, "sampled": False},
                "transport": {"heartbeat_s": 0.3, "dead_after_s": 60.0},
            }
        )
        self.run = RunDirectory(root / "worker")
        self.run.create()
        self.run.config.write_text(dump_config(self.config))
        endpoints = new_endpoints(self.config)
        self.run.write_endpoints(endpoints)
        self.processes: dict[str, subprocess.Popen] = {}
        self.client = ControllerClient(endpoints.controller)
        self.publisher = WeightPublisher(endpoints.weights, config=self.config.transport)
        self.tensors = load_file(model / "model.safetensors")

    def start(self, role: str) -> None:
        log = (self.run.logs / f"{role}.log").open("ab")
        command = [sys.executable, "-m", "megasao", role, "--run", str(self.run.path)]
        self.processes[role] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, role: str) -> None:
        process = self.processes.pop(role)
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)

    def batch(self, step: int, version: int) -> list:
        """The trajectories of a step, checked against their manifest."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            reply, _ = self.client.request(BatchRequest(step, version), timeout_s=WAIT_S)
            if isinstance(reply, Manifest):
                names = [entry.trajectory_id for entry in reply.entries]
                _, payload = self.client.request(FetchRequest(names), timeout_s=WAIT_S)
                found = from_batch(from_ipc(payload))
                assert [t.trajectory_id for t in found] == names
                return found
        raise AssertionError(f"no batch of step {step} within {WAIT_S} s: {self.logs()}")

    def wait_for(self, what, condition) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {WAIT_S} s: {self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.run.logs.glob("*.log")))

    def close(self) -> None:
        for role in list(self.processes):
            self.kill(role)
        self.client.close()
        self.publisher.close()


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.close()


def test_batches_evaluations_kills_and_a_clean_stop(world):
    world.start("controller")
    world.start("rollout")
    world.publisher.publish(0, world.tensors)
    first = world.batch(0, 0)
    assert len(first) == len({t.prompt_id for t in first}) == 16
    assert {t.newest_version for t in first} == {0}
    for trajectory in first:
        acted = [
            lp for lp, is_action in zip(trajectory.rollout_logprobs, trajectory.action_mask, strict=True) if is_action
        ]
        assert all(lp < 0 for lp in acted) and len(trajectory.tokens) <= 110

    # New weights reach the engine while episodes are in flight, and an evaluation is labelled with them.
    world.publisher.publish(1, world.tensors)
    world.publisher.wait()
    world.client.request(EvaluateRequest(step=1, version=1), timeout_s=WAIT_S)
    world.wait_for("the evaluation", lambda: world.run.evaluations.exists() and world.run.evaluations.read_text())
    line = json.loads(world.run.evaluations.read_text().splitlines()[0])
    assert (line["problems"], line["failures"], line["mode"]) == (20, 0, "greedy")
    assert line["oldest_version"] == line["newest_version"] == 1

    # kill -9 of the worker: its leases go back, a new worker goes on.
    world.kill("rollout")
    world.start("rollout")
    second = world.batch(1, 1)

    # kill -9 of the controller: nothing acknowledged is lost, nothing is used twice, the same worker goes on.
    world.kill("controller")
    world.start("controller")
    assert [t.trajectory_id for t in world.batch(1, 1)] == [t.trajectory_id for t in second]
    rest = [world.batch(step, 1) for step in (2, 3, 4)]
    used = [t for batch in (first, second, *rest) for t in batch]
    assert len({t.prompt_id for t in used}) == len({t.trajectory_id for t in used}) == 5 * 16

    assert world.processes["rollout"].poll() is None
    world.client.request(StatusRequest(), timeout_s=WAIT_S)
    world.client.request(FinishRequest("the test is over"), timeout_s=WAIT_S)
    for role in ("rollout", "controller"):
        assert world.processes[role].wait(WAIT_S) == 0, world.logs()


def test_a_worker_without_a_controller_fails_and_says_which(world):
    settings = world.config.model_dump()
    settings["supervision"]["start_timeout_s"] = 4.0  # the weights come well within it
    world.run.config.write_text(dump_config(Config.model_validate(settings)))
    world.publisher.publish(0, world.tensors)
    world.start("rollout")
    assert world.processes["rollout"].wait(WAIT_S) != 0
    address = world.run.read_endpoints().controller
    assert f"no controller at {address} answered" in world.logs()
