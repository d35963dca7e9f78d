"""Calls as Qwen3 writes them: ``<tool_call>``, a JSON object with name and arguments, ``</tool_call>``."""

import json

from megasao.environments.tools.calls import Malformed, Schemas, ToolCall, after_thoughts, as_call, read_json

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Qwen3Format:
    """Any number of calls in a turn, each between its tags."""

    name = "qwen3"

    def parse(self, text: str, schemas: Schemas) -> list[ToolCall | Malformed]:
        """The calls in a turn; text around them is left alone."""
        said, found, position = after_thoughts(text), [], 0
        while (begin := said.find(_BEGIN, position)) >= 0:
            call, position = _read(said, begin + len(_BEGIN))
            found.append(call)
        return found

    def render(self, call: ToolCall) -> str:
        """The call between its tags, each part on a line of its own."""
        inside = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"{_BEGIN}\n{inside}\n{_END}"


def _read(said: str, start: int) -> tuple[ToolCall | Malformed, int]:
    """The call whose JSON begins at ``start``, and where to go on."""
    try:
        value, end = read_json(said, start)
    except ValueError as error:
        return Malformed(f"the call is no JSON: {error}"), _after_end(said, start)
    if not said[end:].lstrip().startswith(_END):
        return Malformed(f"expected {_END} after the JSON object of the call"), _after_end(said, end)
    return as_call(value, "arguments"), _after_end(said, end)


def _after_end(said: str, start: int) -> int:
    end = said.find(_END, start)
    return end + len(_END) if end >= 0 else len(said)
