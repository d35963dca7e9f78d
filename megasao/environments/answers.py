r"""Finding the final answer in a model's text, by a rule that the task names. Pure text work.

Invariants:
- only the text after the last ``</think>`` counts, and the last answer in it;
- the answer of ``boxed`` has balanced braces; an answer that was begun and not closed is none;
- the token that ends the model's turn, which may follow at once, is no part of an answer;
- an empty answer, or one longer than ``MAX_ANSWER`` characters, is none.
"""

import re
from collections.abc import Callable

MAX_ANSWER = 2000
"""Longest final answer, characters. A longer one is not graded: it is wrong."""

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\$?\.\d+")
_NUMBER_WINDOW = 4096
_END_OF_TURN = re.compile(r"<[^<>\s]+>")
"""As models write it: ``<|im_end|>``, ``</s>``, ``<end_of_turn>``."""


def find_answer(text: str, rule: str) -> str | None:
    """The final answer in ``text`` by ``rule`` (one of ``RULES``), stripped; None if there is none."""
    _, _, said = text.rpartition("</think>")
    answer = RULES[rule](said)
    answer = answer.strip() if answer is not None else ""
    return answer if 0 < len(answer) <= MAX_ANSWER else None


def last_boxed(text: str) -> str | None:
    r"""The inside of the last ``\boxed{...}``."""
    beginnings = list(_BOXED.finditer(text))
    return _until_closed(text, beginnings[-1].end()) if beginnings else None


def _until_closed(text: str, start: int) -> str | None:
    depth, position = 1, start
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            position += 1
        elif letter in "{}":
            depth += 1 if letter == "{" else -1
            if depth == 0:
                return text[start:position]
        position += 1
    return None


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """The inside of the last ``<answer>...</answer>``, or of another ``tag``."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if closing and opening else None


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last ``####``, as in the solutions of GSM8K."""
    _, hashes, rest = text.rpartition("####")
    line = rest.strip().partition("\n")[0]
    return (_without_end_of_turn(line) or line) if hashes else None


def _without_end_of_turn(line: str) -> str:
    """The line without the tokens at its end, one or several; in time that grows with its length, whatever is in it."""
    end = len(line)
    while end and line[end - 1] == ">" and _END_OF_TURN.fullmatch(line, start := max(line.rfind("<", 0, end), 0), end):
        end = start
        while end and line[end - 1].isspace():
            end -= 1
    return line[:end]


def last_number(text: str) -> str | None:
    """The last number (thousands separators and a fraction allowed) in the last 4096 characters."""
    found = _NUMBER.findall(text[-_NUMBER_WINDOW:])
    return found[-1].replace("$", "") if found else None


RULES: dict[str, Callable[[str], str | None]] = {
    "boxed": last_boxed,
    "tag": last_tagged,
    "hashes": after_hashes,
    "number": last_number,
}
