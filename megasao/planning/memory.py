"""Bytes of one rank of each pipeline stage."""

from dataclasses import dataclass
from typing import Any

from megasao.config import Config
from megasao.megatron.models import Role
from megasao.planning.activations import Activations
from megasao.planning.tensors import ModelTensor, share_of_rank

GIB = 2**30


@dataclass(frozen=True)
class RoleMemory:
    """What one model needs on one rank of a stage, in bytes.

    Attributes:
        parameters: numbers in its tensors.
        weights, gradients, optimizer: there all the time.
        activations: of the rows under way when most are; there while this model trains.
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
    stages = config.parallel.stages(hf_config["num_hidden_layers"])
    mine = [tensor for tensor in tensors if stage in stages_of(tensor, stages)]
    held = {id(tensor): share_of_rank(tensor, hf_config, config.parallel) for tensor in mine}
    trained = [tensor for tensor in mine if tensor.trained]
    optimizer = sum(held[id(t)] / _optimizer_shards(t, config) for t in trained) * _optimizer_bytes(config)
    rows, last = _rows(hf_config, config), stage == len(stages) - 1
    return RoleMemory(
        parameters=sum(held.values()),
        weights=sum(held[id(t)] * width(t, config) for t in mine),
        gradients=sum(held[id(t)] for t in trained) * 4,
        optimizer=optimizer * (1 - offloaded(config)),
        host=optimizer * offloaded(config),
        # Stage s of P has up to P - s rows under way.
        activations=(len(stages) - stage) * rows.kept(stages[stage], last=last),
        scratch=rows.scratch(stages[stage], last=last, head=last and role == "actor"),
    )


def stages_of(tensor: ModelTensor, stages: list[range]) -> set[int]:
    """Stages that hold a tensor; a tied embedding is on the first and on the last."""
    if tensor.layer is not None:
        return {index for index, layers in enumerate(stages) if tensor.layer in layers}
    if tensor.rule.megatron.startswith("embedding."):
        return {0, len(stages) - 1} if tensor.tied else {0}
    return {len(stages) - 1}


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
