"""Options of Megatron-Core that have no field of their own here: passed through, and checked against its dataclasses.

Invariants (tests assert them):
- a name that the dataclass does not have is refused with the nearest right one;
- a name that this project sets, or that would change what is computed, is refused with the field to use instead;
- a value that the dataclass's annotation does not allow is refused. Megatron itself would take anything.

The dataclasses are read from Megatron's source: importing it would import torch.
"""

import ast
import difflib
import importlib.machinery
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from megasao.config.base import Section
from megasao.config.errors import Problem
from megasao.config.suggest import one_slip_apart

if TYPE_CHECKING:
    from megasao.config.root import Config

Kind = Literal["model", "optimizer", "gradients"]
Value = bool | int | float | str | list[bool | int | float | str] | None

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "uint8")
"""How a ``torch.dtype`` is written in a config."""

NEED_CUDA = (
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
    "optimizer_cpu_offload",
)
"""Options that only a GPU can do."""

_SOURCES: dict[Kind, tuple[tuple[str, str], ...]] = {
    "model": (
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
    ),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    "gradients": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str}


class MegatronConfig(Section):
    """Options passed on to Megatron-Core's own dataclasses, by their names there; see its documentation."""

    model: dict[str, Value] = Field(
        default_factory=dict,
        description="Of TransformerConfig and ModelParallelConfig, such as recompute_modules or moe_router_dtype.",
    )
    optimizer: dict[str, Value] = Field(
        default_factory=dict, description="Of OptimizerConfig, such as optimizer_cpu_offload. Dtypes by their name."
    )
    gradients: dict[str, Value] = Field(
        default_factory=dict, description="Of DistributedDataParallelConfig, such as bucket_size."
    )


