"""Tools: what the model is told of one, and what a call of it does.

Invariants:
- what a tool runs for the model runs in the sandbox, with the arguments as data;
- a tool answers every call whose arguments fit its schema with text; only a breaking sandbox is a failure.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megasao.environments import arithmetic
from megasao.environments.options import nearest
from megasao.environments.python_tool import INTERPRETER, PythonTool, require_interpreter
from megasao.environments.sandbox.run import Sandbox
from megasao.environments.sandbox.shown import shown
from megasao.environments.sandbox.workspace import pack, unpack, with_files
from megasao.environments.tools.json_schema import check_schema

DECLARED = ("description", "parameters", "program")

_OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*"}
_WHOLE = {"type": "integer", "minimum": -(10**12), "maximum": 10**12}


class ToolSession(ABC):
    """A tool in one episode."""

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """What the model is shown, and whether the call went well. EnvironmentFailure if the sandbox breaks."""


@dataclass(frozen=True, kw_only=True)
class Tool(ABC):
    """``parameters`` is a checked JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def declaration(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @abstractmethod
    def begin(self) -> ToolSession:
        """The tool for one episode."""


@dataclass(frozen=True, kw_only=True)
class Calculator(Tool, ToolSession):
    """One operation on two whole numbers."""

    name: str = "calculator"
    description: str = "Does one operation on two whole numbers."
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {
            "type": "object",
            "properties": {
                "operation": {"type": "string", "enum": list(_OPERATIONS)},
                "left": _WHOLE,
                "right": _WHOLE,
            },
            "required": ["operation", "left", "right"],
            "additionalProperties": False,
        }
    )

    def begin(self) -> ToolSession:
        """Itself: it remembers nothing."""
        return self

    async def call(self, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """The result."""
        operator = _OPERATIONS[arguments["operation"]]
        return str(arithmetic.apply(operator, int(arguments["left"]), int(arguments["right"]))), True


@dataclass(frozen=True, kw_only=True)
class Python(Tool):
    """A program in the sandbox; its files stay from call to call."""

    sandbox: Sandbox
    shown_characters: int
    name: str = "python"
    description: str = "Runs a Python program and shows what it prints. Files are kept between calls, variables not."
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The whole program."}},
            "required": ["code"],
            "additionalProperties": False,
        }
    )

    def begin(self) -> ToolSession:
        """With an empty workspace."""
        return _PythonSession(PythonTool(self.sandbox, self.shown_characters))


@dataclass(frozen=True)
class _PythonSession(ToolSession):
    tool: PythonTool

    async def call(self, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        return await self.tool.run(arguments["code"])


@dataclass(frozen=True, kw_only=True)
class Program(Tool):
    """A program of the config's, which finds the arguments in ``arguments.json`` and prints the answer."""

    program: str
    sandbox: Sandbox
    shown_characters: int

    def begin(self) -> ToolSession:
        """With an empty workspace, which stays from call to call."""
        return _ProgramSession(self)


@dataclass
class _ProgramSession(ToolSession):
    tool: Program
    files: bytes | None = None

    async def call(self, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        there = unpack(self.files) if self.files is not None else {}
        own = {"tool.py": self.tool.program.encode(), "arguments.json": json.dumps(dict(arguments)).encode()}
        outcome = await self.tool.sandbox.run([INTERPRETER, "tool.py"], pack(with_files(there, own)))
        self.files = outcome.workspace
        return shown(outcome, self.tool.shown_characters), outcome.exit_code == 0


def make_tools(declared: Mapping[str, Any], sandbox: Sandbox | None, shown_characters: int) -> dict[str, Tool]:
    """The tools of ``environment.options.tools``, by name. ValueError names what is wrong with one.

    ``calculator`` and ``python`` need no declaration (``{}``); any other has description, parameters and program.
    """
    found: dict[str, Tool] = {}
    for name, declaration in declared.items():
        where = f"environment.options.tools.{name}"
        if not isinstance(declaration, Mapping):
            raise ValueError(f"{where}: expected a mapping, got {declaration!r}")
        if name == "calculator" and not declaration:
            found[name] = Calculator()
        elif sandbox is None:
            raise ValueError(f"{where}: it runs a program, and there is no sandbox")
        elif name == "python" and not declaration:
            found[name] = Python(sandbox=sandbox, shown_characters=shown_characters)
        else:
            found[name] = _program(name, declaration, where, sandbox, shown_characters)
    return found


def needs_sandbox(declared: Mapping[str, Any]) -> bool:
    """Whether any of the tools runs a program."""
    return any(name != "calculator" or declaration for name, declaration in declared.items())


def _program(name: str, declaration: Mapping[str, Any], where: str, sandbox: Sandbox, characters: int) -> Program:
    for key in declaration:
        if key not in DECLARED:
            raise ValueError(f"{where}.{key}: no such key{nearest(str(key), list(DECLARED))}; {', '.join(DECLARED)}")
    for key in ("description", "program"):
        if not isinstance(declaration.get(key), str) or not declaration[key].strip():
            raise ValueError(f"{where}.{key}: expected text, got {declaration.get(key)!r}")
    parameters = declaration.get("parameters")
    check_schema(parameters, f"{where}.parameters")
    assert isinstance(parameters, Mapping)
    if parameters.get("type") != "object":
        raise ValueError(f"{where}.parameters.type: expected object, got {parameters.get('type')!r}")
    require_interpreter()
    return Program(
        name=name,
        description=declaration["description"],
        parameters=parameters,
        program=declaration["program"],
        sandbox=sandbox,
        shown_characters=characters,
    )
