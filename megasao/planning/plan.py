"""The plan of a run: sizes, where everything goes, what it needs, and whether that is there."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasao.config import Config
from megasao.config.architecture import planned_file, read_architecture
from megasao.config.errors import ConfigError, Problem
from megasao.config.model_check import layout_problems, of_critic, untrainable
from megasao.conversion.blocks import scale_shape
from megasao.families.facts import expert_count
from megasao.megatron.bridge.outgoing import sent_bytes
from megasao.megatron.bridge.parts import part_rows
from megasao.megatron.models import Role
from megasao.planning.memory import GIB, RoleMemory, stage_chunks, stage_memory, stages_of, width
from megasao.planning.tensors import ModelTensor, active_parameters, model_tensors, mtp_parameters
from megasao.weights.plan import Held, WeightPlan, shares, weight_plan


@dataclass(frozen=True)
class Sizes:
    """Parameters of the policy; buffers are not counted.

    Attributes:
        total: all of them, without multi-token prediction.
        with_mtp: with it; equal to ``total`` where there is none.
        routed: in routed experts.
        active: that one token meets, and of those without the embedding, and without embedding and head.
    """

    total: int
    with_mtp: int
    routed: int
    active: tuple[int, int, int]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    Attributes:
        chunks: its decoder layers from 0, by model chunk; there are several with a virtual pipeline.
        roles: what each model needs on the stage's fullest rank.
    """

    chunks: list[range]
    roles: dict[Role, RoleMemory]

    @property
    def layers(self) -> list[int]:
        """Those of all chunks."""
        return [layer for chunk in self.chunks for layer in chunk]

    @property
    def peak(self) -> float:
        """Bytes at the worst time: all models are resident, and one of them trains."""
        return sum(role.resident for role in self.roles.values()) + max(role.working for role in self.roles.values())


@dataclass(frozen=True)
class Plan:
    """Everything that `megasao plan` prints; ``untrainable`` says why a run with this config would be refused.

    A critic in a world of its own has stages of its own.
    """

    sizes: Sizes
    stages: list[Stage]
    transfer: WeightPlan | None
    available: float
    untrainable: tuple[str, ...] = ()
    critic_stages: list[Stage] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether every stage has room."""
        return all(stage.peak <= self.available for stage in [*self.stages, *self.critic_stages])


def make_plan(config: Config) -> Plan:
    """The plan of a config whose model's config.json is at hand.

    Raises:
        ConfigError: there is no config.json, or the layout cannot work.
    """
    hf_config = _architecture(config)
    problems = [*layout_problems(config, hf_config), *of_critic(layout_problems, config, hf_config)]
    if problems:
        raise ConfigError(str(config.model.architecture or config.model.path), problems)
    roles: tuple[Role, ...] = ("actor",) if config.critic is None else ("actor", "critic")
    tensors: dict[Role, list[ModelTensor]] = {role: model_tensors(role, hf_config, config) for role in roles}
    here: tuple[Role, ...] = ("actor",) if config.critic_is_separate else roles
    there: tuple[Role, ...] = roles[len(here) :]
    notes = [*untrainable(config, hf_config), *of_critic(untrainable, config, hf_config)]
    return Plan(
        sizes=_sizes(hf_config, tensors["actor"]),
        stages=_stages(hf_config, config, {role: tensors[role] for role in here}),
        transfer=_transfer(hf_config, config, tensors["actor"]),
        available=(config.plan.gpu_memory_gib - config.plan.reserve_gib) * GIB,
        untrainable=tuple(f"{each.path}: {each.reason}" for each in notes),
        critic_stages=_stages(hf_config, config.of_critic, {role: tensors[role] for role in there}),
    )


def _stages(hf_config: dict[str, Any], config: Config, tensors: dict[Role, list[ModelTensor]]) -> list[Stage]:
    """The stages of the ranks that hold these models; none where they hold nothing."""
    stages = stage_chunks(hf_config, config.parallel) if tensors else []
    return [
        Stage(chunks, {role: stage_memory(role, hf_config, config, tensors[role], index) for role in tensors})
        for index, chunks in enumerate(stages)
    ]


def _architecture(config: Config) -> dict[str, Any]:
    field = "model.path"
    try:
        field, file = planned_file(Path(config.model.path), config.model.architecture)
        if file is None:
            raise ValueError(f"{config.model.path} does not exist")
        return read_architecture(file)
    except ValueError as error:
        reason = f"{error}; planning needs the model's config.json, in model.path or as model.architecture"
        raise ConfigError(config.model.path, [Problem(field, reason)]) from None


def _sizes(hf_config: dict[str, Any], tensors: list[ModelTensor]) -> Sizes:
    total, active = sum(t.elements for t in tensors if t.parameter), active_parameters(hf_config, tensors)

    def part(name: str) -> int:
        return sum(t.elements for t in tensors if t.rule.megatron.startswith(name))

    embedding, head = part("embedding."), part("output_layer.")
    return Sizes(
        total=total,
        with_mtp=total + mtp_parameters(hf_config, tensors),
        routed=sum(t.elements for t in tensors if t.rule.expert),
        active=(active, active - embedding, active - embedding - head),
    )


def _transfer(hf_config: dict[str, Any], config: Config, tensors: list[ModelTensor]) -> WeightPlan | None:
    if config.plan.rollout_gpus == 0:
        return None
    return weight_plan(published_shares(hf_config, config, tensors), config.plan, config.rollout.workers)


def published_shares(hf_config: dict[str, Any], config: Config, tensors: list[ModelTensor]) -> list[list[int]]:
    """Bytes that each rank of each stage writes when the policy is published on disk."""
    stages = stage_chunks(hf_config, config.parallel)
    held: list[list[Held]] = [[] for _ in stages]
    for tensor in tensors:
        fp8 = config.weights.dtype == "fp8_block" and tensor.rule.fp8
        nbytes = sent_bytes(tensor.rule, tensor.elements, width(tensor, config), fp8=fp8)
        scales = _scale_bytes(tensor, hf_config) if fp8 else 0
        held[min(stages_of(tensor, stages))].append(Held(nbytes, tensor.expert, scales))
    return [shares(stage, config.parallel, expert_count(hf_config)) for stage in held]


def _scale_bytes(tensor: ModelTensor, hf_config: dict[str, Any]) -> int:
    rows, columns = tensor.shape
    return sum(4 * math.prod(scale_shape((part, columns))) for part in part_rows(tensor.rule, rows, hf_config))
