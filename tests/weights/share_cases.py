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
from megasao.training.publishing import DistributedPublishing, EmbeddedPublishing, Publishing
from megasao.weights.publisher import WeightPublisher
from tests.megatron.tiny import make_config

VERSIONS = 4
"""More than a rank keeps of one."""


def one_life(payload: dict[str, Any]) -> Any:
    """A trainer that publishes the version it loaded, changes its weights, publishes the next, and so on.

    Gives the engines of each publication, and how one before them was refused. Writes all sets of weights, exported,
    into ``out``.
    """
    config = make_config(Path(payload["path"]), payload["parallel"])
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
            _until_somebody_is_there(publisher)
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
    publishing.close()
    runtime.clear_layout()
    return engines, refused


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


def _until_somebody_is_there(publisher: WeightPublisher) -> None:
    deadline = time.monotonic() + 60
    while not publisher._seen:
        assert time.monotonic() < deadline, "no receiver said hello"
        time.sleep(0.02)
