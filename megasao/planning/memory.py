"""Bytes of one rank of each pipeline stage."""

from dataclasses import dataclass
from typing import Any

from megasao.config import Config
from megasao.config.model import ParallelConfig
from megasao.megatron.models import Role
from megasao.planning.activations import Activations
from megasao.planning.schedule import most_kept
from megasao.planning.tensors import ModelTensor, share_of_rank

GIB = 2**30


@dataclass(frozen=True)
class RoleMemory:
    """What one model needs on one rank of a stage, in bytes.

    Attributes:
        parameters: numbers in its tensors.
        weights, gradients, optimizer: there all the time.
        activations: of the rows under way when most is kept; there while this model trains.
        host: of the optimizer, in the host's memory.
        scratch: for a moment: the logits of the head on the last stage of an actor, or the scores of an indexer.
    """

    parameters: float
    weights: float
    gradients: float
    optimizer: float
    host: float
    activations: float
    scratch: float

    @property
    def resident(self) -> float:
        """There all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def working(self) -> float:
        """There while this model trains."""
        return self.activations + self.scratch


def stage_memory(
    role: Role, hf_config: dict[str, Any], config: Config, tensors: list[ModelTensor], stage: int
) -> RoleMemory:
    """What ``role`` needs on the fullest rank of ``stage`` (from 0)."""
    stages, chunks = config.parallel.pipeline, stage_chunks(hf_config, config.parallel)
    mine = [tensor for tensor in tensors if stage in stages_of(tensor, chunks)]
    held = {id(tensor): share_of_rank(tensor, hf_config, config.parallel) for tensor in mine}
    trained = [tensor for tensor in mine if tensor.trained]
    optimizer = sum(held[id(t)] / _optimizer_shards(t, config) for t in trained) * _optimizer_bytes(config)
    rows, own = _rows(hf_config, config), chunks[stage]
    lasts = [stage == stages - 1 and number == len(own) - 1 for number in range(len(own))]
    kept = [rows.kept(layers, last=last) for layers, last in zip(own, lasts, strict=True)]
    return RoleMemory(
        parameters=sum(held.values()),
        weights=sum(held[id(t)] * width(t, config) for t in mine),
        gradients=sum(held[id(t)] for t in trained) * 4,
        optimizer=optimizer * (1 - offloaded(config)),
        host=optimizer * offloaded(config),
        activations=most_kept(kept, stage, stages),
        scratch=max(
            rows.scratch(layers, last=last, head=last and role == "actor")
            for layers, last in zip(own, lasts, strict=True)
        ),
    )


def stage_chunks(hf_config: dict[str, Any], parallel: ParallelConfig) -> list[list[range]]:
    """The decoder layers, from 0, of each model chunk of each pipeline stage; one chunk without a virtual pipeline.

    Raises:
        ValueError: the layers cannot be split so.
    """
    chunks = parallel.stages(hf_config["num_hidden_layers"])
    return [chunks[stage :: parallel.pipeline] for stage in range(parallel.pipeline)]


def stages_of(tensor: ModelTensor, chunks: list[list[range]]) -> set[int]:
    """Stages that hold a tensor, of those with ``chunks``; a tied embedding is on the first and on the last."""
    if tensor.layer is not None:
        return {stage for stage, own in enumerate(chunks) if any(tensor.layer in layers for layers in own)}
    if tensor.rule.megatron.startswith("embedding."):
        return {0, len(chunks) - 1} if tensor.tied else {0}
    return {len(chunks) - 1}


def offloaded(config: Config) -> float:
    """Share of the optimizer's state that is in the host's memory."""
    options = config.megatron.optimizer
    return float(options.get("optimizer_offload_fraction", 0)) if options.get("optimizer_cpu_offload") else 0.0  # type: ignore[arg-type]


def _rows(hf_config: dict[str, Any], config: Config) -> Activations:
    return Activations(hf_config, config, -(-config.trainer.token_budget // config.parallel.context))


def _optimizer_shards(tensor: ModelTensor, config: Config) -> int:
    """Ranks that the optimizer's state of a tensor is spread over."""
    parallel = config.parallel
    if not parallel.distributed_optimizer:
        return 1
    if tensor.rule.expert:
        return parallel.ranks // (parallel.pipeline * parallel.expert * parallel.expert_tensor)
    return parallel.ranks // (parallel.pipeline * parallel.tensor)


def width(tensor: ModelTensor, config: Config) -> int:
    """Bytes of one of its numbers."""
    return 4 if tensor.rule.float32 else {"float32": 4, "bfloat16": 2}[config.model.dtype]


def _optimizer_bytes(config: Config) -> int:
    """Adam's two moments, and under bfloat16 the weights in float32."""
    return 8 if config.model.dtype == "float32" else 12
