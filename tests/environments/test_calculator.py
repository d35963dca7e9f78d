"""The calculator environment: problems, splits, the tool, answers and options."""

import asyncio
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasao.config.rollout import EnvironmentConfig
from megasao.environments import arithmetic
from megasao.environments.calculator import CalculatorEnvironment, CalculatorOptions, use_tool
from megasao.environments.registry import make_environment
from megasao.environments.splits import split_of

CLEAN = CalculatorOptions(
    tool_failure_rate=0.0, answers_early=0.0, ignores_precedence=0.0, two_operations_in_one_call=0.0
)


def expression_of(prompt_text: str) -> str:
    return prompt_text.removeprefix("<problem>").removesuffix("</problem>")


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_written_expressions_mean_their_tree(seed, operations):
    import random

    expression = arithmetic.draw(random.Random(seed), operations)
    text = arithmetic.render(expression)
    steps = arithmetic.reductions(expression)
    assert len(steps) == operations
    assert eval(text) == steps[-1][-1]  # python's own precedence is the judge
    assert all(0 <= result <= arithmetic.LIMIT for *_, result in steps)


@given(st.integers(0, 2**32))
def test_no_parenthesis_can_be_left_out(seed):
    import random

    text = arithmetic.render(arithmetic.draw(random.Random(seed), 3))
    for start in [i for i, c in enumerate(text) if c == "("]:
        depth, end = 0, start
        for end in range(start, len(text)):
            depth += (text[end] == "(") - (text[end] == ")")
            if depth == 0:
                break
        shorter = text[:start] + text[start + 1 : end] + text[end + 1 :]
        assert tree(shorter) != tree(text), f"{text} and {shorter} are the same"


def tree(text: str) -> str:
    import ast

    return ast.dump(ast.parse(text))


def test_reading_order_is_a_mistake_only_where_precedence_matters():
    expression = arithmetic.Node("+", 2, arithmetic.Node("*", 3, 4))
    assert arithmetic.render(expression) == "2+3*4"
    assert arithmetic.reductions(expression) == [(3, "*", 4, 12), (2, "+", 12, 14)]
    assert arithmetic.left_to_right(expression) == [(2, "+", 3, 5), (5, "*", 4, 20)]


def test_the_splits_share_no_problem_and_say_what_they_hold():
    environment = CalculatorEnvironment()
    texts = {
        split: {expression_of(environment.prompt(split, i).text) for i in range(1500)} for split in ("train", "eval")
    }
    demonstrated = {expression_of(environment.demonstration(i, 3)[0].text) for i in range(1500)}
    assert not texts["train"] & texts["eval"]
    assert not demonstrated & texts["eval"]
    assert {split_of("calculator", t) for t in texts["eval"]} == {"eval"}
    assert {split_of("calculator", t) for t in texts["train"] | demonstrated} == {"train"}
    # negative control: drawn without the split rule, the held-out share would be found among the others
    import random

    unruled = {arithmetic.render(arithmetic.draw(random.Random(i), 2)) for i in range(1500)}
    assert 0.05 < sum(split_of("calculator", t) == "eval" for t in unruled) / len(unruled) < 0.25


def test_a_prompt_is_the_same_in_another_process():
    code = (
        "from megasao.environments.calculator import CalculatorEnvironment as C;"
        "print([C().prompt(s, i).text for s in ('train', 'eval') for i in range(20)])"
    )
    here = str([CalculatorEnvironment().prompt(s, i).text for s in ("train", "eval") for i in range(20)])
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": hash_seed}, check=True
        )
        assert done.stdout.strip() == here


def test_prompts_depend_on_seed_split_and_index():
    environment, other = CalculatorEnvironment(), CalculatorEnvironment(CalculatorOptions(seed=1))
    drawn = [environment.prompt("train", i).text for i in range(50)]
    assert drawn == [environment.prompt("train", i).text for i in range(50)]
    assert drawn != [other.prompt("train", i).text for i in range(50)]
    assert drawn != [environment.prompt("eval", i).text for i in range(50)]
    assert environment.prompt("train", 3).prompt_id != environment.prompt("eval", 3).prompt_id
    with pytest.raises(ValueError, match="expected 0 or more, got -1"):
        environment.prompt("train", -1)
    with pytest.raises(ValueError, match="got 'test'"):
        environment.prompt("test", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("<call>3+4</call>", "7"),
        ("<call>0*9</call>", "0"),
        ("<call>999-0</call>", "999"),
        ("<call>999+1</call>", None),
        ("<call>3-4</call>", None),
        ("<call>3+4+5</call>", None),
        ("<call>03+4</call>", None),
        ("<call>3+</call>", None),
        ("<call>(3+4)</call>", None),
        ("<call>3+4", None),
        ("<call><call>3+4</call>", None),
        ("3+4</call>", None),
        ("<call>1000-1</call>", None),
        ("<answer>7</call>", None),
        ("", None),
    ],
)
def test_the_tool_does_one_operation(call, result):
    assert use_tool(call) == result


