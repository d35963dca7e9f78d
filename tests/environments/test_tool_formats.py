"""Calls of each family read and written, schemas checked, and the tools themselves."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasao.environments.python_tool import INTERPRETER
from megasao.environments.sandbox import bubblewrap
from megasao.environments.sandbox.run import Sandbox
from megasao.environments.tools.calls import MAX_DEPTH, Malformed, ToolCall
from megasao.environments.tools.declared import Calculator, make_tools
from megasao.environments.tools.formats import FORMATS
from megasao.environments.tools.json_schema import check_schema, problem

SCHEMAS = {"run": {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}}
RUN = ToolCall("run", {"text": "5", "count": 5})


def parse(name, text):
    return FORMATS[name].parse(text, SCHEMAS)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read_again(name):
    written = FORMATS[name].render(RUN)
    assert parse(name, written) == [RUN]
    assert parse(name, f"<think>{written}</think>") == [], "thoughts call nothing"
    assert parse(name, "the answer is \\boxed{5}") == []
    assert parse(name, written.replace("count", "counts")) != [RUN], "negative control"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("qwen3", "<tool_call>{'name': 1}</tool_call>", "no JSON: Expecting property name"),
        ("qwen3", "<tool_call>", "no JSON: Expecting value"),
        ("qwen3", '<tool_call>{"name": "run", "arguments": {}}', "expected </tool_call>"),
        ("qwen3", '<tool_call>{"name": "run", "arguments": {}} x</tool_call>', "expected </tool_call>"),
        ("qwen3", "<tool_call>[1]</tool_call>", "expected a JSON object with name and arguments, got [1]"),
        ("qwen3", '<tool_call>{"arguments": {}}</tool_call>', "name as a string under name, got None"),
        ("qwen3", '<tool_call>{"name": "run", "arguments": "x"}</tool_call>', "object under arguments, got 'x'"),
        ("qwen3", '<tool_call>{"name": "run", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON number"),
        ("qwen3", '<tool_call>{"name": "run", "arguments": {"a": 1e999}}</tool_call>', "too large a number"),
        ("qwen3", "<tool_call>" + "[" * 100_000, "too deeply nested"),
        ("qwen3", "<tool_call>" + "[" * 40 + "]" * 40 + "</tool_call>", "too deeply nested"),
        ("qwen3", '<tool_call>{"name": "run", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "no JSON"),
        ("glm", "<tool_call>run", "does not end with </tool_call>"),
        ("glm", "<tool_call><arg_key>a</arg_key></tool_call>", "the tool's name"),
        ("glm", "<tool_call>run<arg_key>a</arg_key></tool_call>", "expected <arg_value>...</arg_value>"),
        ("glm", "<tool_call>run<arg_key>a</tool_call>", "expected <arg_key>...</arg_key>"),
        (
            "glm",
            "<tool_call>run<arg_key>a</arg_key><arg_value>1</arg_value> and</tool_call>",
            "expected <arg_key>...</arg_key>, got ' and'",
        ),
        ("glm", "<tool_call>run" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>", "given twice"),
        ("llama3", '{"name": "run", "parameters": ', "no JSON"),
        ("llama3", '{"name": "run"}', "object under parameters, got None"),
        ("llama3", '{"name": "run", "parameters": {}} so', "expected nothing after a call, got 'so'"),
        ("llama3", "<|python_tag|>", "expected a call after <|python_tag|>"),
        ("llama3", "<|python_tag|>search.call(text=5 x)", "expected KEY=VALUE pairs"),
        ("llama3", "<|python_tag|>search.call(text=five)", "the argument text is no JSON"),
    ],
)
def test_what_cannot_be_read_says_what_is_wrong(name, text, reason):
    found = parse(name, text)
    assert isinstance(found[-1], Malformed) and reason in found[-1].reason
    assert len(found[-1].reason) < 400


def test_formats_as_the_families_write_them():
    text = '<tool_call>\n{"name": "run", "arguments": {"text": "</tool_call>"}}\n</tool_call>'
    assert parse("qwen3", f"so {text}\n{text}<|im_end|>") == [ToolCall("run", {"text": "</tool_call>"})] * 2
    broken, fine = parse("qwen3", f"<tool_call>x</tool_call>{text}")
    assert isinstance(broken, Malformed) and isinstance(fine, ToolCall), "one bad call does not hide the next"
    lines = "<tool_call>run\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n<arg_key>count</arg_key>\n"
    assert parse("glm", f"{lines}<arg_value>5</arg_value>\n</tool_call><|observation|>") == [RUN]
    assert parse("glm", "<tool_call>run</tool_call>") == [ToolCall("run", {})]
    unknown = parse("glm", '<tool_call>other<arg_key>a</arg_key><arg_value>{"b": [1]}</arg_value></tool_call>')
    assert unknown == [ToolCall("other", {"a": {"b": [1]}})]
    one = '{"name": "run", "parameters": {"text": "5", "count": 5}}'
    for written in (one, f"<|python_tag|>{one}<|eom_id|>", f"{one}<|eot_id|>"):
        assert parse("llama3", written) == [RUN]
    assert parse("llama3", f"{one}; {one}") == [RUN, RUN]
    assert parse("llama3", '<|python_tag|>search.call(query="a, b", n=2)<|eom_id|>') == [
        ToolCall("search", {"query": "a, b", "n": 2})
    ]
    assert parse("llama3", "<|python_tag|>print(1)<|eom_id|>") == [ToolCall("python", {"code": "print(1)"})]
    assert parse("llama3", "{x} is a set") == []
    with pytest.raises(ValueError, match="cannot hold its own tags"):
        FORMATS["glm"].render(ToolCall("run", {"text": "</arg_value>"}))


PIECES = [
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</think>", "<think>"),
    *("<|python_tag|>", '{"name": ', '"run"', ', "arguments": ', ', "parameters": ', "{", "}", "[", "]", ";", ".call("),
    *("run", "count", "=", '"', "\\ud800", "1e5", "null", "\n", " "),
]


@pytest.mark.parametrize("name", FORMATS)
def test_reading_never_raises(name):
    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=20).map("".join))
    def check(text):
        for call in parse(name, text):
            assert isinstance(call, Malformed) or problem(call.arguments, SCHEMAS["run"]) is not False

    check()


SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1, "maxLength": 8},
        "mode": {"type": "string", "enum": ["r", "w"]},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 2},
        "limit": {"type": ["number", "null"], "exclusiveMaximum": 10},
        "deep": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "additionalProperties": {"type": "string"},
        },
    },
    "required": ["path"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "a"}, None),
        ({"path": "a", "lines": [1, 2.0], "limit": None, "deep": {"x": True, "y": "z"}, "mode": "w"}, None),
        ({}, "arguments.path: missing"),
        ({"path": 5}, "arguments.path: expected string, got 5"),
        ({"path": ""}, "arguments.path: expected minLength 1, got ''"),
        ({"path": "123456789"}, "arguments.path: expected maxLength 8"),
        ({"path": "a", "mode": "x"}, "arguments.mode: expected one of 'r', 'w', got 'x'"),
        ({"path": "a", "lines": [1, True]}, "arguments.lines[1]: expected integer, got True"),
        ({"path": "a", "lines": [1.5]}, "arguments.lines[0]: expected integer, got 1.5"),
        ({"path": "a", "lines": [0]}, "arguments.lines[0]: expected minimum 1, got 0"),
        ({"path": "a", "lines": [1, 1, 1]}, "arguments.lines: expected maxItems 2"),
        ({"path": "a", "limit": 10}, "arguments.limit: expected exclusiveMaximum 10, got 10"),
        ({"path": "a", "deep": {"x": 1}}, "arguments.deep.x: expected boolean, got 1"),
        ({"path": "a", "deep": {"y": 1}}, "arguments.deep.y: expected string, got 1"),
        ({"path": "a", "pat": "b"}, "there is no argument 'pat' (did you mean 'path'?); the arguments are path, mode"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments, message):
    check_schema(SCHEMA, "parameters")
    found = problem(arguments, SCHEMA)
    assert found is None if message is None else message in found


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"typ": "string"}, r"p\.typ: not a keyword that is checked \(did you mean 'type'\?\)"),
        ({"properties": {"a": {"pattern": "x"}}}, r"p\.properties\.a\.pattern: not a keyword"),
        ({"type": "text"}, r"p\.type: expected one of object, array"),
        ({"type": {"type": "object"}}, r"p\.type: expected one of object, array"),
        ({"type": [["object"]]}, r"p\.type: expected one of object, array"),
        ({"properties": []}, r"p\.properties: expected a mapping"),
        ({"required": "a"}, r"p\.required: expected a list of names"),
        ({"additionalProperties": False, "required": ["a"]}, r"p\.required: 'a' is not among the properties"),
        ({"enum": []}, r"p\.enum: expected a list of values"),
        ({"minimum": "1"}, r"p\.minimum: expected a number"),
        ({"items": 5}, r"p\.items: expected a JSON schema"),
        ({"additionalProperties": {"type": 5}}, r"p\.additionalProperties\.type"),
    ],
)
def test_a_schema_that_is_not_understood_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        check_schema(schema, "p")


def call(tool, **arguments):
    assert problem(arguments, tool.parameters) is None
    return asyncio.run(tool.begin().call(arguments))


def test_the_calculator_does_one_operation():
    assert call(Calculator(), operation="multiply", left=-7, right=8.0) == ("-56", True)
    assert call(Calculator(), operation="subtract", left=7, right=8) == ("-1", True)
    assert "maximum" in problem({"operation": "add", "left": 10**13, "right": 1}, Calculator().parameters)


COUNT = {
    "description": "Counts words.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "program": "import json\nprint(len(json.load(open('arguments.json'))['text'].split()))\n",
}


@pytest.mark.skipif(not bubblewrap.Path(INTERPRETER).exists(), reason=f"the system has no {INTERPRETER}")
def test_a_program_of_the_config_is_a_tool():
    """Here without isolation, which is tests/sandbox's part."""
    tools = make_tools({"count": COUNT, "python": {}, "calculator": {}}, Sandbox("none"), 200)
    assert call(tools["count"], text="a b c") == ("```output\n3\n```", True)
    assert tools["count"].declaration["function"]["parameters"] == COUNT["parameters"]

    async def twice():
        session = tools["python"].begin()
        await session.call({"code": "open('f', 'w').write('kept')"})
        return await session.call({"code": "print(open('f').read())\nraise SystemExit(3)"})

    assert asyncio.run(twice()) == ("```output\nkept\n```", False)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"python": {}}, "tools.python: it runs a program, and there is no sandbox"),
        ({"count": 5}, "tools.count: expected a mapping, got 5"),
    ],
)
def test_tools_that_cannot_be_are_refused(declared, message):
    with pytest.raises(ValueError, match=message):
        make_tools(declared, None, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"progam": "x"}, r"tools\.count\.progam: no such key \(did you mean 'program'"),
        ({"program": ""}, r"tools\.count\.program: expected text"),
        ({"description": None}, r"tools\.count\.description: expected text"),
        ({"parameters": {"type": "array"}}, r"parameters\.type: expected object"),
        ({"parameters": {"typ": "array"}}, r"parameters\.typ: not a keyword"),
    ],
)
def test_declarations_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_tools({"count": {**COUNT, **change}}, Sandbox("none"), 100)


def test_the_depth_of_arguments_is_bounded():
    deep = "[" * (MAX_DEPTH - 3) + "]" * (MAX_DEPTH - 3)
    (fine,) = parse("qwen3", '<tool_call>{"name": "run", "arguments": {"a": ' + deep + "}}</tool_call>")
    assert isinstance(fine, ToolCall)
