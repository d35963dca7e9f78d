"""The weights of a server's node, as its role takes them: from two ranks, over the run's sockets, into a directory."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from share_world import Distributed
from weight_world import equal, free_address, publisher

from megasao.config.load import load_config
from megasao.config.rundir import Endpoints, RunDirectory
from megasao.rollout.engines.base import EngineError
from megasao.rollout.server_weights import NodeReceiver, server_nodes
from megasao.weights.messages import Carrier
from tests.conversion.support import write_family

LAPTOP = Path(__file__).parents[2] / "configs" / "laptop_sglang.yaml"
NAME, URL = "engine-0-0", "http://[::1]:1"


def run_of(tmp_path: Path, transport: str):
    model = write_family(tmp_path / "hf", "llama", "float32") if not (tmp_path / "hf").exists() else tmp_path / "hf"
    changes = [f"model.path={model}", f"run.directory={tmp_path}", "sft=null", f"weights.transport={transport}"]
    if transport == "distributed":
        changes.append(f"weights.node_directory={tmp_path / 'node'}")
    config = load_config(LAPTOP, [*changes, "transport.heartbeat_s=0.05"])
    run = RunDirectory(tmp_path / "run")
    run.create()
    endpoints = Endpoints(controller="", weights=free_address(), torch_host="127.0.0.1", torch_port=1)
    run.write_endpoints(replace(endpoints, engines={NAME: URL}, followers={NAME: ["http://[::1]:2"]}))
    return run, config, load_file(next(model.glob("*.safetensors")))


@pytest.mark.parametrize("carrier", ["tcp", "gloo"])
def test_two_nodes_of_a_server_take_a_version_and_leave_nothing_behind(tmp_path: Path, carrier: Carrier) -> None:
    run, config, tensors = run_of(tmp_path, "distributed")
    nodes, ranks = server_nodes(run, config, URL), Distributed(carrier=carrier)
    with pytest.raises(EngineError, match="none of the run's servers"):
        server_nodes(run, config, "http://[::1]:2")
    assert nodes is not None and [marker.stem for marker in nodes.markers] == [NAME, f"{NAME}.1"]
    first, second = (NodeReceiver(run, config, name, role) for name, role in ((NAME, NAME), ("other", f"{NAME}.1")))
    with publisher(run.read_endpoints().weights) as sender:
        deadline = time.monotonic() + 120
        while len(sender._seen) < 2:
            assert time.monotonic() < deadline, sender._seen
            time.sleep(0.01)
        ranks.send(sender, 3, tensors)
        assert sender.wait().engines == [NAME, f"{NAME}.1"]
        label = f"3.{sender.epoch[:12]}"
    assert nodes.lacking(label) is None
    found = {name: t for file in (nodes.directory / label).iterdir() for name, t in load_file(file).items()}
    assert equal(found, tensors)
    first.check()
    second.close()
    assert f"{NAME}.1" in nodes.lacking(label)
    first.close()
    assert not list((tmp_path / "node").iterdir())
    ranks.close()


def test_a_receiver_that_ends_ends_the_role(tmp_path: Path) -> None:
    run, config, _ = run_of(tmp_path, "distributed")
    one = NodeReceiver(run, config, NAME, NAME)

    async def lost() -> None:
        raise OSError("the disk is gone")

    one._receiver._beat = lost
    deadline = time.monotonic() + 120
    with pytest.raises(RuntimeError, match="not received any more: the disk is gone"):
        while time.monotonic() < deadline:
            one.check()
            time.sleep(0.01)
    one.close()


def test_only_where_weights_travel_so(tmp_path: Path) -> None:
    run, config, _ = run_of(tmp_path, "disk")
    assert server_nodes(run, config, URL) is None
