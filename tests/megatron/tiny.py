"""A tiny qwen3_moe checkpoint, written by transformers, with weights large enough that every mistake shows."""

from pathlib import Path
from typing import Any

VOCABULARY = 32


def write_tiny_checkpoint(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random Qwen3MoeForCausalLM (2 layers, hidden 64, 4 heads / 2 kv, 8 experts top-2) and return its path."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def write_tiny_tokenizer(directory: Path) -> None:
    """A word-level tokenizer.json, so that the directory is whole."""
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(directory / "tokenizer.json"))


def random_sequences(count: int, *, seed: int, low: int = 3, high: int = 40) -> list[list[int]]:
    """Random token sequences of random lengths."""
    import random

    generator = random.Random(seed)
    return [[generator.randrange(VOCABULARY) for _ in range(generator.randint(low, high))] for _ in range(count)]


def make_config(
    path: Path, parallel: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **critic: Any
) -> Any:
    """A Config around the checkpoint at ``path``.

    Adam's epsilon is large, so that the sign of a gradient that is mere rounding does not decide an update.
    """
    from megasao.config import Config

    return Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": str(path), **(model or {})},
            "actor": {"optimizer": {"lr": 1e-3, "eps": 1e-4}},
            "critic": {"optimizer": {"lr": 1e-3}, **critic},
            "loop": {"steps": 100},
            "parallel": parallel or {"ranks": 1},
        }
    )


def read(out: Path, name: str) -> dict[str, Any]:
    """Tensors that rank 0 of a test world wrote."""
    from safetensors.torch import load_file

    return load_file(out / f"{name}.safetensors")


def read_torch_dist(directory: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint in format torch_dist, by torch's own reader."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    checkpoint.load(tensors, storage_reader=FileSystemReader(directory), no_dist=True)
    return tensors
