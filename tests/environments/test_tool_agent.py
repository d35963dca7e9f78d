"""The tool environment: what calls and answers come to, and whole episodes on a scripted engine, token for token."""

import asyncio

import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.registry import make_environment
from megasao.environments.tool_agent import MAX_CALLS, ToolOptions, arithmetic_problems
from megasao.environments.tools.calls import ToolCall
from megasao.environments.tools.formats import FORMATS
from megasao.rollout.engines.base import GenerateResult
from megasao.rollout.episode import EpisodeRunner
from megasao.trajectories.schema import to_batch
from megasao.trajectories.validation import validate
from megasao.transport.messages import Lease
from tests.chat_checkpoint import chat_checkpoint
from tests.chat_templates import FAMILIES
from tests.rollout.scripted_engine import ScriptedEngine

ADD = ToolCall("calculator", {"operation": "add", "left": 2, "right": 3})


def make(**options):
    return make_environment(EnvironmentConfig(name="tool", options={"problems": 64, "verifiers": 1, **options}))


def play(environment, turns):
    """The results of an episode's turns."""

    async def body():
        episode = environment.start(environment.prompt("train", 0), 0)
        try:
            return [await episode.step(turn) for turn in turns]
        finally:
            await environment.close()

    return asyncio.run(body())


@pytest.mark.parametrize("form", FORMATS)
def test_calls_are_answered_and_the_answer_is_graded(form):
    environment = make(format=form)
    render = FORMATS[form].render
    reference = environment.prompt("train", 0).payload["reference"]
    bad = [ToolCall("calculater", {}), ToolCall("calculator", {"operation": "add", "left": "two", "right": 3})]
    found = play(environment, [render(ADD), *map(render, bad), f"<think>{render(ADD)}</think>\\boxed{{{reference}}}"])
    said = [result.messages[0]["content"] if result.messages else "" for result in found]
    assert all(message["role"] == "tool" for result in found for message in result.messages)
    assert said[0] == "5"
    assert said[1] == ("error: there is no tool 'calculater' (did you mean 'calculator'?); the tools are calculator")
    assert said[2] == "error: arguments.left: expected integer, got 'two'"
    assert [result.metrics.get("tool_errors") for result in found] == [0.0, 1.0, 1.0, None]
    assert [(result.done, result.reward) for result in found] == [(False, 0.0)] * 3 + [(True, 1.0)]


def test_a_wrong_answer_and_none_earn_nothing():
    wrong, none = play(make(), ["\\boxed{-1}", "I do not know"])
    assert (wrong.done, wrong.reward, wrong.metrics) == (True, 0.0, {"answered": 1.0})
    assert (none.done, none.reward, none.metrics) == (True, 0.0, {"answered": 0.0})


def test_a_turn_has_many_calls_and_each_is_answered_up_to_a_limit():
    render = FORMATS["qwen3"].render
    several, flood, lone = play(
        make(),
        [
            render(ADD) + "<tool_call>{</tool_call>" + render(ADD),
            render(ADD) * (MAX_CALLS + 5),
            '<tool_call>{"name": "calculator", "arguments": {"operation": "\\ud800"}}</tool_call>',
        ],
    )
    assert [m["content"][:20] for m in several.messages] == ["5", "error: the call is n", "5"]
    assert several.metrics == {"tool_calls": 3.0, "tool_errors": 1.0}
    assert len(flood.messages) == MAX_CALLS + 1 and "only 16 calls" in flood.messages[-1]["content"]
    assert "half of a surrogate pair" in lone.messages[0]["content"]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_is_the_engines_ids_and_what_the_template_writes_between(name, tmp_path):
    from tokenizers import AddedToken, Tokenizer

    family = FAMILIES[name]
    path = chat_checkpoint(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in family.special])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(family.template)
    codec = TokenizerCodec.from_directory(path)
    environment = make(format=family.format)
    answer = environment.prompt("train", 3).payload["reference"]
    turns = [
        family.write("first", "", [ToolCall("calculator", {"operation": "ad"})]) + family.end_of_call,
        family.write("again", "", [ADD]) + family.end_of_call,
        family.write("so", f"It is \\boxed{{{answer}}}.", []) + family.end,
    ]

    def script(request):
        ids = codec.encode(turns[int(request.request_id.rpartition("/")[2])])
        return GenerateResult(ids, [-0.5] * len(ids), [(0, 0)], "stop")

    engine = ScriptedEngine(script)
    limits = EnvironmentConfig(max_tokens=8000, max_turn_tokens=500)
    lease = Lease("lease", "p", "g", "train", 3, "tool", 1, 1.0, 0)

    async def run():
        try:
            return await EpisodeRunner.build(environment, engine, codec, limits).run(lease)
        finally:
            await environment.close()

    trajectory = asyncio.run(run())
    validate(to_batch([trajectory]))
    assert trajectory.finish_reason == "done" and trajectory.rewards[-1] == 1.0
    assert trajectory.metrics == {"tool_calls": 2.0, "tool_errors": 1.0, "answered": 1.0, "turns": 3.0}
    spelt = codec.decode(trajectory.tokens)
    assert "arguments.operation: expected one of 'add', 'subtract', 'multiply', got 'ad'" not in spelt
    assert "arguments.left: missing" in spelt and spelt.count("calculator") >= 3
    actions = [token for token, acted in zip(trajectory.tokens, trajectory.action_mask, strict=True) if acted]
    assert codec.decode(actions) == "".join(turns)
    for turn, start in enumerate(trajectory.turn_starts):
        assert engine.requests[turn].input_ids == tuple(trajectory.tokens[:start])
        assert trajectory.tokens[start:][: len(codec.encode(turns[turn]))] == codec.encode(turns[turn])


def test_arithmetic_problems_are_split_by_text_and_drawn_by_seed():
    one, other = arithmetic_problems(ToolOptions(problems=200)), arithmetic_problems(ToolOptions(problems=200, seed=1))
    texts = {split: {problem.text for problem in problems} for split, problems in one.items()}
    assert len(texts["train"]) + len(texts["eval"]) == 200 and not texts["train"] & texts["eval"]
    assert one == arithmetic_problems(ToolOptions(problems=200)) and one != other
    for problem in one["train"][:50]:
        assert eval(problem.text.removeprefix("What is ").removesuffix("?")) == int(problem.reference)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"format": "qwen"}, "format: expected one of qwen3, glm, llama3"),
        ({"chat": False}, "chat"),
        ({"tool": "python"}, "tool: write tools"),
        ({"tools": {}}, "tools: none"),
        ({"tools": {"calc": {}}, "sandbox": "none"}, r"tools\.calc\.description: expected text, got None"),
        ({"problems": 3}, "problems"),
        ({"problems": 65537}, "problems"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=rf"environment\.options\.{named}"):
        make(**options)


def test_there_are_no_demonstrations():
    with pytest.raises(ValueError, match="no demonstrations"):
        make().demonstration(0, 0)