def play(environment, prompt, actions, seed=0):
    async def run():
        episode = environment.start(prompt, seed)
        return [await episode.step(action) for action in actions]

    return asyncio.run(run())


def test_answers_are_verified_and_nonsense_is_an_error_to_read():
    environment = CalculatorEnvironment(CLEAN)
    prompt = environment.prompt("eval", 0)
    answer = eval(expression_of(prompt.text))
    right, wrong = play(environment, prompt, [f"<answer>{answer}</answer>", f"<answer>{answer + 1}</answer>"])
    assert (right.done, right.reward, right.observation) == (True, 1.0, "")
    assert (wrong.done, wrong.reward) == (True, 0.0)
    for nonsense in ("<answer></answer>", "<answer>+</answer>", "</call>", "<eos>", f"<answer>0{answer}</answer>"):
        [step] = play(environment, prompt, [nonsense])
        assert (step.done, step.reward, step.observation) == (False, 0.0, "<result>error</result>"), nonsense


def test_the_tool_fails_by_seed_and_only_then():
    prompt = CalculatorEnvironment(CLEAN).prompt("train", 0)
    calls = ["<call>1+1</call>"] * 200
    flaky = CalculatorEnvironment(CalculatorOptions(tool_failure_rate=0.3))
    errors = [step.metrics["tool_errors"] for step in play(flaky, prompt, calls, seed=5)]
    assert errors == [step.metrics["tool_errors"] for step in play(flaky, prompt, calls, seed=5)]
    assert errors != [step.metrics["tool_errors"] for step in play(flaky, prompt, calls, seed=6)]
    assert 30 < sum(errors) < 90
    assert not any(step.metrics["tool_errors"] for step in play(CalculatorEnvironment(CLEAN), prompt, calls))


def outcome(environment, index):
    turns = environment.demonstration(index, 0)
    return eval(expression_of(turns[0].text)) == int(re.fullmatch(r"<answer>(\d+)</answer>", turns[-1].text)[1])


def test_without_habits_the_demonstrator_is_right_and_with_them_often_not():
    assert all(outcome(CalculatorEnvironment(CLEAN), i) for i in range(300))
    sloppy = CalculatorEnvironment(CalculatorOptions(answers_early=0.6, ignores_precedence=0.4))
    right = sum(outcome(sloppy, i) for i in range(600)) / 600
    assert 0.35 < right < 0.8


def test_demonstrations_follow_the_tool_and_correct_themselves_after_an_error():
    environment = CalculatorEnvironment(CalculatorOptions(two_operations_in_one_call=0.5, ignores_precedence=0.5))
    kinds = {"two operations": 0, "out of range": 0, "tool failure": 0}
    for index in range(500):
        turns = environment.demonstration(index, 1)
        assert [t.is_action for t in turns] == [False] + [True, False] * ((len(turns) - 2) // 2) + [True]
        for said, seen, after in zip(turns[1::2], turns[2::2], turns[3::2], strict=False):
            expected = use_tool(said.text)
            if seen.text != "<result>error</result>":
                assert seen.text == f"<result>{expected}</result>"
                continue
            two = re.fullmatch(r"<call>\d[-+*]\d[-+*]\d</call>", said.text)
            kind = "two operations" if two else "out of range" if expected is None else "tool failure"
            kinds[kind] += 1
            assert after.text.startswith("<answer>") or re.fullmatch(r"<call>\d+[-+*]\d+</call>", after.text)
            if kind == "tool failure" and after.text != said.text:
                assert turns.count(said) >= 4  # patience is at its end
    assert all(kinds.values()), kinds


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "calculater"}, "did you mean 'calculator'"),
        ({"name": "x"}, "known are calculator"),
        ({"options": {"answers_erly": 0.1}}, r"options.answers_erly.*did you mean 'answers_early'"),
        ({"options": {"seed": 0.5}}, "options.seed: expected int, got float 0.5"),
        ({"options": {"seed": True}}, "expected int, got bool"),
        ({"options": {"answers_early": "much"}}, "expected float, got str 'much'"),
        ({"options": {"answers_early": 1.5}}, r"answers_early: expected a probability in \[0, 1\], got 1.5"),
    ],
)
def test_wrong_names_and_options_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make_environment(EnvironmentConfig(**config))


def test_options_reach_the_environment():
    environment = make_environment(EnvironmentConfig(options={"three_operations": 1, "seed": 4}))
    assert isinstance(environment, CalculatorEnvironment)
    assert environment.options == CalculatorOptions(seed=4, three_operations=1)
    assert {environment.prompt("train", i).task for i in range(30)} == {"calculator_3"}
