"""What a model's turn asks for: calls of tools, and what looks like a call and is none. Pure text work.

Invariant: reading a turn never raises, whatever its text; what cannot be read becomes ``Malformed`` with the reason.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

SHOWN = 200
"""Most characters of a model's own text that a reason repeats."""

MAX_DEPTH = 32
"""Deepest nesting of a call's arguments."""

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters, by tool."""


@dataclass(frozen=True)
class ToolCall:
    """One call; ``arguments`` are JSON values."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Malformed:
    """Something that was meant as a call and cannot be read."""

    reason: str


class ToolFormat(Protocol):
    """How a family of models writes calls."""

    name: str

    def parse(self, text: str, schemas: Schemas) -> list[ToolCall | Malformed]:
        """The calls in a turn, in order; thoughts do not count. Empty: the turn calls no tool."""

    def render(self, call: ToolCall) -> str:
        """The call as the model would write it. ValueError for one that the format cannot express."""


def after_thoughts(text: str) -> str:
    """What a turn says after its last ``</think>``."""
    return text.rpartition("</think>")[2]


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at ``start`` (spaces skipped) and its end; ValueError says what is wrong."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    _check_depth(value)
    return value, end


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise ValueError("too deeply nested")


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def as_call(value: Any, arguments_key: str) -> ToolCall | Malformed:
    """A decoded call object with ``name`` and ``arguments_key``."""
    if not isinstance(value, dict):
        return Malformed(f"expected a JSON object with name and {arguments_key}, got {shorten(value)}")
    name, arguments = value.get("name"), value.get(arguments_key)
    if not isinstance(name, str):
        return Malformed(f"expected the tool's name as a string under name, got {shorten(name)}")
    if not isinstance(arguments, dict):
        return Malformed(f"expected a JSON object under {arguments_key}, got {shorten(arguments)}")
    return ToolCall(name, arguments)


def shorten(value: Any) -> str:
    """``repr`` of a value, not longer than ``SHOWN`` characters."""
    text = repr(value[:SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shorten(text)} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