def _each(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_CHECKPOINT = "it is read from the model's config.json"
_ANOTHER = "it would make another model than config.json describes and engines serve"
_SUM = "losses come divided by the global denominator, and gradients must be summed"
_ONLY_LOSS = "the loss is the algorithm's alone"

_OURS: dict[Kind, dict[str, str]] = {
    "model": {
        **_each(
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
            "normalization layernorm_epsilon qk_layernorm qk_l2_norm add_bias_linear add_qkv_bias "
            "gated_linear_unit activation_func num_moe_experts moe_layer_freq moe_ffn_hidden_size "
            "moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_num_groups "
            "moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias "
            "moe_shared_expert_intermediate_size multi_latent_attention softmax_scale rotary_interleaved "
            "window_size mtp_num_layers experimental_attention_variant dsa_indexer_n_heads "
            "dsa_indexer_head_dim dsa_indexer_topk",
            _CHECKPOINT,
        ),
        **_each(
            "glu_linear_offset activation_func_clamp_value no_rope_freq mrope_section window_attn_skip_freq "
            "softmax_type layernorm_zero_centered_gamma apply_residual_connection_post_layernorm attention_output_gate "
            "moe_apply_probs_on_input moe_latent_size moe_shared_expert_gate heterogeneous_block_specs is_hybrid_model "
            "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
            "linear_num_key_heads linear_num_value_heads",
            _ANOTHER,
        ),
        **_each(
            "params_dtype pipeline_dtype bf16 fp16 fp8 fp8_recipe fp8_param fp4 fp4_recipe fp4_param",
            "use model.dtype",
        ),
        **_each(
            "attention_dropout hidden_dropout moe_aux_loss_coeff moe_z_loss_coeff "
            "moe_router_load_balancing_type mtp_loss_scaling_factor moe_input_jitter_eps "
            "moe_expert_capacity_factor moe_token_dropping moe_router_force_load_balancing "
            "dsa_indexer_loss_coeff",
            _ONLY_LOSS,
        ),
        **_each(
            "recompute_granularity recompute_method recompute_num_layers",
            "use trainer.recompute",
        ),
        **_each(
            "variable_seq_lengths overlap_p2p_comm batch_p2p_comm",
            "it follows from parallel; another value gives wrong gradients or never ends",
        ),
        **_each(
            "finalize_model_grads_func no_sync_func grad_sync_func param_sync_func grad_scale_func timers",
            "it is a function, set by the trainer",
        ),
        "tensor_model_parallel_size": "use parallel.tensor",
        "sequence_parallel": "use parallel.sequence",
        "pipeline_model_parallel_size": "use parallel.pipeline",
        "virtual_pipeline_model_parallel_size": "use parallel.virtual_pipeline",
        "pipeline_model_parallel_layout": "use parallel.pipeline_layers",
        "num_layers_in_first_pipeline_stage": "use parallel.pipeline_layers",
        "num_layers_in_last_pipeline_stage": "use parallel.pipeline_layers",
        "context_parallel_size": "use parallel.context",
        "hierarchical_context_parallel_sizes": "use parallel.context",
        "hybrid_context_parallel": "use parallel.context",
        "expert_model_parallel_size": "use parallel.expert",
        "expert_tensor_parallel_size": "use parallel.expert_tensor",
        "moe_token_dispatcher_type": "use parallel.dispatcher",
        "moe_grouped_gemm": "it follows from model.transformer_impl",
        "transformer_impl": "use model.transformer_impl",
        "use_cpu_initialization": "it follows from the device",
        "calculate_per_token_loss": _SUM,
        "overlap_moe_expert_parallel_comm": "its schedule does not run packed rows",
    },
    "optimizer": {
        "lr": "use actor.optimizer.lr, critic.optimizer.lr",
        "weight_decay": "use optimizer.weight_decay of actor and critic",
        "adam_beta1": "use optimizer.beta1 of actor and critic",
        "adam_beta2": "use optimizer.beta2 of actor and critic",
        "adam_eps": "use optimizer.eps of actor and critic",
        "clip_grad": "use optimizer.clip_grad of actor and critic",
        "optimizer": "only Adam is supported",
        **_each(
            "min_lr decoupled_lr decoupled_min_lr",
            "learning rates follow from the optimizer sections",
        ),
        **_each(
            "bf16 fp16 params_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
            "use model.dtype",
        ),
        "use_distributed_optimizer": "use parallel.distributed_optimizer",
        "overlap_param_gather": "use parallel.overlap",
        "overlap_param_gather_with_optimizer_step": "use parallel.overlap",
        "timers": "it is a function, set by the trainer",
    },
    "gradients": {
        "use_distributed_optimizer": "use parallel.distributed_optimizer",
        "overlap_grad_reduce": "use parallel.overlap",
        "overlap_param_gather": "use parallel.overlap",
        "align_param_gather": "use parallel.overlap",
        "grad_reduce_in_fp32": "main gradients are always float32",
        "average_in_collective": _SUM,
        **_each(
            "num_distributed_optimizer_instances use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy",
            "only parallel.distributed_optimizer splits state",
        ),
        **_each(
            "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag",
            "use model.dtype",
        ),
    },
}


def ours(kind: Kind) -> dict[str, str]:
    """Names of Megatron's that cannot be passed through, each with the reason or the field to use instead."""
    return _OURS[kind]


def problems(config: "Config") -> Iterator[Problem]:
    """Everything in the section ``megatron`` that Megatron does not know, or that is not to be set there."""
    for kind in _SOURCES:
        known = fields(kind)
        for name, value in getattr(config.megatron, kind).items():
            reason = _problem(kind, name, value, known)
            if reason is not None:
                yield Problem(f"megatron.{kind}.{name}", reason)


def _problem(kind: Kind, name: str, value: Any, known: dict[str, ast.expr]) -> str | None:
    if name in ours(kind):
        return f"not to be set here: {ours(kind)[name]}"
    if name not in known:
        near = [other for other in known if one_slip_apart(name, other)] or difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else "see Megatron-Core's documentation"
        return f"Megatron-Core's {_SOURCES[kind][0][1]} has no such option; {hint}"
    if not allows(known[name], value):
        return f"expected {ast.unparse(known[name])}, got {value!r}"
    return None


@cache
def fields(kind: Kind) -> dict[str, ast.expr]:
    """Names and annotations of the installed Megatron-Core's dataclass.

    Raises:
        ValueError: megatron-core is not installed.
    """
    parent = importlib.util.find_spec("megatron")
    # By its path: find_spec("megatron.core") would import the parent, and a config package imports no Megatron.
    path = parent.submodule_search_locations if parent else None
    spec = importlib.machinery.PathFinder.find_spec("megatron.core", path) if path else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the section megatron needs the package megatron-core, which is not installed")
    root = Path(spec.submodule_search_locations[0])
    return {
        statement.target.id: statement.annotation
        for file, name in _SOURCES[kind]
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def allows(annotation: ast.expr, value: Any) -> bool:
    """Whether a plain value fits a dataclass's annotation; False for one that no config file can express."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Name(id=name) if name in _PLAIN:
            return type(value) is _PLAIN[name] or (name == "float" and type(value) is int)
        case ast.Attribute(attr="dtype"):
            return value in DTYPES
        case ast.BinOp(op=ast.BitOr()):
            return allows(annotation.left, value) or allows(annotation.right, value)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return value is None or allows(inner, value)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            return any(allows(member, value) for member in members)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=members):
            return value in ast.literal_eval(members if isinstance(members, ast.Tuple) else ast.Tuple([members]))
        case ast.Subscript(value=ast.Name(id="List" | "list"), slice=inner):
            return isinstance(value, list) and all(allows(inner, each) for each in value)
    return False
