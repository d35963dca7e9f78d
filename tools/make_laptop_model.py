"""Write a tiny random Qwen3-MoE checkpoint, an ordinary Hugging Face directory, for the laptop demo.

    python tools/make_laptop_model.py OUT [--seed 0] [--hidden 128] [--layers 2] [--experts 8] [--moe-hidden 96]

Every tag and every character of the calculator environment is one token of its 32-token vocabulary.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from megasao.environments.calculator import CHARACTERS, TAGS

VOCAB_SIZE = 32
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def vocabulary() -> list[str]:
    """The 32 tokens in id order; unused ids have reserved names."""
    tokens = [PAD, EOS, UNKNOWN, *CHARACTERS, *TAGS]
    return tokens + [f"<reserved{i}>" for i in range(VOCAB_SIZE - len(tokens))]


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json: one token a tag or character, nothing added, nothing lost."""
    tokens = vocabulary()
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"<[^<>]*>|error|[\s\S]"), behavior="isolated")
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


def write_model(directory: Path, *, seed: int, hidden: int, layers: int, experts: int, moe_hidden: int) -> None:
    """config.json, generation_config.json and random safetensors."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=moe_hidden,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=vocabulary().index(PAD),
        eos_token_id=vocabulary().index(EOS),
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(directory)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers")
    parser.add_argument("--experts", type=int, default=8, help="routed experts (2 are used for each token)")
    parser.add_argument("--moe-hidden", type=int, default=96, help="hidden size of one expert")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(given.out)
    write_model(
        given.out,
        seed=given.seed,
        hidden=given.hidden,
        layers=given.layers,
        experts=given.experts,
        moe_hidden=given.moe_hidden,
    )


if __name__ == "__main__":
    main()
