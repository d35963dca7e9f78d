"""Chat templates built as those of Qwen3, GLM-4.5, GLM-5 and Llama-3.1 are: their special tokens, what they do with
thoughts and tools, in words of our own; and turns of a model as each of them writes them."""

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megasao.environments.tools.calls import ToolCall
from megasao.environments.tools.formats import FORMATS

_QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- 'Functions that you may call:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\nWrite a call as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set found = namespace(query=messages | length - 1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set found.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought, content = '', m.content %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > found.query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\n' }}{% endif %}
            {%- set f = call.function %}
            {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

_GLM = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\nFunctions that you may call:\n<tools>\n' }}
    {%- for tool in tools %}{{- (tool | tojson(ensure_ascii=False)) + '\n' }}{% endfor %}
    {{- '</tools>' }}
{%- endif %}
{%- set found = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set found.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role in ['user', 'system'] %}
        {{- '<|' + m.role + '|>' + BREAK + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- set thought, content = '', m.content %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {%- set keep = loop.index0 > found.query or (clear_thinking is defined and not clear_thinking) %}
        {{- '<|assistant|>' + BREAK + '<think>' + (thought.strip() if keep else '') + '</think>' }}
        {%- if content.strip() %}{{- BREAK + content.strip() }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- BREAK + '<tool_call>' + call.function.name + BREAK }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>' + BREAK + '<arg_value>' }}
                {{- value if value is string else value | tojson(ensure_ascii=False) }}
                {{- '</arg_value>' + BREAK }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{% endif %}
        {{- BREAK + '<tool_response>' + BREAK + m.content + BREAK + '</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' + OPENING }}{% endif %}
"""

_LLAMA3 = r"""
{{- bos_token }}
{%- set rest = messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{% endif %}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set rest = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer with a call of a function, as JSON.\n\n' }}
    {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\n\n' }}{% endfor %}
    {{- rest[0].content | trim + '<|eot_id|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for m in rest %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('only one call at a time') }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif m.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- (m.content | tojson if m.content is mapping or m.content is iterable else m.content) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""


@dataclass(frozen=True)
class Family:
    """``write`` is a turn (thought, content, calls) as the model writes it after the template's opening of a turn,
    without the token that ends it: ``end_of_call`` after calls, ``end`` otherwise."""

    template: str
    format: str
    special: tuple[str, ...]
    end: str
    end_of_call: str
    write: Callable[[str, str, Sequence[ToolCall]], str]
    variables: tuple[tuple[str, object], ...] = ()
    thinks: bool = True
    speaks_and_calls: bool = True
    most_calls: int = 3


def _qwen3(opening: str) -> Callable[[str, str, Sequence[ToolCall]], str]:
    def write(thought: str, content: str, calls: Sequence[ToolCall]) -> str:
        said = "\n".join([*([content] if content else []), *map(FORMATS["qwen3"].render, calls)])
        return f"{opening}{thought}\n</think>\n\n{said}" if thought else said

    return write


def _without_thought(thought: str, content: str, calls: Sequence[ToolCall]) -> str:
    return _qwen3("")("", content, calls)


def _glm45(thought: str, content: str, calls: Sequence[ToolCall]) -> str:
    parts = [f"<think>{thought}</think>", *([content] if content else [])]
    for call in calls:
        values = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in call.arguments.items()
        }
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
        parts.append(f"<tool_call>{call.name}\n{pairs}</tool_call>")
    return "\n" + "\n".join(parts)


def _glm5(thought: str, content: str, calls: Sequence[ToolCall]) -> str:
    return f"{thought}</think>{content}" + "".join(map(FORMATS["glm"].render, calls))


def _llama3(thought: str, content: str, calls: Sequence[ToolCall]) -> str:
    return FORMATS["llama3"].render(calls[0]) if calls else content


_QWEN3_TOKENS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_GLM_TOKENS = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>"),
)
_LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")

QWEN3 = Family(_QWEN3, "qwen3", _QWEN3_TOKENS, "<|im_end|>", "<|im_end|>", _qwen3("<think>\n"))
QWEN3_THINKING = Family(
    _QWEN3.replace(
        "'<|im_start|>assistant\\n' }}\n    {%- if enable", "'<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable"
    ),
    "qwen3",
    _QWEN3_TOKENS,
    "<|im_end|>",
    "<|im_end|>",
    _qwen3(""),
)
GLM45 = Family(
    _GLM.replace("BREAK", r"'\n'").replace("OPENING", "''"),
    "glm",
    _GLM_TOKENS,
    "<|user|>",
    "<|observation|>",
    _glm45,
)
GLM5 = Family(
    _GLM.replace("BREAK", "''").replace("OPENING", "'<think>'"),
    "glm",
    _GLM_TOKENS,
    "<|user|>",
    "<|observation|>",
    _glm5,
)
LLAMA3 = Family(
    _LLAMA3,
    "llama3",
    _LLAMA3_TOKENS,
    "<|eot_id|>",
    "<|eot_id|>",
    _llama3,
    (("bos_token", "<|begin_of_text|>"),),
    thinks=False,
    speaks_and_calls=False,
    most_calls=1,
)

QWEN3_INSTRUCT = replace(QWEN3, write=_without_thought, thinks=False)

FAMILIES = {"qwen3": QWEN3, "qwen3_thinking": QWEN3_THINKING, "glm45": GLM45, "glm5": GLM5, "llama3": LLAMA3}


def published_templates() -> dict[str, str]:
    """Published chat templates that are at hand: those which the package trl carries as the models ship them, GLM's
    later ones (``make chat-templates``), and every ``*.jinja`` in the directory that MEGASAO_CHAT_TEMPLATES names."""
    found = importlib.util.find_spec("trl")  # its files only: nothing of it is imported
    directories = (
        [Path(place) / "chat_templates" for place in (found.submodule_search_locations or [])] if found else []
    )
    directories.append(Path(__file__).parents[1] / "build" / "chat_templates")
    if named := os.environ.get("MEGASAO_CHAT_TEMPLATES"):
        directories.append(Path(named))
    return {
        file.stem: file.read_text(encoding="utf-8") for place in directories for file in sorted(place.glob("*.jinja"))
    }


def family_of(template: str) -> Family | None:
    """The family whose turns this published template writes; None for other models and other formats of calls."""
    if "[gMASK]<sop>" in template and "<arg_key>" in template:
        family = GLM5 if "'<tool_call>' +" in template else GLM45
    elif "<|start_header_id|>" in template and "ipython" in template:
        family = LLAMA3
    elif "<|im_start|>" in template and '{"name": ' in template.replace("\\", "") and "<function=" not in template:
        thinks = "reasoning_content" in template
        opened = "assistant\\n<think>\\n' }}\n{%- endif" in template
        family = (QWEN3_THINKING if opened else QWEN3) if thinks else QWEN3_INSTRUCT
    else:
        return None
    return replace(family, template=template)
