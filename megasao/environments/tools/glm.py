"""Calls as GLM-4.5 to GLM-5 write them: the name and pairs of tags, between ``<tool_call>`` and ``</tool_call>``.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>

Some members of the family set the parts on lines of their own. A string stands as it is, any other value as JSON; the
tool's schema says which of the two a text is.
"""

import json
from typing import Any

from megasao.environments.tools.calls import Malformed, Schemas, ToolCall, after_thoughts, read_json, shorten

_BEGIN, _END = "<tool_call>", "</tool_call>"
_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class GlmFormat:
    """Any number of calls in a turn, each between its tags."""

    name = "glm"

    def parse(self, text: str, schemas: Schemas) -> list[ToolCall | Malformed]:
        """The calls in a turn; text around them is left alone."""
        said, found, position = after_thoughts(text), [], 0
        while (begin := said.find(_BEGIN, position)) >= 0:
            call, position = _read(said, begin + len(_BEGIN), schemas)
            found.append(call)
        return found

    def render(self, call: ToolCall) -> str:
        """The call without line breaks between its parts."""
        pairs = [(key, value if isinstance(value, str) else _json(value)) for key, value in call.arguments.items()]
        for text in (call.name, *(text for pair in pairs for text in pair)):
            if any(tag in text for tag in (_BEGIN, _END, *_TAGS)):
                raise ValueError(f"a call in GLM's format cannot hold its own tags, got {shorten(text)}")
        opened, closed, value_opened, value_closed = _TAGS
        inside = "".join(f"{opened}{key}{closed}{value_opened}{text}{value_closed}" for key, text in pairs)
        return f"{_BEGIN}{call.name}{inside}{_END}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read(said: str, start: int, schemas: Schemas) -> tuple[ToolCall | Malformed, int]:
    """The call that begins at ``start``, and where to go on."""
    end = said.find(_END, start)
    if end < 0:
        return Malformed(f"the call does not end with {_END}"), len(said)
    name, opened, pairs = said[start:end].partition(_TAGS[0])
    name = name.strip()
    if not name:
        return Malformed("expected the tool's name after <tool_call>"), end + len(_END)
    arguments = _arguments(opened + pairs, schemas.get(name, {}).get("properties", {}))
    call = arguments if isinstance(arguments, Malformed) else ToolCall(name, arguments)
    return call, end + len(_END)


def _arguments(text: str, properties: dict[str, Any]) -> dict[str, Any] | Malformed:
    found: dict[str, Any] = {}
    position = 0
    while text[position:].strip():
        pair = []
        for opened, closed in (_TAGS[:2], _TAGS[2:]):
            begin = text.find(opened, position)
            end = text.find(closed, begin + len(opened)) if begin >= 0 else -1
            if end < 0 or text[position:begin].strip():
                return Malformed(f"expected {opened}...{closed}, got {shorten(text[position:])}")
            pair.append(text[begin + len(opened) : end])
            position = end + len(closed)
        key = pair[0].strip()
        if key in found:
            return Malformed(f"the argument {shorten(key)} is given twice")
        found[key] = _value(pair[1], properties.get(key, {}))
    return found


def _value(text: str, schema: Any) -> Any:
    """A string where the schema wants one; else JSON where it is JSON."""
    kinds = schema.get("type", ()) if isinstance(schema, dict) else ()
    if kinds == "string":
        return text
    try:
        value, end = read_json(text)
    except ValueError:
        return text
    return text if text[end:].strip() or isinstance(value, str) else value
