"""The laptop checkpoint's tokenizer through the codec and through transformers; demonstrations as ids."""

import json
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasao.environments.calculator import CHARACTERS, TAGS, CalculatorEnvironment
from megasao.environments.demonstrations import demonstration_trajectories
from megasao.environments.encoding import TokenizerCodec

TOOL = Path(__file__).parents[2] / "tools" / "make_laptop_model.py"
PIECES = st.lists(st.sampled_from([*CHARACTERS, *TAGS, "<eos>", "<pad>"]), max_size=60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "laptop"
    runpy.run_path(str(TOOL))["main"]([str(path), "--seed", "3"])
    return path


@pytest.fixture(scope="module")
def codec(checkpoint):
    return TokenizerCodec.from_directory(checkpoint)


def test_every_piece_is_one_token_and_text_survives(codec):
    @given(PIECES)
    def check(pieces):
        ids = codec.encode("".join(pieces))
        assert len(ids) == len(pieces)
        assert [codec.token_text(i) for i in ids] == pieces
        assert codec.decode(ids) == "".join(pieces)

    check()


def test_transformers_reads_the_same_tokenizer(checkpoint, codec):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "".join(turn.text for turn in CalculatorEnvironment().demonstration(0, 0)) + "<eos>"
    assert tokenizer(text)["input_ids"] == codec.encode(text)
    assert tokenizer.decode(codec.encode(text)) == text
    assert len(tokenizer) == codec.vocab_size == 32
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_unknown_characters_are_named_and_never_encoded(codec):
    with pytest.raises(ValueError, match="no token for 'x', 'é' in 'é3x'"):
        codec.encode("é3x")
    with pytest.raises(ValueError, match="'<cal>'"):
        codec.encode("<cal>3")


def test_ids_without_a_token_are_a_mark_in_the_text(codec):
    """Embeddings may have more rows than the tokenizer has tokens, and such a row can be sampled."""
    ids = codec.encode("<call>12+3</call>")
    assert codec.decode([99, *ids[:2], codec.vocab_size, 1000, *ids[2:]]) == "\ufffd<call>1\ufffd\ufffd2+3</call>"
    assert codec.token_text(codec.vocab_size) == "\ufffd" and codec.decode([]) == ""


def test_single_token_refuses_more_than_one(codec):
    assert codec.token_text(codec.single_token("</call>")) == "</call>"
    with pytest.raises(ValueError, match="must be one token"):
        codec.single_token("12")


def test_a_missing_or_broken_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no such file"):
        TokenizerCodec.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer file"):
        TokenizerCodec.from_directory(tmp_path)


def test_the_checkpoint_is_an_ordinary_seeded_qwen3_moe(checkpoint, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["vocab_size"] == 32 and config["tie_word_embeddings"] is False and config["norm_topk_prob"] is True
    main = runpy.run_path(str(TOOL))["main"]
    for seed, same in ((3, True), (4, False)):
        main([str(tmp_path / str(seed)), "--seed", str(seed)])
        other = AutoModelForCausalLM.from_pretrained(tmp_path / str(seed))
        equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert equal is same


def test_demonstrations_mask_actions_only_and_stay_short(codec):
    environment = CalculatorEnvironment()
    found = demonstration_trajectories(environment, codec, 200, 7, max_tokens=110)
    assert found == demonstration_trajectories(environment, codec, 200, 7, max_tokens=110)
    assert found != demonstration_trajectories(environment, codec, 200, 8, max_tokens=110)
    for index, (tokens, mask) in enumerate(found):
        turns = environment.demonstration(index, 7)
        assert len(tokens) == len(mask) <= 110
        assert codec.decode(tokens) == "".join(turn.text for turn in turns)
        actions = codec.decode([token for token, acted in zip(tokens, mask, strict=True) if acted])
        assert actions == "".join(turn.text for turn in turns if turn.is_action)


def test_too_long_demonstrations_are_passed_over_or_refused(codec):
    environment = CalculatorEnvironment()
    short = demonstration_trajectories(environment, codec, 50, 7, max_tokens=40)
    assert max(len(tokens) for tokens, _ in short) <= 40
    with pytest.raises(ValueError, match=r"environment.max_tokens = 12.*raise environment.max_tokens"):
        demonstration_trajectories(environment, codec, 50, 7, max_tokens=12)
