r"""Problems with a short answer, solved with tools that are declared as JSON schemas, in the model's own call format.

The model is told of the tools by its chat template. A turn with calls is answered by one message of role ``tool`` for
each call, in order; a turn without one ends the episode, and its answer is graded as in ``math``.

Invariants:
- a call that cannot be read, of an unknown tool, or with arguments that its schema refuses is answered with what was
  wrong, and runs nothing: it is never an exception, and never the end of the episode;
- no more than ``MAX_CALLS`` calls of one turn run.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megasao.environments import arithmetic
from megasao.environments.answers import find_answer
from megasao.environments.base import DemonstrationTurn, Episode, Prompt, Split, StepResult
from megasao.environments.mathematics import BOXED_PROMPT, MathEnvironment, MathOptions, make_sandbox
from megasao.environments.options import nearest
from megasao.environments.rows import Problem
from megasao.environments.splits import split_of, text_hash
from megasao.environments.tools.calls import Malformed, ToolCall, ToolFormat, shorten
from megasao.environments.tools.declared import Tool, make_tools, needs_sandbox
from megasao.environments.tools.formats import FORMATS
from megasao.environments.tools.json_schema import problem
from megasao.environments.verifiers.pool import VerifierPool

MAX_PROBLEMS = 65536
"""Arithmetic problems: there are some 200,000 different ones, and drawing these takes seconds."""

MAX_CALLS = 16
"""Calls of one turn that run."""


@dataclass(frozen=True)
class ToolOptions(MathOptions):
    """Options under ``environment.options``: those of ``math``, and the tools instead of ``tool``.

    Without ``data`` the problems are arithmetic, of two or three operations.
    """

    template: str = BOXED_PROMPT
    tools: dict[str, Any] = field(default_factory=lambda: {"calculator": {}})
    """By name: ``calculator: {}``, ``python: {}``, or description, parameters (a JSON schema) and program."""
    format: str = "qwen3"
    """How the model writes calls: qwen3, glm or llama3."""
    problems: int = 4096
    """Arithmetic problems, where there is no ``data``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tool:
            raise ValueError(f"environment.options.tool: write tools: {{{self.tool}: {{}}}} instead")
        if not self.chat:
            raise ValueError("environment.options.chat: tools are declared through the chat template; leave it true")
        if self.format not in FORMATS:
            known = ", ".join(FORMATS)
            raise ValueError(f"environment.options.format: expected one of {known}, got {self.format!r}")
        if not self.tools:
            raise ValueError("environment.options.tools: none; name one, or use the environment math")
        if not 64 <= self.problems <= MAX_PROBLEMS:
            raise ValueError(f"environment.options.problems: expected 64 to {MAX_PROBLEMS}, got {self.problems}")


class ToolEpisode(Episode):
    """One problem being solved."""

    def __init__(
        self, reference: str, rule: str, pool: VerifierPool, tools: Mapping[str, Tool], form: ToolFormat
    ) -> None:
        self._reference, self._rule, self._pool = reference, rule, pool
        self._tools, self._form = tools, form
        self._schemas = {name: tool.parameters for name, tool in tools.items()}
        self._sessions = {name: tool.begin() for name, tool in tools.items()}

    async def step(self, action_text: str) -> StepResult:
        """Answer the calls, or grade the answer. VerifierError or EnvironmentFailure if that is not possible."""
        calls = self._form.parse(action_text, self._schemas)
        if calls:
            return await self._answer_calls(calls)
        answer = find_answer(action_text, self._rule)
        if answer is None:
            return StepResult("", 0.0, True, {"answered": 0.0})
        reward = await self._pool.grade("math", answer=answer, reference=self._reference)
        return StepResult("", reward, True, {"answered": 1.0})

    async def _answer_calls(self, calls: Sequence[ToolCall | Malformed]) -> StepResult:
        answers = [await self._call(call) for call in calls[:MAX_CALLS]]
        answers += [(f"error: only {MAX_CALLS} calls of a turn are answered", False)] * (len(calls) > MAX_CALLS)
        metrics = {"tool_calls": float(len(calls)), "tool_errors": float(sum(not fine for _, fine in answers))}
        return StepResult("", 0.0, False, metrics, tuple({"role": "tool", "content": text} for text, _ in answers))

    async def _call(self, call: ToolCall | Malformed) -> tuple[str, bool]:
        wrong = call.reason if isinstance(call, Malformed) else self._wrong_with(call)
        if wrong is not None:
            return f"error: {wrong}", False
        assert isinstance(call, ToolCall)
        return await self._sessions[call.name].call(call.arguments)

    def _wrong_with(self, call: ToolCall) -> str | None:
        known = sorted(self._tools)
        if call.name not in self._tools:
            guess = nearest(call.name[:64], known)
            return f"there is no tool {shorten(call.name)}{guess}; the tools are {', '.join(known)}"
        try:
            json.dumps(call.arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "the arguments hold half of a surrogate pair, which is no text"
        return problem(call.arguments, self._schemas[call.name])


class ToolEnvironment(MathEnvironment):
    """Problems of a data set, or arithmetic, with tools."""

    name = "tool"
    options_type = ToolOptions
    options: ToolOptions

    def __init__(self, options: ToolOptions, pool: VerifierPool | None = None) -> None:
        """ValueError for data that cannot be read, a tool that cannot be, or where a tool needs a sandbox and there is
        none."""
        super().__init__(options, None if options.data else arithmetic_problems(options), pool)
        sandbox = make_sandbox(options, "tools") if needs_sandbox(options.tools) else None
        self.tools = make_tools(options.tools, sandbox, options.tool_output)

    def prompt(self, split: Split, index: int) -> Prompt:
        """The problem with this index, with the tools; ValueError below 0 or for an unknown split."""
        declared = tuple(tool.declaration for tool in self.tools.values())
        return replace(super().prompt(split, index), tools=declared)

    def start(self, prompt: Prompt, seed: int) -> ToolEpisode:  # type: ignore[override]
        """Begin an episode; nothing in it is random."""
        form = FORMATS[self.options.format]
        return ToolEpisode(prompt.payload["reference"], self.options.answer, self._pool, self.tools, form)

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        """There is none: demonstrations are plain text, and tools need a chat."""
        raise ValueError("environment tool: it has no demonstrations; fine-tune on another environment, or not at all")


def arithmetic_problems(options: ToolOptions) -> dict[Split, list[Problem]]:
    """``options.problems`` different expressions, split by their text."""
    generator = random.Random(text_hash("tool-arithmetic", options.seed))
    found: dict[str, Problem] = {}
    while len(found) < options.problems:
        expression = arithmetic.draw(generator, generator.choice((2, 3)))
        text, answer = arithmetic.render(expression), arithmetic.reductions(expression)[-1][-1]
        found.setdefault(text, Problem(text, f"What is {text}?", str(answer)))
    splits: dict[Split, list[Problem]] = {"train": [], "eval": []}
    for text, one in found.items():
        splits[split_of("tool", text)].append(one)
    return splits
