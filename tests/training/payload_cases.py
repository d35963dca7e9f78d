"""What a world of ranks runs that fetches its rows from rollout hosts. JSON in, JSON out.

Whatever rank 0 asks its controller, the answer is the step's manifest.
"""

from pathlib import Path
from typing import Any

import zmq

from megasao.config.lifesign import LifeSign
from megasao.launch.ports import free_ports
from megasao.megatron import runtime
from megasao.training.payload import PayloadReader
from megasao.training.source import BatchSource
from megasao.transport.answering import AnsweringThread
from megasao.transport.client import ControllerClient
from megasao.transport.codec import encode
from megasao.transport.endpoints import bind_router
from megasao.transport.messages import Manifest, ManifestEntry
from tests.megatron.tiny import make_config


def load(payload: dict[str, Any]) -> Any:
    """The ids in this rank's rows of the step that ``entries`` are, or what it failed with."""
    config = make_config(Path("unused"), {"ranks": 2})
    loop = config.loop.model_copy(update={"batch_timeout_s": payload["batch_timeout_s"]})
    topology = runtime.set_layout(config.parallel, seed=1)
    entries = [ManifestEntry(**entry) for entry in payload["entries"]]
    [port] = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    manifest = Manifest(0, entries, {})
    bound = bind_router(context, address, high_water_mark=16, keys=None)
    controller = AnsweringThread(bound, lambda frames: encode(manifest), name="controller")
    client = ControllerClient(address)
    source = BatchSource(
        client,
        topology,
        config.model_copy(update={"loop": loop}),
        LifeSign(Path(payload["directory"]) / f"rank-{topology.rank}"),
        PayloadReader(client, identity=f"rank-{topology.rank}", keys=None, timeout_s=5.0),
    )
    try:
        batch = source.until_payload_is_had(0, lambda: source.load(source.next_manifest(0, 0) or manifest))
        return [trajectory.trajectory_id for row in batch.rows for trajectory in row.trajectories]
    except TimeoutError as error:
        return str(error)
    finally:
        source.close()
        client.close()
        controller.close()
        context.term()
