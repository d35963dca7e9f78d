"""Tiny random Qwen3 checkpoints, ordinary Hugging Face directories, for the laptop demo and the studies.

Every tag and every character of the environments is one token of the 32-token vocabulary.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from megasao.environments.calculator import CHARACTERS, TAGS

VOCAB_SIZE = 32
PAD, EOS, UNKNOWN = SPECIAL = ("<pad>", "<eos>", "<unk>")


def vocabulary() -> list[str]:
    """The 32 tokens in id order; unused ids have reserved names."""
    tokens = [*SPECIAL, *CHARACTERS, *TAGS]
    return tokens + [f"<reserved{i}>" for i in range(VOCAB_SIZE - len(tokens))]


PIECES = r"<[^<>]*>|error|[\s\S]"
"""How text is cut into tokens: a tag, or a character."""


def write_tokenizer(directory: Path, tokens: Sequence[str] | None = None, pieces: str = PIECES) -> None:
    """tokenizer.json and tokenizer_config.json: one token a piece of text, nothing added, nothing lost.

    ``tokens``: in id order, beginning with PAD, EOS and UNKNOWN; those of the laptop's tasks if None.
    """
    tokens = tokens or vocabulary()
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS, UNKNOWN)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_model(
    directory: Path,
    *,
    seed: int,
    hidden: int,
    layers: int,
    experts: int,
    moe_hidden: int,
    vocabulary_size: int = VOCAB_SIZE,
) -> None:
    """config.json, generation_config.json and random safetensors; without experts a dense Qwen3."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shared = {
        "vocab_size": vocabulary_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "pad_token_id": SPECIAL.index(PAD),
        "eos_token_id": SPECIAL.index(EOS),
        "bos_token_id": None,
        "dtype": "float32",
    }
    sparse = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": moe_hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
    }
    torch.manual_seed(seed)
    model: Any = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **sparse)) if experts else Qwen3ForCausalLM(Qwen3Config(**shared))
    )
    model.generation_config = GenerationConfig(
        pad_token_id=shared["pad_token_id"], eos_token_id=shared["eos_token_id"], do_sample=True, temperature=1.0
    )
    model.save_pretrained(directory)
