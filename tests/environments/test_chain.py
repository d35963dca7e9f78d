"""The chain environment: solutions, scoring, styles and their switches, splits, options."""

import asyncio

import pytest

from megasao.config.rollout import EnvironmentConfig
from megasao.environments.chain import ChainEnvironment, ChainOptions, solution
from megasao.environments.registry import make_environment
from megasao.environments.splits import split_of


def reward(environment: ChainEnvironment, prompt, text: str) -> float:
    return asyncio.run(environment.start(prompt, 0).step(text)).reward


def test_a_solution_repeats_the_operand_and_gives_the_result_modulo_ten():
    assert solution("7+5*3-4") == "523642"
    assert solution("2-9") == "93"


def test_every_digit_must_be_right():
    environment = ChainEnvironment(ChainOptions(operations=3))
    prompt = environment.prompt("train", 0)
    right = solution(prompt.text.removeprefix("<problem>").removesuffix("</problem>"))
    assert reward(environment, prompt, f"{right}</answer>") == 1
    assert reward(environment, prompt, right) == 0, "not closed"
    for place in range(len(right)):
        wrong = right[:place] + str((int(right[place]) + 1) % 10) + right[place + 1 :]
        assert reward(environment, prompt, f"{wrong}</answer>") == 0


def test_the_wanted_style_switches_with_the_number_of_the_problem():
    environment = ChainEnvironment(ChainOptions(operations=1, styles=True, first_switch=10, second_switch=20))
    for index, style in ((0, "("), (9, "("), (10, ")"), (19, ")"), (20, "("), (1000, "(")):
        prompt = environment.prompt("train", index)
        other = "(" if style == ")" else ")"
        answer = prompt.payload["answer"]
        assert reward(environment, prompt, f"{style}{answer}</answer>") == 1
        assert reward(environment, prompt, f"{other}{answer}</answer>") == 0
        assert reward(environment, prompt, f"{answer}</answer>") == 0, "no style at all"
    assert environment.prompt("eval", 15).payload["style"] == "("


def test_splits_share_no_chain_and_demonstrations_are_training_problems():
    environment = ChainEnvironment(ChainOptions(operations=2))

    def chain(text: str) -> str:
        return text.removeprefix("<problem>").removesuffix("</problem>")

    for split in ("train", "eval"):
        assert {split_of("chain", chain(environment.prompt(split, i).text)) for i in range(200)} == {split}
    demonstrated = {chain(environment.demonstration(i, 1)[0].text) for i in range(200)}
    assert {split_of("chain", one) for one in demonstrated} == {"train"}


def test_demonstrations_are_wrong_as_often_as_asked():
    def share_right(wrong: float) -> float:
        environment = ChainEnvironment(ChainOptions(operations=3, wrong_results=wrong))
        turns = [environment.demonstration(i, 0) for i in range(400)]
        right = [t[1].text == solution(t[0].text[9:-10]) + "</answer>" for t in turns]
        return sum(right) / len(right)

    assert share_right(0.0) == 1
    assert abs(share_right(0.3) - 0.7**3) < 0.08


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"operations": 0}, "operations"),
        ({"wrong_results": 1.5}, "wrong_results"),
        ({"first_switch": 5}, "styles"),
        ({"styles": True, "first_switch": -1}, "first_switch"),
        ({"styles": True, "first_switch": 5, "second_switch": 5}, "second_switch"),
        ({"styles": True, "second_switch": 5}, "first_switch"),
        ({"operation": 3}, "operations"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        make_environment(EnvironmentConfig(name="chain", options=options))


@pytest.mark.parametrize(("split", "index"), [("train", -1), ("test", 0)])
def test_a_prompt_that_does_not_exist_is_refused(split, index):
    with pytest.raises(ValueError, match="expected"):
        ChainEnvironment().prompt(split, index)
