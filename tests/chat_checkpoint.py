"""A checkpoint with a byte-level tokenizer and a chat template, and a model that says what it is told to."""

import json

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


EOS = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}


def chat_checkpoint(path, phrases=()):
    """A directory with a tokenizer of 259 tokens and one for each phrase, a chat template and end tokens; no model."""
    tokenizer = Tokenizer(BPE({letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<s>")])
    tokenizer.add_tokens(list(phrases))
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, "bos_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": EOS}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 9]}))
    return path


def bigram_checkpoint(path, bigrams, phrases=()):
    """A Qwen3 whose next token depends on the last one alone: ``bigrams[a]`` are the texts that may follow ``a``.

    Texts are single bytes, the end tokens, and ``phrases``.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    chat_checkpoint(path, phrases)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    size = 272
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for last, following in bigrams.items():
            for text in following:
                model.lm_head.weight[_one(tokenizer, text), _one(tokenizer, last)] = 2.0
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 9]}))
    return path


def _one(tokenizer, text):
    (token,) = tokenizer.encode(text, add_special_tokens=False).ids
    return token
