r"""Whether two mathematical answers are equal, by math-verify. Only for verifier processes: importing it changes sympy.

Answers are read as LaTeX only: math-verify's other reader evaluates plain expressions as Python, and a plain expression
is LaTeX too. Even so the LaTeX reader evaluates every number as Python, through sympy; here sympy reads numbers, and no
other text.

Invariants:
- equal texts are equal answers; an answer that cannot be read is wrong; a reference that cannot be read compares as
  text;
- an error while comparing is an error, not a wrong answer.
"""

import logging
import re
import sys
from typing import Any

import sympy
import sympy.physics.units  # loaded by the first simplify; it makes its names by evaluating text
from math_verify import LatexExtractionConfig, parse, verify
from sympy.parsing import sympy_parser

from megasao.environments.verifiers import guard

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

MAX_DIGITS = 4000
"""Longest whole number that Python converts: reading a longer one takes quadratic time."""

_AS_LATEX = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
_WRAPPED = re.compile(r"^\s*(?:\$\$?|\\\(|\\\[)(.*?)(?:\$\$?|\\\)|\\\])\s*\.?\s*$", re.DOTALL)
_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]{1,4})?")
_SPACES = re.compile(r"\s+")


def grade_math(answer: str, reference: str) -> float:
    """1 if ``answer`` equals ``reference``, else 0. Any exception is an error of the comparison."""
    answer, reference = bare(answer), bare(reference)
    if answer == reference:
        return 1.0
    sys.set_int_max_str_digits(MAX_DIGITS)
    return float(verify(as_formula(reference), as_formula(answer), timeout_seconds=None, raise_on_error=True))


def bare(text: str) -> str:
    """Without the dollars or brackets around it, and with single spaces."""
    match = _WRAPPED.match(text)
    return _SPACES.sub(" ", match[1] if match else text).strip()


def as_formula(text: str) -> list[object]:
    """What math-verify reads: the formula, if it is one, and the text."""
    found: list[object] = parse("\\boxed{" + text + "}", _AS_LATEX, parsing_timeout=None)
    return found


def read_number(text: str, *_: Any, **options: Any) -> sympy.Number:
    """In place of sympy's ``parse_expr``: a whole, rational or decimal number. Any other text is refused."""
    text = text.strip()
    numerator, slash, denominator = text.partition("/")
    if _INTEGER.fullmatch(numerator) and _INTEGER.fullmatch(denominator if slash else "1") and int(denominator or 1):
        return sympy.Rational(int(numerator), int(denominator or 1))
    if _DECIMAL.fullmatch(text):
        return sympy.Float(text)
    raise guard.refuse(f"evaluate {text!r}")


def warm_up() -> None:
    """Import and build what is loaded on first use, so that every worker is forked with it."""
    for answer, reference in (("\\frac{1}{2}", "0.5"), ("\\{1, 2\\}", "(1, 2]"), ("x^2+2x+1", "(x+1)^2"), ("x<3", "2")):
        grade_math(answer, reference)


GRADERS = {"math": grade_math}
sympy_parser.parse_expr = read_number
warm_up()
