"""ASymPO on the wire: no log-probs and no weight versions are asked for, recorded, carried or stored; DIS beside it
shows the difference.

A real controller, its leases as bytes on a real socket, episodes on an engine that says what it was asked for.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from test_episode import Echo, codec, says  # noqa: F401

from megasao.config import Config
from megasao.config.load import load_config
from megasao.config.rundir import RunDirectory
from megasao.controller.recovery import Opened
from megasao.environments.base import StepResult
from megasao.rollout.episode import EpisodeRunner
from megasao.trajectories.ipc import from_ipc
from megasao.trajectories.schema import to_batch, to_ipc
from megasao.transport.client import ControllerClient
from megasao.transport.codec import encode
from megasao.transport.messages import BatchRequest, Fetched, FetchRequest, Leases, Trajectories
from tests.controller.controller_support import PATIENCE_S, WireWorker, free_address, make_run, serving, trajectory

CONFIGS = Path(__file__).parents[2] / "configs"
TRAINER, WORKER = 6, 4
"""Weight versions: the worker's are a little behind."""


def asympo_or_dis(name: str) -> Config:
    changes = ["loop.batch_size=16", "buffer.max_trajectories=64", "evaluation.problems=1", "loop.max_stale_share=1"]
    return load_config(CONFIGS / "laptop.yaml", [str(CONFIGS / "algorithms" / f"{name}.yaml"), *changes])


def one_episode(tmp_path, codec, name: str):  # noqa: F811
    """(raw lease, raw trajectories message, row as the trainer fetches it, what the engine was asked)."""
    address = free_address()
    environment = Echo(StepResult("", 1.0, True))
    config = asympo_or_dis(name)
    engine = says(codec, "2" * 12 + "</answer>")
    with serving(make_run(tmp_path / name, address), config, environment), WireWorker(address) as worker:
        trainer = ControllerClient(address, identity="trainer-0", high_water_mark=64)
        worker.hello(free=1, version=WORKER)
        trainer.request(BatchRequest(0, TRAINER), timeout_s=PATIENCE_S)
        [lease] = worker.get_leases(1)
        runner = EpisodeRunner.build(environment, engine, codec, config.environment)
        trajectory = asyncio.run(runner.run(lease))
        payload = to_ipc(to_batch([trajectory]))
        assert worker.submit_acked([trajectory], payload=payload) == {}
        fetched, stored = trainer.request(FetchRequest([lease.lease_id]), timeout_s=PATIENCE_S)
        assert isinstance(fetched, Fetched)
        trainer.close()
    opened = Opened(RunDirectory(tmp_path / name / "run"))
    [summary] = opened.state(config, environment, now=0.0).batches.buffer.waiting()
    opened.close()
    assert summary.oldest_version == (WORKER if name == "asympo" else 0), "also after a restart"
    sent = encode(Trajectories(1, [lease.lease_id]), payload)
    return encode(Leases([lease]))[0], sent, from_ipc(stored), engine.requests


def test_what_travels(tmp_path, codec):  # noqa: F811
    lease, frames, row, asked = one_episode(tmp_path, codec, "asympo")
    dis_lease, dis_frames, dis_row, dis_asked = one_episode(tmp_path, codec, "sao")

    [said] = msgspec.msgpack.decode(lease)["leases"]
    [dis_said] = msgspec.msgpack.decode(dis_lease)["leases"]
    assert said["want_logprobs"] is False and dis_said.get("want_logprobs", True) is True
    assert [r.sampling.return_logprobs for r in asked] == [False]
    assert [r.sampling.return_logprobs for r in dis_asked] == [True]
    assert row.column("rollout_logprobs").to_pylist() == [None]
    assert dis_row.column("rollout_logprobs").null_count == 0
    assert said["want_versions"] is False and dis_said.get("want_versions", True) is True
    assert row.column("weight_versions").to_pylist() == [None]
    assert dis_row.column("weight_versions").to_pylist() == [[{"start": 0, "version": 0}]]
    assert said["min_version"] == WORKER and said["lease_id"].endswith(f".v{WORKER}")
    assert dis_said["min_version"] == TRAINER - 4 and ".v" not in dis_said["lease_id"]
    assert row.column("tokens") == dis_row.column("tokens"), "the episodes are the same"
    tokens = len(row.column("tokens")[0])
    saved = sum(map(len, dis_frames)) - sum(map(len, frames))
    bitmaps = 2 * 16  # a column with nulls says which
    span = 4 + 8
    assert saved >= 4 * tokens + span - bitmaps, f"{saved} bytes fewer for {tokens} tokens"


@pytest.mark.parametrize("name", ["asympo", "spo", "naive", "gpg"])
def test_nobody_asks_for_logprobs_or_versions(name: str) -> None:
    assert not asympo_or_dis(name).wants_logprobs and not asympo_or_dis(name).wants_versions
    assert asympo_or_dis("grpo").wants_logprobs and asympo_or_dis("grpo").wants_versions


def test_a_controller_that_needs_versions_refuses_a_row_without(tmp_path, codec):  # noqa: F811
    address = free_address()
    with serving(make_run(tmp_path, address), asympo_or_dis("sao")), WireWorker(address) as worker:
        trainer = ControllerClient(address, identity="trainer-0", high_water_mark=64)
        worker.hello(free=1)
        trainer.request(BatchRequest(0, 0), timeout_s=PATIENCE_S)
        [lease] = worker.get_leases(1)
        refused = worker.submit_acked([replace(trajectory(lease), weight_versions=None)])
        assert refused == {lease.lease_id: "weight_versions: null, and the objective needs them"}
        trainer.close()
