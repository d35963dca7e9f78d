"""Megatron models of actor and critic, built from a Hugging Face checkpoint directory.

Invariants (tests assert them):

- the actor's log-probabilities equal those of the transformers model of the same checkpoint (< 1e-5, fp32), for every
  family and layout;
- a critic started from a policy checkpoint lacks exactly the value head; everything else is bit-equal;
- with frozen attention only ``mlp.*`` (experts or dense FFN, and the router that weighs them) and the value head move:
  the embedding, all norms, q/k/v/o projections and q/k norms stay bit-equal (SAO, arXiv 2607.07508, trains "only the
  FFN / expert projections" and the head);
- recomputation changes no gradient, also where the layers below are frozen;
- no dropout, no auxiliary loss, and a router's bias stays as it is, in float32: the loss is the caller's alone.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megasao.config import Config
from megasao.config.architecture import read_hf_config
from megasao.config.model import ModelConfig, ParallelConfig
from megasao.families import family_of
from megasao.families.facts import expert_count, head_dim, is_moe_layer, rope
from megasao.megatron import router_replay
from megasao.megatron.modules import HiddenOutput, ValueHead
from megasao.megatron.options import passed_on
from megasao.megatron.rope import llama3_frequencies
from megasao.megatron.runtime import compute_device
from megasao.megatron.sparse_attention import Indexer
from megasao.megatron.specs import block_spec

Role = Literal["actor", "critic"]


@dataclass(frozen=True)
class MegatronModel:
    """This rank's part of a model.

    Attributes:
        role: actor (language-model head) or critic (value head).
        chunks: DDP-wrapped model chunks of this pipeline stage; their ``main_grad`` buffers hold the gradients.
        transformer_config: Megatron's configuration, shared by the chunks.
        hf_config: the checkpoint's config.json.
    """

    role: Role
    chunks: list[DistributedDataParallel]
    transformer_config: TransformerConfig
    hf_config: dict[str, Any]

    @property
    def output_weight(self) -> torch.Tensor:
        """[V / TP, hidden]: this rank's rows of the language-model head; on the last stage of an actor."""
        gpt = self.modules[-1]
        weight: torch.Tensor = gpt.output_layer.weight
        if gpt.share_embeddings_and_output_weights:
            weight = gpt.shared_embedding_or_output_weight()
        return weight

    def finish_gathering(self) -> None:
        """Wait for weights that are still on their way from the ranks that updated them. Collective.

        A forward pass does so by itself, layer by layer; whoever reads the weights must call this before.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @property
    def modules(self) -> list[GPTModel]:
        """The bare GPT models inside the wrappers."""
        return [_unwrap(chunk) for chunk in self.chunks]


def build_model(role: Role, path: Path, config: Config, *, load: bool = True, frozen: bool = False) -> MegatronModel:
    """Build this rank's part of a model and, with ``load``, read its weights from the checkpoint.

    Every rank calls this, after :func:`megasao.megatron.runtime.set_layout`.

    Args:
        role: actor or critic; the critic has a value head (weight 0, bias ``config.critic.head_bias``) in place of the
            language-model head, and frozen attention where ``config.critic.freeze_attention``.
        path: Hugging Face directory (config.json, *.safetensors).
        load: False leaves random weights.
        frozen: nothing trains: a reference, for forward passes alone.

    Raises:
        ValueError: the architecture or a setting of config.json is not supported, or weights are missing or left over.
    """
    from megasao.megatron.bridge import load_hf

    hf_config = read_hf_config(path)
    transformer_config = make_transformer_config(hf_config, config.model, config.parallel, passed_on("model", config))
    stages = range(config.parallel.virtual_pipeline) if config.parallel.virtual_pipeline > 1 else [None]
    chunks = [_build_gpt(role, hf_config, transformer_config, config, stage) for stage in stages]
    for gpt in chunks:
        freeze_indexers(gpt)
        if role == "actor" and config.actor.router_replay and not frozen:
            router_replay.install(gpt)
        if role == "critic" and config.value_model.freeze_attention:
            freeze_all_but_ffn_and_head(gpt)
            if config.trainer.recompute != "none":
                require_input_gradients(gpt)
        if frozen:
            gpt.requires_grad_(False)
    # Nothing of a frozen model is reduced or gathered.
    parallel = config.parallel.model_copy(update={"overlap": config.parallel.overlap and not frozen})
    model = MegatronModel(
        role, _wrap(chunks, transformer_config, parallel, passed_on("gradients", config)), transformer_config, hf_config
    )
    if load:
        load_hf(model, path)
    return model


def whole_model_on_meta(role: Role, hf_config: dict[str, Any], config: Config) -> GPTModel:
    """The whole model in one piece on the meta device: names, shapes and what trains, without memory.

    The layout must be that of one rank, and ``config.parallel`` too.
    """
    transformer_config = make_transformer_config(hf_config, config.model, config.parallel)
    transformer_config.perform_initialization = False
    with torch.device("meta"):
        gpt = _build_gpt(role, hf_config, transformer_config, config, stage=None)
    freeze_indexers(gpt)
    if role == "critic" and config.value_model.freeze_attention:
        freeze_all_but_ffn_and_head(gpt)
    return gpt


def freeze_all_but_ffn_and_head(module: torch.nn.Module) -> None:
    """Stop training everything but FFN / experts / router (``.mlp.``) and the value head (``output_layer``)."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad = ".mlp." in name or name.startswith("output_layer.")


