"""This rank's tensors, each with its rule and its place among the shards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, distributed, nn

from megasao.families import Rule
from megasao.families.facts import expert_count
from megasao.megatron.bridge.table import global_name, rules

if TYPE_CHECKING:
    from megasao.megatron.models import MegatronModel


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank, or a buffer that belongs to the checkpoint: a router's bias.

    Attributes:
        rule: where it belongs in the whole model.
        parameter: the Megatron tensor: one shard where the rule is cut.
        group: the ranks that hold the other shards (a group of one where the rule is not cut).
        owner: exactly one rank of those that hold copies of this shard is the owner; shard 0's owner speaks for all.
    """

    rule: Rule
    parameter: Tensor
    group: distributed.ProcessGroup
    owner: bool

    @property
    def shards(self) -> int:
        """Into how many shards the tensor is cut."""
        return self.group.size() if self.rule.shard is not None else 1

    @property
    def shard(self) -> int:
        """Which one this rank has."""
        return self.group.rank() if self.rule.shard is not None else 0

    @property
    def speaks(self) -> bool:
        """Whether this rank contributes the whole tensor to an export."""
        return self.owner and self.group.rank() == 0 and not self.rule.copy


def local_parameters(model: "MegatronModel") -> Iterator[LocalParameter]:
    """Every parameter of this rank, in a fixed order that is the same on the ranks of its shard group."""
    table = rules(model.hf_config, model.role)
    local_experts = expert_count(model.hf_config) // parallel_state.get_expert_model_parallel_world_size()
    dense_owner = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    expert_owner = parallel_state.get_expert_data_parallel_rank() == 0
    dense_group = parallel_state.get_tensor_model_parallel_group()
    expert_group = parallel_state.get_expert_tensor_parallel_group()
    for module in model.modules:
        for local, parameter in _tensors(module):
            name = global_name(
                local,
                layer_offset=get_transformer_layer_offset(model.transformer_config, vp_stage=module.vp_stage),
                expert_offset=parallel_state.get_expert_model_parallel_rank() * local_experts,
            )
            assert name in table, f"the table has no rule for the Megatron parameter {name}"
            rule = table[name]
            yield LocalParameter(
                rule,
                parameter,
                expert_group if rule.expert else dense_group,
                expert_owner if rule.expert else dense_owner,
            )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(".expert_bias"))
