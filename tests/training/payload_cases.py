"""What a world of ranks runs that fetches its rows from rollout hosts. JSON in, JSON out."""

from pathlib import Path
from typing import Any

from megasao.config.lifesign import LifeSign
from megasao.megatron import runtime
from megasao.training.payload import PayloadReader
from megasao.training.source import BatchSource
from megasao.transport.client import ControllerClient
from megasao.transport.messages import Manifest, ManifestEntry
from tests.megatron.tiny import make_config


def load(payload: dict[str, Any]) -> Any:
    """The ids in this rank's rows of the step that ``entries`` are, or what it failed with."""
    config = make_config(Path("unused"), {"ranks": 2})
    loop = config.loop.model_copy(update={"batch_timeout_s": payload["batch_timeout_s"]})
    topology = runtime.set_layout(config.parallel, seed=1)
    client = ControllerClient("tcp://127.0.0.1:1")
    source = BatchSource(
        client,
        topology,
        config.model_copy(update={"loop": loop}),
        LifeSign(Path(payload["directory"]) / f"rank-{topology.rank}"),
        PayloadReader(client, identity=f"rank-{topology.rank}", keys=None, timeout_s=5.0),
    )
    try:
        batch = source.load(Manifest(0, [ManifestEntry(**entry) for entry in payload["entries"]], {}))
        assert batch is not None
        return [trajectory.trajectory_id for row in batch.rows for trajectory in row.trajectories]
    except TimeoutError as error:
        return str(error)
    finally:
        source.close()
        client.close()
