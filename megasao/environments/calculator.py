"""Arithmetic with a calculator that does one operation a call: the multi-turn agent of the laptop demo.

    <problem>2+3*4</problem> <call>3*4</call> <result>12</result>
    <call>2+12</call> <result>14</result> <answer>14</answer>

The tool answers ``<result>error</result>`` to anything but one operation on two whole numbers in [0, 999] with a
result in that range, and now and then to a good call too (``tool_failure_rate``): then the call must be repeated.
A well-formed answer ends the episode with reward 1 if it is right, else 0.

Invariants:
- a problem's text is ``eval`` if and only if its hash says so, so the splits share no problem;
- a prompt is a function of (seed, split, index) alone, the same in every process;
- the same (prompt, episode seed, actions) give the same observations.
"""

import random
import re
from dataclasses import dataclass

from megasao.environments import arithmetic
from megasao.environments.base import DemonstrationTurn, Episode, Prompt, Split, StepResult, check_place
from megasao.environments.calculator_demonstrator import Habits, demonstrate
from megasao.environments.options import OptionsEnvironment
from megasao.environments.splits import split_of, text_hash

TAGS = ("<problem>", "</problem>", "<call>", "</call>", "<result>", "</result>", "<answer>", "</answer>", "error")
CHARACTERS = "0123456789+-*()"

_NUMBER = r"(0|[1-9][0-9]{0,2})"
_CALL = re.compile(rf"<call>{_NUMBER}([-+*]){_NUMBER}</call>")
_ANSWER = re.compile(r"<answer>(0|[1-9][0-9]*)</answer>")


@dataclass(frozen=True)
class CalculatorOptions:
    """Options under ``environment.options``. The last three are habits of the demonstrator, as probabilities."""

    seed: int = 0
    three_operations: float = 0.36
    """Share of problems with three operations; the others have two."""
    tool_failure_rate: float = 0.05
    """Probability that the tool answers ``error`` to a good call."""
    answers_early: float = 0.57
    """Problems of two operations, taken for easy, whose demonstration answers with the first result."""
    ignores_precedence: float = 0.3
    """Problems of two operations whose demonstration goes from left to right whatever the precedence."""
    two_operations_in_one_call: float = 0.1
    """Demonstrations that first send the tool a call with two operations, and then read the error."""

    def __post_init__(self) -> None:
        for name in (
            "three_operations",
            "tool_failure_rate",
            "answers_early",
            "ignores_precedence",
            "two_operations_in_one_call",
        ):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"environment.options.{name}: expected a probability in [0, 1], got {value}")


def use_tool(call: str) -> str | None:
    """The tool's result for a well-formed call in range, else None."""
    match = _CALL.fullmatch(call)
    if match is None:
        return None
    left, operator, right = match.groups()
    result = arithmetic.apply(operator, int(left), int(right))
    return str(result) if 0 <= result <= arithmetic.LIMIT else None


class CalculatorEpisode(Episode):
    """One problem being solved."""

    def __init__(self, answer: int, seed: int, tool_failure_rate: float) -> None:
        self._answer = answer
        self._generator = random.Random(seed)
        self._tool_failure_rate = tool_failure_rate

    async def step(self, action_text: str) -> StepResult:
        """Answer one turn: a call, a final answer, or anything else (which the tool calls an error)."""
        return self.respond(action_text)

    def respond(self, action_text: str) -> StepResult:
        """``step`` without the event loop."""
        answer = _ANSWER.fullmatch(action_text)
        if answer is not None:
            return StepResult("", float(int(answer[1]) == self._answer), True)
        result = use_tool(action_text)
        if result is not None and self._generator.random() < self._tool_failure_rate:
            result = None
        observation = f"<result>{result or 'error'}</result>"
        return StepResult(observation, 0.0, False, {"tool_calls": 1.0, "tool_errors": float(result is None)})


class CalculatorEnvironment(OptionsEnvironment[CalculatorOptions]):
    """Arithmetic problems of two or three operations."""

    name = "calculator"
    options_type = CalculatorOptions

    def __init__(self, options: CalculatorOptions | None = None) -> None:
        super().__init__(options or CalculatorOptions())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """A call or an answer ends the turn."""
        return ("</call>", "</answer>")

    def prompt(self, split: Split, index: int) -> Prompt:
        """The problem with this index; ValueError below 0 or for an unknown split."""
        check_place(split, index)
        operations, expression = self._problem(split, split, index)
        text = arithmetic.render(expression)
        answer = arithmetic.reductions(expression)[-1][-1]
        return Prompt(
            prompt_id=f"calculator/{split}/{index}",
            task=f"calculator_{operations}",
            text=f"<problem>{text}</problem>",
            payload={"expression": text, "answer": answer},
        )

    def start(self, prompt: Prompt, seed: int) -> CalculatorEpisode:
        """Begin an episode; ``seed`` decides when the tool fails."""
        return CalculatorEpisode(int(prompt.payload["answer"]), seed, self.options.tool_failure_rate)

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        """A sloppy demonstration on a training problem (a stream of its own, not the prompts of training)."""
        if index < 0:
            raise ValueError(f"demonstration index: expected 0 or more, got {index}")
        _, expression = self._problem("train", f"demonstration-{seed}", index)
        answer = arithmetic.reductions(expression)[-1][-1]
        generator = random.Random(text_hash("calculator-habits", self.options.seed, seed, index))
        episode = CalculatorEpisode(answer, generator.getrandbits(63), self.options.tool_failure_rate)
        habits = Habits(
            answers_early=self.options.answers_early,
            ignores_precedence=self.options.ignores_precedence,
            two_operations_in_one_call=self.options.two_operations_in_one_call,
        )
        prompt = DemonstrationTurn(f"<problem>{arithmetic.render(expression)}</problem>", False)
        return [prompt, *demonstrate(expression, habits, generator, episode.respond)]

    def _problem(self, split: Split, stream: str, index: int) -> tuple[int, arithmetic.Expression]:
        """The first drawn expression of this stream and index that lies in ``split``; (operations, expression)."""
        generator = random.Random(text_hash("calculator-problem", self.options.seed, stream, index))
        operations = 3 if generator.random() < self.options.three_operations else 2
        while True:
            expression = arithmetic.draw(generator, operations)
            if split_of(self.name, arithmetic.render(expression)) == split:
                return operations, expression