def require_input_gradients(gpt: GPTModel) -> None:
    """Let the gradient reach down to the first layer's input although the embedding is frozen.

    Where Megatron recomputes a part whose inputs have no gradient, the part's own weights silently get none either.
    """

    def mark(embedding: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    if gpt.pre_process:
        gpt.embedding.register_forward_hook(mark)


def freeze_indexers(module: torch.nn.Module) -> None:
    """Stop training sparse attention's indexers: their selection has no gradient."""
    for indexer in (each for each in module.modules() if isinstance(each, Indexer)):
        indexer.requires_grad_(False)


def make_transformer_config(
    hf_config: dict[str, Any],
    model: ModelConfig,
    parallel: ParallelConfig,
    options: dict[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron's configuration of a checkpoint under a layout; ``options`` go on to Megatron.

    Raises:
        ValueError: the layout does not fit the model.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    family = family_of(hf_config)
    _divisible(hf_config["num_key_value_heads"], "num_key_value_heads", parallel.tensor, "parallel.tensor")
    own = family.megatron(hf_config)
    if twice := own.keys() & (options or {}).keys():
        raise ValueError(f"megatron.model: {sorted(twice)} follow from model_type = {hf_config['model_type']!r}")
    settings: dict[str, Any] = {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "ffn_hidden_size": hf_config["intermediate_size"],
        "num_attention_heads": hf_config["num_attention_heads"],
        "num_query_groups": hf_config["num_key_value_heads"],
        "kv_channels": head_dim(hf_config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config["rms_norm_eps"],
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    kind = MLATransformerConfig if family.attention == "sparse_latent" else TransformerConfig
    layout = _parallel_settings(parallel, dtype, hf_config["num_hidden_layers"])
    return kind(
        **{**settings, **_moe_settings(hf_config, model, parallel), **own},
        **layout,
        **{**_kernel_settings(), **(options or {})},
    )


def _moe_settings(hf_config: dict[str, Any], model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    experts = expert_count(hf_config)
    if experts == 0:
        return {}
    _divisible(experts, "the number of experts", parallel.expert, "parallel.expert")
    if parallel.dispatcher == "flex" and not (torch.cuda.is_available() and _is_installed("deep_ep")):
        raise ValueError("parallel.dispatcher = flex needs CUDA and the package deep_ep; use alltoall")
    if parallel.dispatcher == "flex" and parallel.expert_tensor * parallel.expert == 1:
        raise ValueError("parallel.dispatcher = flex needs parallel.expert or expert_tensor > 1; use alltoall")
    if parallel.tensor > 1 and not parallel.sequence:
        raise ValueError("a mixture of experts with parallel.tensor > 1 needs parallel.sequence = true")
    if parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
        # Megatron-Core then reduces the experts' gradients over the wrong ranks, silently.
        raise ValueError(
            f"parallel.expert_tensor = {parallel.expert_tensor} must equal parallel.tensor = {parallel.tensor} while "
            "parallel.expert = 1; set it so, or use expert > 1"
        )
    return {
        "num_moe_experts": experts,
        "moe_layer_freq": [int(is_moe_layer(hf_config, layer)) for layer in range(hf_config["num_hidden_layers"])],
        "moe_ffn_hidden_size": hf_config["moe_intermediate_size"],
        "moe_router_topk": hf_config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": resolved_implementation(model) == "transformer_engine",
    }


def _parallel_settings(parallel: ParallelConfig, dtype: torch.dtype, layers: int) -> dict[str, Any]:
    interleaved = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    return {
        "pipeline_model_parallel_layout": _stage_layout(parallel, layers),
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": interleaved,
        # Batched sends and receives of an interleaved schedule get mixed up on gloo, silently.
        "overlap_p2p_comm": interleaved is not None,
        "batch_p2p_comm": interleaved is None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "moe_token_dispatcher_type": parallel.dispatcher,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Lengths travel with the tensors; the allgather dispatcher wants one length, so rows are padded for it.
        "variable_seq_lengths": parallel.dispatcher != "allgather",
        # Gradients are summed, never averaged: step.py returns losses already divided by the global denominator.
        "calculate_per_token_loss": True,
    }


def _stage_layout(parallel: ParallelConfig, layers: int) -> list[list[str]] | None:
    """What each stage has, where ``parallel.pipeline_layers`` says it; else Megatron splits evenly."""
    if parallel.pipeline_layers is None or parallel.pipeline == 1:
        return None
    stages = [["decoder"] * len(stage) for stage in parallel.stages(layers)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _kernel_settings() -> dict[str, Any]:
    """Everything that needs a CUDA extension is off on CPU."""
    cuda = torch.cuda.is_available()
    return {
        "use_cpu_initialization": not cuda,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": cuda and _is_installed("transformer_engine", "fused_weight_gradient_mlp_cuda"),
        "moe_permute_fusion": False,
    }


def _is_installed(*packages: str) -> bool:
    """Whether one of them is."""
    return any(importlib.util.find_spec(package) is not None for package in packages)


def _divisible(value: int, name: str, by: int, by_name: str) -> None:
    if value % by:
        raise ValueError(f"{name} = {value} of the checkpoint is not a multiple of {by_name} = {by}")


def resolved_implementation(model: ModelConfig) -> Literal["local", "transformer_engine"]:
    """``auto`` is TransformerEngine where CUDA and the package are present.

    Raises:
        ValueError: transformer_engine is asked for and is not there.
    """
    available = torch.cuda.is_available() and _is_installed("transformer_engine")
    if model.transformer_impl == "transformer_engine" and not available:
        raise ValueError(
            "model.transformer_impl = transformer_engine needs CUDA and the package transformer_engine; "
            "install it, or use local or auto"
        )
    return "local" if model.transformer_impl == "local" or not available else "transformer_engine"


def _build_gpt(
    role: Role, hf_config: dict[str, Any], config: TransformerConfig, run: Config, stage: int | None
) -> GPTModel:
    """One chunk; ``stage`` numbers the virtual pipeline's on this rank."""
    tied = bool(hf_config.get("tie_word_embeddings", False)) and role == "actor"
    rotary, offset = rope(hf_config), get_transformer_layer_offset(config, vp_stage=stage)
    layers = range(offset, offset + get_num_layers_to_build(config, vp_stage=stage))
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(hf_config, config, resolved_implementation(run.model), layers),
        vocab_size=padded_vocabulary(hf_config, run.parallel),
        max_sequence_length=hf_config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rotary_percent=rotary.fraction,
        rotary_base=rotary.theta,
    )
    if rotary.kind == "llama3":
        gpt.rotary_pos_emb.inv_freq = llama3_frequencies(gpt.rotary_pos_emb.inv_freq, rotary)
    if gpt.post_process and role == "critic":
        gpt.output_layer = ValueHead(config, run.value_model.head_bias)
    elif gpt.post_process:
        assert type(gpt.output_layer) is tensor_parallel.ColumnParallelLinear
        gpt.output_layer.__class__ = HiddenOutput
    return gpt


def padded_vocabulary(hf_config: dict[str, Any], parallel: ParallelConfig) -> int:
    """Rows of embedding and head: the vocabulary, filled up until tensor parallelism divides it."""
    return -(-int(hf_config["vocab_size"]) // parallel.tensor) * parallel.tensor


def _wrap(
    chunks: list[GPTModel], config: TransformerConfig, parallel: ParallelConfig, options: dict[str, Any]
) -> list[DistributedDataParallel]:
    """Gradient buffers and their reduction; the schedules learn how to hold it back until the last micro-batch."""
    wrapped = [_wrap_chunk(gpt, config, parallel, options, number) for number, gpt in enumerate(chunks)]
    no_sync = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    config.finalize_model_grads_func = _finalize_without_scaling
    return wrapped


def _wrap_chunk(
    gpt: GPTModel, config: TransformerConfig, parallel: ParallelConfig, options: dict[str, Any], number: int
) -> DistributedDataParallel:
    gpt.to(compute_device())
    module = Float16Module(config, gpt) if config.bf16 else gpt
    for router in (each for each in gpt.modules() if isinstance(each, TopKRouter)):
        router._maintain_float32_expert_bias()
    return DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=parallel.distributed_optimizer,
            overlap_grad_reduce=parallel.overlap,
            overlap_param_gather=parallel.overlap and parallel.distributed_optimizer,
            **options,
        ),
        module=module,
        # Only the first chunk's communication has anything to hide behind.
        disable_bucketing=number > 0,
    )


def _finalize_without_scaling(model: list[Any], num_tokens: torch.Tensor | None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients, without its division by a token count: losses come divided."""
    finalize_model_grads(model, None, **kwargs)


def _unwrap(chunk: torch.nn.Module) -> GPTModel:
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk
