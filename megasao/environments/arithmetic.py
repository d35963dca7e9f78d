"""Small arithmetic expressions: made, written with minimal parentheses, and evaluated in two orders.

Invariants:
- ``render`` writes no parenthesis that could be left out without changing the tree, up to the associativity of
  + and * (``a+(b+c)`` keeps its parentheses: the tree is what is written);
- every intermediate value of a drawn expression lies in [0, ``LIMIT``];
- ``reductions`` ends with the expression's value.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

LIMIT = 999
OPERATORS = "+-*"


@dataclass(frozen=True)
class Node:
    """``left operator right``."""

    operator: str
    left: Expression
    right: Expression


Expression = int | Node


def apply(operator: str, left: int, right: int) -> int:
    """The value of one operation."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    assert operator == "*", operator
    return left * right


def render(expression: Expression) -> str:
    """Text with minimal parentheses; ``*`` binds tighter, all operators are left-associative."""
    if isinstance(expression, int):
        return str(expression)
    strength = _strength(expression.operator)
    left, right = render(expression.left), render(expression.right)
    if isinstance(expression.left, Node) and _strength(expression.left.operator) < strength:
        left = f"({left})"
    if isinstance(expression.right, Node) and _strength(expression.right.operator) <= strength:
        right = f"({right})"
    return left + expression.operator + right


def _strength(operator: str) -> int:
    return 2 if operator == "*" else 1


def reductions(expression: Expression) -> list[tuple[int, str, int, int]]:
    """The operations in the right order, innermost and leftmost first: (left, operator, right, result)."""
    found: list[tuple[int, str, int, int]] = []
    _reduce(expression, found)
    return found


def _reduce(expression: Expression, found: list[tuple[int, str, int, int]]) -> int:
    if isinstance(expression, int):
        return expression
    left, right = _reduce(expression.left, found), _reduce(expression.right, found)
    result = apply(expression.operator, left, right)
    found.append((left, expression.operator, right, result))
    return result


def left_to_right(expression: Expression) -> list[tuple[int, str, int, int]]:
    """The operations in reading order, ignoring precedence and parentheses: a common mistake."""
    leaves, operators = list(_leaves(expression)), list(_operators(expression))
    found: list[tuple[int, str, int, int]] = []
    value = leaves[0]
    for operator, right in zip(operators, leaves[1:], strict=True):
        result = apply(operator, value, right)
        found.append((value, operator, right, result))
        value = result
    return found


def _leaves(expression: Expression) -> Iterator[int]:
    if isinstance(expression, int):
        yield expression
    else:
        yield from _leaves(expression.left)
        yield from _leaves(expression.right)


def _operators(expression: Expression) -> Iterator[str]:
    if isinstance(expression, Node):
        yield from _operators(expression.left)
        yield expression.operator
        yield from _operators(expression.right)


def draw(generator: random.Random, operations: int) -> Expression:
    """A random expression with this many operations, leaves 1-9, and every intermediate in [0, LIMIT]."""
    while True:
        expression = _draw_tree(generator, operations)
        if all(0 <= result <= LIMIT for *_, result in reductions(expression)):
            return expression


def _draw_tree(generator: random.Random, operations: int) -> Expression:
    if operations == 0:
        return generator.randint(1, 9)
    left = generator.randrange(operations)
    return Node(
        generator.choice(OPERATORS),
        _draw_tree(generator, left),
        _draw_tree(generator, operations - 1 - left),
    )
