"""A conversation with thoughts and tools grows at its end under the templates of each family: the ids that the engine
made stay, only new messages are rendered, and all together spell what the template writes for the whole."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megasao.environments.base import Prompt, StepResult
from megasao.environments.chat import ChatTemplate
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.tools.calls import ToolCall
from megasao.environments.tools.formats import FORMATS
from tests.chat_checkpoint import chat_checkpoint
from tests.chat_templates import FAMILIES, family_of, published_templates

PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"}},
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("search", "run")
)
SCHEMAS = {tool["function"]["name"]: PARAMETERS for tool in TOOLS}

PUBLISHED = {
    name: family
    for name, text in published_templates().items()
    if not name.endswith("_training") and (family := family_of(text)) is not None  # trl's own changes for training
}
NO_TEMPLATES = "neither the package trl nor a directory MEGASAO_CHAT_TEMPLATES with published templates is here"

# A text may look like markup; whole special tokens are the model's alone, and GLM's calls cannot hold their tags.
TOKENS = {token for family in FAMILIES.values() for token in family.special}
TEXT = st.text(
    st.characters(blacklist_categories=("Cs", "Co", "Cc")) | st.sampled_from("<>|\n{}\"'&"), max_size=16
).filter(lambda text: not any(token in text for token in TOKENS))
WORDS = TEXT.map(str.strip).filter(bool)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={"text": TEXT, "count": st.integers(-(2**70), 2**70), "list": st.lists(st.integers() | TEXT, max_size=3)},
)
CALLS = st.lists(st.builds(ToolCall, st.sampled_from(sorted(SCHEMAS)), ARGUMENTS), min_size=1, max_size=3)
TURNS = st.lists(st.tuples(WORDS, st.just("") | WORDS, CALLS, st.lists(TEXT, min_size=3, max_size=3)), max_size=4)


def make(family, tmp_path):
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(chat_checkpoint(tmp_path / "model") / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in family.special])
    template = ChatTemplate(family.template, dict(family.variables))
    return TokenizerCodec(tokenizer, template=template), template


def as_message(thought, content, calls):
    called = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": called}


def check_that_it_grows_at_the_end(family, tmp_path):
    codec, template = make(family, tmp_path)

    def message(thought, content, calls):
        written = as_message(thought, content, calls) if calls else {"role": "assistant", "content": content}
        return written | ({"reasoning_content": thought} if family.thinks else {})

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(TURNS, WORDS, WORDS)
    def check(turns, question, answer):
        prompt = Prompt("p", "t", "", {}, ({"role": "user", "content": question},), TOOLS)
        tokens, messages = codec.encode_prompt(prompt), list(prompt.messages)
        for thought, content, calls, outputs in turns:
            calls, content = calls[: family.most_calls], content if family.speaks_and_calls else ""
            said = family.write(thought, content, calls)
            assert FORMATS[family.format].parse(said, SCHEMAS) == calls
            made = tokens + codec.encode(said) + [codec.single_token(family.end_of_call)]
            new = tuple({"role": "tool", "content": text} for text in outputs[: len(calls)])
            tokens = made + codec.encode_observation(prompt, StepResult("", 0.0, False, {}, new), made[-1])
            assert tokens[: len(made)] == made, "what was there stays as it is"
            messages += [message(thought, content, calls), *new]
        last = family.write("so", answer, [])
        assert FORMATS[family.format].parse(last, SCHEMAS) == []
        spelt = codec.decode([*tokens, *codec.encode(last), codec.single_token(family.end)])
        # Once there is another question the templates forget thoughts; until then they write what was said.
        messages.append(message("so", answer, []))
        whole = template.render(messages, tools=list(TOOLS), add_generation_prompt=False)
        if family.end == "<|user|>":  # which begins the next turn, and ends this one
            whole += family.end
        assert spelt == whole.removesuffix("\n")

    check()


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_calls_and_answers_of_tools_grow_at_the_end(name, tmp_path):
    check_that_it_grows_at_the_end(FAMILIES[name], tmp_path)


@pytest.mark.parametrize("name", PUBLISHED or [pytest.param("none", marks=pytest.mark.skip(reason=NO_TEMPLATES))])
def test_so_they_do_under_the_templates_that_the_models_ship(name, tmp_path):
    check_that_it_grows_at_the_end(PUBLISHED[name], tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_rendering_the_whole_again_would_show(name, tmp_path):
    """Negative control: a renderer that tokenises the conversation anew loses what the model said in its own way."""
    family = FAMILIES[name]
    codec, template = make(family, tmp_path)
    prompt = Prompt("p", "t", "", {}, ({"role": "user", "content": "q"},), TOOLS)
    said = family.write("thought", "", [ToolCall("run", {"count": 1})]).replace("1", "1 " if name != "glm45" else " 1")
    made = codec.encode_prompt(prompt) + codec.encode(said) + [codec.single_token(family.end_of_call)]
    again = codec.encode(
        template.render(
            [*prompt.messages, as_message("thought", "", [ToolCall("run", {"count": 1})])], tools=list(TOOLS)
        )
    )
    assert again[: len(made)] != made


def test_marks_for_fine_tuning_change_no_text():
    template = ChatTemplate(
        "{% for m in messages %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endfor %}", {}
    )
    assert template.render([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]) == "[a][b]"


def test_the_templates_show_the_tools():
    for family in FAMILIES.values():
        template = ChatTemplate(family.template, dict(family.variables))
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
        with_tools = template.render(messages, tools=list(TOOLS))
        assert "search" in with_tools and "search" not in template.render(messages)
        assert json.dumps(PARAMETERS["properties"]["text"])[1:-1] in with_tools.replace("\n", "").replace("    ", "")


def test_variables_of_the_config_reach_the_template(tmp_path):
    path = chat_checkpoint(tmp_path / "model")
    (path / "chat_template.jinja").write_text(FAMILIES["qwen3"].template)
    prompt = Prompt("p", "t", "", {}, ({"role": "user", "content": "q"},))
    silent = TokenizerCodec.from_directory(path, {"enable_thinking": False})
    assert silent.decode(silent.encode_prompt(prompt)).endswith("<think>\n\n</think>\n\n")
    plain = TokenizerCodec.from_directory(path)
    assert "<think>" not in plain.decode(plain.encode_prompt(prompt))
