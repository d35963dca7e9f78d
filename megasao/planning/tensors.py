"""Every tensor of a model, with its rule and its shape, from the Megatron model on the meta device."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import distributed

from megasao.config import Config
from megasao.config.model import ParallelConfig
from megasao.families import Rule, family_of
from megasao.families.facts import expert_count
from megasao.megatron import runtime
from megasao.megatron.bridge.table import global_name, rules
from megasao.megatron.models import Role, whole_model_on_meta


@dataclass(frozen=True)
class ModelTensor:
    """One tensor of the whole model.

    Attributes:
        rule: its line in the bridge's table.
        shape: whole, without filling of the vocabulary.
        layer: decoder layer from 0; None outside of them.
        parameter: False for a buffer: it is stored and sent, and not counted.
        trained: whether its optimizer moves it.
        tied: it is the language-model head too.
    """

    rule: Rule
    shape: tuple[int, ...]
    layer: int | None
    parameter: bool = True
    trained: bool = True
    tied: bool = False

    @property
    def expert(self) -> int | None:
        """The routed expert that it belongs to, from 0."""
        match = re.search(r"\.local_experts\.(\d+)\.", self.rule.megatron)
        return int(match[1]) if match else None

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def model_tensors(role: Role, hf_config: dict[str, Any], config: Config) -> list[ModelTensor]:
    """Every parameter and checkpointed buffer of the whole model. Needs no process group, and leaves none."""
    alone = config.model_copy(
        update={
            "parallel": ParallelConfig(ranks=1),
            "model": config.model.model_copy(update={"transformer_impl": "local"}),
        }
    )
    with _world_of_one():
        gpt = whole_model_on_meta(role, hf_config, alone)
    table = rules(hf_config, role)
    tensors = []
    for name, parameter in gpt.named_parameters():
        rule = table[global_name(name, layer_offset=0, expert_offset=0)]
        tied = rule.vocabulary and gpt.share_embeddings_and_output_weights
        tensors.append(
            ModelTensor(rule, tuple(parameter.shape), _layer(name), trained=parameter.requires_grad, tied=tied)
        )
    for name, buffer in gpt.named_buffers():
        if name in table:
            tensors.append(ModelTensor(table[name], tuple(buffer.shape), _layer(name), parameter=False, trained=False))
    return tensors


def mtp_parameters(hf_config: dict[str, Any], tensors: list[ModelTensor]) -> int:
    """Parameters of the multi-token-prediction layers, whose decoder layer has the shapes of the decoder's."""
    hidden = hf_config["hidden_size"]
    own = {"enorm": hidden, "hnorm": hidden, "eh_proj": 2 * hidden * hidden, "final_layernorm": hidden}
    like = {re.sub(r"^decoder\.layers\.\d+\.", "", t.rule.megatron): t for t in tensors if t.layer is not None}
    total = 0
    for rule in family_of(hf_config).mtp_rules(hf_config):
        part = re.sub(r"^mtp\.layers\.\d+\.", "", rule.megatron)
        if part.removesuffix(".weight") in own:
            total += own[part.removesuffix(".weight")]
        else:
            twin = like[part.removeprefix("transformer_layer.")]
            total += twin.elements if twin.parameter else 0
    return total


def share_of_rank(tensor: ModelTensor, hf_config: dict[str, Any], parallel: ParallelConfig) -> float:
    """Elements on one rank of the tensor's stage; of an expert, its part of what each rank has on average.

    Experts are spread evenly, so that the sum over a layer's experts is exact.
    """
    if tensor.rule.expert:
        cut = parallel.expert_tensor if tensor.rule.shard is not None else 1
        return tensor.elements / (parallel.expert * cut)
    if tensor.rule.shard is None:
        return tensor.elements
    if tensor.rule.vocabulary:
        rows = -(-tensor.shape[0] // parallel.tensor)
        return rows * tensor.elements // tensor.shape[0]
    return tensor.elements / parallel.tensor


def active_parameters(hf_config: dict[str, Any], tensors: list[ModelTensor]) -> int:
    """Parameters that one token meets: of the routed experts, those that it is sent to."""
    routed = sum(t.elements for t in tensors if t.rule.expert)
    total = sum(t.elements for t in tensors if t.parameter)
    experts = expert_count(hf_config)
    return total if not experts else total - routed + routed * hf_config["num_experts_per_tok"] // experts


def _layer(name: str) -> int | None:
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None


@contextmanager
def _world_of_one() -> Iterator[None]:
    assert not distributed.is_initialized(), "a plan is made outside of any process group"
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        runtime.set_layout(ParallelConfig(ranks=1), seed=0)
        yield
    finally:
        runtime.clear_layout()
        distributed.destroy_process_group()
