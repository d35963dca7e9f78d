"""The deliberately sloppy demonstrator of the calculator environment.

Its demonstrations hold right and wrong continuations of the same beginnings, so a model fine-tuned on them can do
everything the task needs and has habits that reinforcement learning must undo.

Invariants: with all habits at 0 every demonstration ends with the right answer (unless the tool fails ``PATIENCE``
times in a row); after an ``error`` the demonstrator goes on with one well-formed operation in range.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from megasao.environments import arithmetic
from megasao.environments.base import DemonstrationTurn, StepResult

PATIENCE = 4
"""Most times that a good call is sent before the demonstrator goes on regardless."""

EASY = 2
"""Most operations of a problem that looks easy enough to be careless with."""

Operation = tuple[int, str, int, int]


@dataclass(frozen=True)
class Habits:
    """Probabilities of each bad habit; see ``CalculatorOptions``."""

    answers_early: float
    ignores_precedence: float
    two_operations_in_one_call: float


def demonstrate(
    expression: arithmetic.Expression,
    habits: Habits,
    generator: random.Random,
    respond: Callable[[str], StepResult],
) -> list[DemonstrationTurn]:
    """The demonstrator's turns and the tool's answers; ``respond`` plays the environment."""
    turns: list[DemonstrationTurn] = []
    plan = arithmetic.reductions(expression)
    easy = len(plan) <= EASY
    early = easy and generator.random() < habits.answers_early
    if generator.random() < habits.two_operations_in_one_call:
        _say(f"<call>{_two_operations(expression)}</call>", turns, respond)
    if easy and generator.random() < habits.ignores_precedence:
        hasty = arithmetic.left_to_right(expression)
        plan = hasty if _reads_no_error(hasty, turns, respond) else plan
    operations = plan[:-1] if early else plan
    for operation in operations:
        _call(operation, turns, respond)
    turns.append(DemonstrationTurn(f"<answer>{operations[-1][-1]}</answer>", True))
    return turns


def _say(text: str, turns: list[DemonstrationTurn], respond: Callable[[str], StepResult]) -> str:
    """Take one turn; the tool's observation."""
    observation = respond(text).observation
    turns += [DemonstrationTurn(text, True), DemonstrationTurn(observation, False)]
    return observation


def _call(operation: Operation, turns: list[DemonstrationTurn], respond: Callable[[str], StepResult]) -> None:
    """Send one operation until the tool answers it."""
    left, operator, right, _ = operation
    for _ in range(PATIENCE):
        if "error" not in _say(f"<call>{left}{operator}{right}</call>", turns, respond):
            return


def _reads_no_error(
    plan: list[Operation], turns: list[DemonstrationTurn], respond: Callable[[str], StepResult]
) -> bool:
    """Whether the plan stays in range; if not, it is followed up to the error, and the error is read."""
    for position, (left, operator, right, result) in enumerate(plan):
        if not 0 <= result <= arithmetic.LIMIT:
            for operation in plan[:position]:
                _call(operation, turns, respond)
            _say(f"<call>{left}{operator}{right}</call>", turns, respond)
            return False
    return True


def _two_operations(expression: arithmetic.Expression) -> str:
    """The first two operations as written, without parentheses: more than the tool takes."""
    (a, first, b, _), (_, second, c, _) = arithmetic.left_to_right(expression)[:2]
    return f"{a}{first}{b}{second}{c}"
