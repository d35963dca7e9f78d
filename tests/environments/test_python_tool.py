"""Mathematics with Python as a tool, and how a conversation grows under the templates of several families."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.base import Prompt, StepResult
from megasao.environments.chat import ChatTemplate
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.python_tool import INTERPRETER, find_code
from megasao.environments.registry import make_environment
from megasao.environments.sandbox import bubblewrap
from tests.chat_checkpoint import chat_checkpoint

try:
    bubblewrap.require()
    NO_SANDBOX = None
except bubblewrap.SandboxUnavailable as error:
    NO_SANDBOX = str(error)
needs_sandbox = pytest.mark.skipif(NO_SANDBOX is not None, reason=str(NO_SANDBOX))

# In the manner of each family: how messages are set apart, what ends a turn, what begins the model's.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "<|im_end|>",
)
CHATML_WITHOUT_OLD_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "<|im_end|>",
)
HEADERS = (
    "<s>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}",
    "<|eot|>",
)
ROLE_TOKENS = (
    "[g]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "<|user|>",
)
FAMILIES = {"chatml": CHATML, "thoughts": CHATML_WITHOUT_OLD_THOUGHTS, "headers": HEADERS, "roles": ROLE_TOKENS}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "<|head|>", "<|/head|>", "<|eot|>", "<|user|>", "<|assistant|>")
TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Co")), max_size=20)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import AddedToken, Tokenizer

    path = chat_checkpoint(tmp_path_factory.mktemp("chat") / "model")
    found = Tokenizer.from_file(str(path / "tokenizer.json"))
    found.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_grows_at_its_end_as_the_template_would_write_it(tokenizer, family):
    source, end = FAMILIES[family]
    template = ChatTemplate(source, {})
    codec = TokenizerCodec(tokenizer, template=template)
    end_id = codec.single_token(end)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=4), TEXTS)
    def check(turns, question):
        prompt = Prompt("p", "t", "", {}, ({"role": "user", "content": question},))
        tokens = codec.encode_prompt(prompt)
        messages = list(prompt.messages)
        for said, shown, stopped in turns:
            before = list(tokens)
            action = codec.encode(said) + ([end_id] if stopped else [])
            tokens += action
            answer = StepResult("", 0.0, False, {}, ({"role": "user", "content": shown},))
            last = tokens[-1]
            tokens += codec.encode_observation(prompt, answer, last)
            assert tokens[: len(before) + len(action)] == before + action, "what was there stays as it is"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]
        if family != "thoughts":  # that one writes earlier turns of the model differently once they are past
            assert codec.decode(tokens) == codec.decode(codec.encode(template.render(messages)))
        assert codec.decode(tokens).count(end) >= len(turns)

    check()


def test_writing_the_end_of_a_turn_twice_would_show(tokenizer):
    """Negative control of the comparison above."""
    source, end = CHATML
    codec, template = TokenizerCodec(tokenizer, template=ChatTemplate(source, {})), ChatTemplate(source, {})
    first, new = {"role": "user", "content": "q"}, {"role": "user", "content": "o"}
    twice = template.render([first]) + "a" + end + template.continuation([first], [new])
    assert twice != template.render([first, {"role": "assistant", "content": "a"}, new])
    assert codec.single_token(end) == codec.encode(template.continuation([first], [new]))[0]


def test_a_template_that_hides_the_models_turns_is_refused():
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(ValueError, match="leaves out what the assistant said"):
        template.continuation([], [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("so\n```python\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n``` then ```python\nb\n```<|im_end|>", "b\n"),
        ("```python\nprint(1)", None),
        ("```\nprint(1)\n```", None),
        ("<think>```python\na\n```</think> no", None),
        ("none", None),
    ],
)
def test_code_is_the_last_whole_block_of_python(text, code):
    assert find_code(text) == code


def make(tmp_path, **options):
    data = tmp_path / "data.json"
    data.write_text(json.dumps([{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(30)]))
    given = {"data": str(data), "tool": "python", "sandbox": "none", **options}
    return make_environment(EnvironmentConfig(name="math", options=given))


def play(environment, turns, *, chat=True):
    """The results of an episode's turns."""
    prompt = environment.prompt("train", 0)

    async def body():
        episode = environment.start(prompt, 0)
        try:
            return [await episode.step(turn) for turn in turns]
        finally:
            await episode.close()
            await environment.close()

    return prompt, asyncio.run(body())


