"""Megatron's layer specifications of the families: which module does what in each layer."""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megasao.families import family_of
from megasao.families.facts import indexer_layers, is_moe_layer, stage_problem
from megasao.megatron.latent_attention import LatentAttention
from megasao.megatron.modules import PackedAttention, RMSNorm
from megasao.megatron.sparse_attention import SparseAttention


def block_spec(
    hf_config: dict[str, Any], config: TransformerConfig, implementation: str, layers: range
) -> TransformerBlockSubmodules:
    """The decoder layers ``layers`` (from 0) of one stage, ``implementation`` local or transformer_engine.

    Raises:
        ValueError: a layer shares what an earlier layer selects, and that is in another stage.
    """
    if family_of(hf_config).attention == "sparse_latent" and (reason := stage_problem(hf_config, layers)):
        raise ValueError(reason)
    specs = [layer_spec(hf_config, config, implementation, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_norm(implementation))


def layer_spec(hf_config: dict[str, Any], config: TransformerConfig, implementation: str, layer: int) -> ModuleSpec:
    """One decoder layer, from 0."""
    latent = family_of(hf_config).attention == "sparse_latent"
    options = {
        "num_experts": config.num_moe_experts if is_moe_layer(hf_config, layer) else None,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": latent,
    }
    if implementation == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(**options, moe_grouped_gemm=config.moe_grouped_gemm)
    else:
        spec = get_gpt_layer_local_spec(**options, normalization="RMSNorm")
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
        _use_own_attention(spec.submodules.self_attention.submodules, qk_norms=config.qk_layernorm and not latent)
    if latent:
        _use_sparse_attention(spec.submodules.self_attention, hf_config, implementation, layer)
    return spec


def _use_own_attention(attention: Any, *, qk_norms: bool) -> None:
    attention.core_attention = PackedAttention
    if qk_norms:
        attention.q_layernorm = attention.k_layernorm = RMSNorm


def _use_sparse_attention(attention: ModuleSpec, hf_config: dict[str, Any], implementation: str, layer: int) -> None:
    """Norms of their own, because the indexer needs the normalised query latent; and the selection of keys."""
    indexers = indexer_layers(hf_config)
    source = max(indexer for indexer in indexers if indexer <= layer)
    attention.module = LatentAttention
    attention.submodules.q_layernorm = attention.submodules.kv_layernorm = _norm(implementation)
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        attention.submodules.linear_q_up_proj = attention.submodules.linear_kv_up_proj = TEColumnParallelLinear
    attention.submodules.core_attention = ModuleSpec(
        module=SparseAttention, params={"source": source, "indexer": source == layer}
    )


def _norm(implementation: str) -> type:
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        norm: type = TENorm
        return norm
    return RMSNorm
