"""What test worlds run for weights from the memory of the trainer's ranks: JSON in, JSON out."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from megasao.megatron import runtime
from megasao.megatron.bridge import export_hf
from megasao.megatron.models import MegatronModel, build_model
from megasao.megatron.runtime import Topology
from megasao.training import publishing as publishing_module
from megasao.training.publishing import DistributedPublishing, EmbeddedPublishing, Publishing
from megasao.weights.publisher import WeightPublisher
from megasao.weights.shared import SMALL_BYTES
from tests.megatron.tiny import make_config

VERSIONS = 4
"""More than a rank keeps of one."""


def one_life(payload: dict[str, Any]) -> Any:
    """A trainer that publishes the version it loaded, changes its weights, publishes the next, and so on.

    Gives the engines of each publication, how one before them was refused, and the versions that a rank serves at the
    end. Writes all sets of weights, exported, into ``out``. ``small_bytes``: up to which versions are small ones.
    """
    config = make_config(Path(payload["path"]), payload["parallel"])
    if "carrier" in payload:
        weights = config.weights.model_copy(update={"carrier": payload["carrier"], "bucket_bytes": 4096})
        patient = config.transport.model_copy(update={"weights_timeout_s": 120.0})
        config = config.model_copy(update={"weights": weights, "transport": patient})
    topology = runtime.set_layout(config.parallel, seed=1)
    model = build_model("actor", Path(payload["path"]), config)
    publisher = WeightPublisher(payload["address"], config=config.transport) if topology.rank == 0 else None
    publishing: Publishing = EmbeddedPublishing(config, topology, publisher)
    if payload["transport"] == "distributed":
        publishing = DistributedPublishing("127.0.0.1", config, topology, publisher)
    engines, refused = [], ""
    if isinstance(publishing, EmbeddedPublishing):
        refused = _without_room(publishing, payload["version"], model, topology)
    for version in range(payload["version"], payload["version"] + VERSIONS):
        if publisher is not None:
            _until_they_are_there(publisher, payload.get("receivers", 1))
        with patch.object(publishing_module, "SMALL_BYTES", payload.get("small_bytes", SMALL_BYTES)):
            publishing.publish(version, model)
        exported = export_hf(model)
        if publisher is not None:
            engines.append(publisher.wait().engines)
            save_file(exported, Path(payload["out"]) / f"{version}.safetensors")
        with torch.no_grad():
            for module in model.modules:
                for parameter in module.parameters():
                    parameter.add_(0.01)
        topology.barrier()
    served = sorted(publishing._server._offers) if isinstance(publishing, DistributedPublishing) else []
    publishing.close()
    runtime.clear_layout()
    return engines, refused, served


def _without_room(publishing: EmbeddedPublishing, version: int, model: MegatronModel, topology: Topology) -> str:
    """The error of each rank where the last one sees too little memory."""
    last = topology.rank == topology.world_size - 1
    try:
        with (
            patch("megasao.training.publishing.room_for", lambda sizes: f"{len(sizes)} shares")
            if last
            else nullcontext()
        ):
            publishing.publish(version, model)
    except RuntimeError as error:
        return str(error)
    return ""


def _until_they_are_there(publisher: WeightPublisher, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(publisher._seen) < count:
        assert time.monotonic() < deadline, "receivers did not say hello"
        time.sleep(0.02)
