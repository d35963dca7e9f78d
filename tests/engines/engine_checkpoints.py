"""Tiny Hugging Face checkpoints, perturbed copies of them, and the transformers model as reference."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GlmMoeDsaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 32
MAX_TOTAL = 256

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_TOTAL,
    # Large enough that the law of the next token is far from uniform: a wrong layer must show in its log-prob.
    "initializer_range": 0.2,
}


def moe_config(**changes: object) -> Qwen3MoeConfig:
    """The model of the laptop task, smaller."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    return Qwen3MoeConfig(**{**_COMMON, **experts, **changes})


def dense_config(**changes: object) -> Qwen3Config:
    return Qwen3Config(**{**_COMMON, **changes})


def llama_config(**changes: object) -> LlamaConfig:
    return LlamaConfig(**{**_COMMON, **changes})


def latent_config(**changes: object) -> GlmMoeDsaConfig:
    """Latent attention on keys that the first layer selects and the second shares; experts in both."""
    latent = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    indexer = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 6, "indexer_types": ["full", "shared"]}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 0}
    own = {"num_key_value_heads": 4, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    # transformers has 1e-6 in the norms of the latents, whatever the config says.
    return GlmMoeDsaConfig(**{**_COMMON, **latent, **indexer, **experts, **own, "rms_norm_eps": 1e-6, **changes})


def make_checkpoint(path: Path, config: PretrainedConfig, *, seed: int = 0) -> Path:
    """Write a checkpoint with random weights."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint under their names."""
    return load_file(path / "model.safetensors")


def perturb(tensors: dict[str, torch.Tensor], seed: int, only: str = "") -> dict[str, torch.Tensor]:
    """Other weights of the same shapes: noise on every tensor whose name contains ``only``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) if only in name else tensor
        for name, tensor in tensors.items()
    }


def save_tensors(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint like ``source`` with other tensors."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


class Reference:
    """The transformers model, loaded by transformers alone."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], cache: DynamicCache | None = None) -> torch.Tensor:
        """[T, V]; with a cache, ``tokens`` continue what is in it, and are added to it."""
        output = self.model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=cache is not None)
        return output.logits[0]

    def logprobs(self, prompt: Sequence[int], output: Sequence[int], temperature: float) -> torch.Tensor:
        """Log-probabilities of ``output`` after ``prompt`` in one full forward."""
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        return torch.log_softmax(logits / temperature, dim=-1).gather(-1, torch.tensor(output)[:, None])[:, 0]


def new_cache(references: dict[int, Reference]) -> DynamicCache:
    """An empty one, for the layers that the references have."""
    return DynamicCache(config=next(iter(references.values())).model.config)


def version_of(spans: Sequence[tuple[int, int]], index: int) -> int:
    """The weight version of output token ``index``."""
    return [version for start, version in spans if start <= index][-1]


def logprobs_over_updates(
    references: dict[int, Reference], prompt: Sequence[int], output: Sequence[int], spans: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Log-probs (T = 1) when the KV cache is kept over updates: token i is computed by the version of token i + 1."""
    cache, pending, result = new_cache(references), list(prompt), []
    for index, token in enumerate(output):
        logits = references[version_of(spans, index)].logits(pending, cache)[-1]
        result.append(torch.log_softmax(logits, -1)[token])
        pending = [token]
    return torch.stack(result)