def block(code):
    return f"Let me compute.\n```python\n{code}\n```<|im_end|>"


@needs_sandbox
def test_code_runs_in_the_sandbox_until_there_is_an_answer(tmp_path):
    environment = make(tmp_path, sandbox="bubblewrap", tool_output=100, tool_time_s=200.0)
    reference = environment.prompt("train", 0).payload["reference"]
    prompt, found = play(
        environment,
        [
            block(f"print({reference} // 2 * 2)\nopen('kept', 'w').write('7')"),
            block("print(open('kept').read())"),
            block("1 / 0"),
            block("print('x' * 1000)"),
            block("import socket; socket.create_connection(('127.0.0.1', 22), timeout=2)"),
            f"It is \\boxed{{{reference}}}.<|im_end|>",
        ],
    )
    assert prompt.messages[0]["content"].endswith("variables are not.")
    said = [result.messages[0]["content"] if result.messages else "" for result in found]
    assert said[0] == f"```output\n{reference}\n```" and said[1] == "```output\n7\n```"
    assert "ZeroDivisionError" in said[2] and "900 characters left out" in said[3]
    assert "Error" in said[4]
    assert [result.metrics.get("tool_errors") for result in found] == [0.0, 0.0, 1.0, 0.0, 1.0, None]
    assert [result.done for result in found] == [False] * 5 + [True]
    assert [result.reward for result in found] == [0.0] * 5 + [1.0]


@needs_sandbox
def test_code_that_does_not_end_is_stopped(tmp_path):
    _, (stopped,) = play(make(tmp_path, sandbox="bubblewrap", tool_time_s=1.0), [block("while True: pass")])
    assert stopped.messages[0]["content"] == "```output\nstopped: too much time\n```"
    assert stopped.metrics["tool_errors"] == 1.0 and not stopped.done and stopped.reward == 0.0


def test_a_turn_with_an_answer_ends_it_and_one_with_neither_too(tmp_path):
    if not bubblewrap.Path(INTERPRETER).exists():
        pytest.skip(f"the system has no {INTERPRETER}")
    environment = make(tmp_path)
    _, (both,) = play(environment, [block("print(1)") + " \\boxed{-1}"])
    assert (both.done, both.reward, both.metrics) == (True, 0.0, {"answered": 1.0})
    _, (neither,) = play(environment, ["I do not know"])
    assert (neither.done, neither.reward, neither.metrics) == (True, 0.0, {"answered": 0.0})
    _, (plain,) = play(make(tmp_path, chat=False), [block("print(1)")])
    assert plain.observation == "\n```output\n1\n```\n" and not plain.messages
    _, (single,) = play(make(tmp_path, tool=""), [block("print(1)")])
    assert single.done, "without the tool code is only text"


@pytest.mark.parametrize(
    ("options", "named"),
    [({"tool": "bash"}, "tool"), ({"sandbox": "x"}, "sandbox"), ({"tool_time_s": 0.0}, "tool_time_s")],
)
def test_options_that_cannot_be_are_refused_by_name(tmp_path, options, named):
    with pytest.raises(ValueError, match=rf"environment\.options\.{named}"):
        make(tmp_path, **options)


def test_without_a_sandbox_the_tool_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bubblewrap, "_why_not", lambda: "bubblewrap is not installed")
    with pytest.raises(ValueError, match=r"environment\.options\.tool: no sandbox: .*set sandbox: none"):
        make(tmp_path, sandbox="bubblewrap")
