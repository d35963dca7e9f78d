"""Calls as Llama 3.1 to 3.3 write them: the whole turn is a JSON object with name and parameters.

After ``<|python_tag|>`` stands such an object too, or ``NAME.call(KEY="TEXT")`` for the tools that the family knows by
name, or code, which is a call of the tool ``python``. Several objects are set apart by ``;``.
"""

import json
import re
from typing import Any

from megasao.environments.tools.calls import (
    Malformed,
    Schemas,
    ToolCall,
    after_thoughts,
    as_call,
    read_json,
    shorten,
)

_TAG = "<|python_tag|>"
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_BUILT_IN = re.compile(r"([A-Za-z_]\w*)\.call\(")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")


class Llama3Format:
    """A turn is calls or text, not both."""

    name = "llama3"

    def parse(self, text: str, schemas: Schemas) -> list[ToolCall | Malformed]:
        """The calls in a turn. Text that begins like an object without a name is no call."""
        said = after_thoughts(text).strip()
        for end in _ENDS:
            said = said.removesuffix(end)
        before, tag, tagged = said.partition(_TAG)
        if tag:
            return _tagged(tagged.strip())
        said = before.strip()
        return _objects(said) if said.startswith("{") and '"name"' in said else []

    def render(self, call: ToolCall) -> str:
        """The call as one JSON object."""
        return json.dumps({"name": call.name, "parameters": dict(call.arguments)}, ensure_ascii=False)


def _tagged(said: str) -> list[ToolCall | Malformed]:
    if said.startswith("{"):
        return _objects(said)
    built_in = _BUILT_IN.match(said)
    if built_in is not None:
        return [_built_in(built_in[1], said[built_in.end() :])]
    return [ToolCall("python", {"code": said})] if said else [Malformed(f"expected a call after {_TAG}, got nothing")]


def _objects(said: str) -> list[ToolCall | Malformed]:
    found: list[ToolCall | Malformed] = []
    position = 0
    while position < len(said):
        try:
            value, end = read_json(said, position)
        except ValueError as error:
            return [*found, Malformed(f"the call is no JSON: {error}")]
        found.append(as_call(value, "parameters"))
        rest = said[end:].lstrip()
        if rest and not rest.startswith((";", "{")):
            return [*found, Malformed(f"expected nothing after a call, got {shorten(rest)}")]
        position = len(said) - len(rest.removeprefix(";").lstrip())
    return found


def _built_in(name: str, inside: str) -> ToolCall | Malformed:
    arguments: dict[str, Any] = {}
    while (key := _KEY.match(inside)) is not None:
        try:
            arguments[key[1]], end = read_json(inside, key.end())
        except ValueError as error:
            return Malformed(f"the argument {key[1]} is no JSON: {error}")
        inside = inside[end:].lstrip().removeprefix(",")
    if inside.strip() != ")":
        return Malformed(f"expected KEY=VALUE pairs and ) in {name}.call, got {shorten(inside)}")
    return ToolCall(name, arguments)
