r"""Problems with a short answer, in one turn or with Python as a tool, verified by math-verify.

The problems are rows of a published data set (see ``rows``). The prompt is the template with the problem in it, as a
user message of the model's own chat template, or as plain text.

Invariants:
- a prompt is a function of (options, split, index): training problems come in a new order in every epoch, held-out ones
  as they lie in the file; its id names the problem and not the index, so that what is kept per prompt is per problem;
- training and held-out problems are disjoint as texts;
- a response without an answer earns 0; one that cannot be graded is a failure, never 0;
- with the tool, a turn with an answer ends the episode, one with code and no answer runs it, one with neither ends it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megasao.environments.answers import RULES, find_answer
from megasao.environments.base import DemonstrationTurn, Episode, Prompt, Split, StepResult, shown_to_model
from megasao.environments.options import OptionsEnvironment, require_positive
from megasao.environments.python_tool import NOTE, PythonTool, find_code, require_interpreter
from megasao.environments.rows import Problem, load_problems
from megasao.environments.sandbox.contained import check_choice, chosen_sandbox
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.run import Sandbox
from megasao.environments.splits import split_of, text_hash
from megasao.environments.verifiers.pool import Limits, VerifierPool

GRADERS = ("megasao.environments.verifiers.mathematics",)

BOXED_PROMPT = "{problem}\n\nReason step by step, and put the final answer within \\boxed{}."


@dataclass(frozen=True)
class MathOptions:
    """Options under ``environment.options``."""

    data: str = ""
    """File or directory of problems: JSON, JSON lines, CSV or parquet."""
    eval_data: str = ""
    """Held-out problems; empty holds one in eight of ``data`` out."""
    template: str = BOXED_PROMPT
    """The prompt, with ``{problem}`` in it."""
    chat: bool = True
    """The prompt is a user message of the model's chat template; false: it is the whole text."""
    answer: str = "boxed"
    """Where the final answer is: boxed, tag (``<answer>``), hashes (``####``) or number (the last one)."""
    stop: str = ""
    """Token that ends the response; empty is the model's own end of turn."""
    tool: str = ""
    """Empty, or ``python``: code blocks run in the sandbox, and the model is shown their output."""
    sandbox: str = "bubblewrap"
    """Where the tool runs: bubblewrap, a container runtime, or none (this machine, without isolation)."""
    sandbox_image: str = ""
    """The image of a container runtime; with /usr/bin/python3."""
    tool_time_s: float = 10.0
    """For one program."""
    tool_memory_mb: int = 512
    tool_output: int = 2000
    """Characters of output that the model is shown."""
    seed: int = 0
    verifiers: int = 2
    """Processes that grade."""
    time_limit_s: float = 10.0
    """For grading one answer; then the episode is excluded."""
    memory_mb: int = 1024
    """Address space of a grading process."""

    def __post_init__(self) -> None:
        if "{problem}" not in self.template:
            raise ValueError(f"environment.options.template: expected {{problem}} in it, got {self.template!r}")
        if self.answer not in RULES:
            raise ValueError(f"environment.options.answer: expected one of {', '.join(RULES)}, got {self.answer!r}")
        if self.tool not in ("", "python"):
            raise ValueError(f"environment.options.tool: expected python or nothing, got {self.tool!r}")
        check_choice(self.sandbox, self.sandbox_image)
        require_positive(self, "verifiers", "time_limit_s", "memory_mb", "tool_time_s", "tool_memory_mb", "tool_output")
        if self.memory_mb < 64:
            raise ValueError(f"environment.options.memory_mb: expected 64 or more, got {self.memory_mb}")


class MathEpisode(Episode):
    """One problem being answered."""

    def __init__(self, problem: Prompt, rule: str, pool: VerifierPool, tool: PythonTool | None = None) -> None:
        self._reference, self._rule, self._pool = problem.payload["reference"], rule, pool
        self._tool, self._chat = tool, bool(problem.messages)

    async def step(self, action_text: str) -> StepResult:
        """Grade the response, or run its code. VerifierError or EnvironmentFailure if that is not possible."""
        answer = find_answer(action_text, self._rule)
        if answer is not None:
            reward = await self._pool.grade("math", answer=answer, reference=self._reference)
            return StepResult("", reward, True, {"answered": 1.0})
        code = find_code(action_text) if self._tool is not None else None
        if self._tool is None or code is None:
            return StepResult("", 0.0, True, {"answered": 0.0})
        shown, fine = await self._tool.run(code)
        metrics = {"tool_calls": 1.0, "tool_errors": float(not fine)}
        return shown_to_model(shown, metrics, chat=self._chat)


class MathEnvironment(OptionsEnvironment[MathOptions]):
    """Problems of a data set."""

    name = "math"
    options_type = MathOptions

    def __init__(
        self,
        options: MathOptions,
        problems: Mapping[Split, Sequence[Problem]] | None = None,
        pool: VerifierPool | None = None,
    ) -> None:
        """``problems`` stand for those of the files, ``pool`` for one of its own; ``close`` ends either pool.

        ValueError for data that cannot be read or leave a split empty.
        """
        super().__init__(options)
        self._problems = _load(options) if problems is None else problems
        limits = Limits(options.verifiers, options.time_limit_s, options.memory_mb << 20)
        self._pool = pool or VerifierPool(GRADERS, limits)
        self._sandbox = make_sandbox(options, "tool") if options.tool else None
        self._epoch = lru_cache(maxsize=2)(self._order)

    def size(self, split: Split) -> int:
        """How many problems a split has."""
        return len(self._problems[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        """The problem with this index; ValueError below 0 or for an unknown split."""
        problem = self._problem(split, index)
        text = self._asked(problem)
        return Prompt(
            prompt_id=f"{self.name}/{split}/{problem.problem_id}",
            task=self.name,
            text=text,
            payload={"reference": problem.reference},
            messages=({"role": "user", "content": text},) if self.options.chat else (),
        )

    def start(self, prompt: Prompt, seed: int) -> MathEpisode:
        """Begin an episode; nothing in it is random."""
        tool = PythonTool(self._sandbox, self.options.tool_output) if self._sandbox is not None else None
        return MathEpisode(prompt, self.options.answer, self._pool, tool)

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        """The published solution of a training problem, or its answer alone where there is none."""
        if self.options.chat:
            raise ValueError("environment.options.chat: fine-tuning on demonstrations needs plain prompts; use false")
        problem = self._problem("train", index)
        said = problem.solution or ""
        if find_answer(said, self.options.answer) is None:
            said = f"{said}\n{write_answer(problem.reference, self.options.answer)}".lstrip()
        said = said.removesuffix(self.options.stop) + self.options.stop
        return [DemonstrationTurn(self._asked(problem), False), DemonstrationTurn(said, True)]

    async def close(self) -> None:
        """End the verifier processes."""
        await self._pool.close()

    def _asked(self, problem: Problem) -> str:
        text = self.options.template.replace("{problem}", problem.text)
        return text + NOTE if self.options.tool else text

    def _problem(self, split: Split, index: int) -> Problem:
        if index < 0:
            raise ValueError(f"prompt index: expected 0 or more, got {index}")
        if split not in self._problems:
            raise ValueError(f"split: expected 'train' or 'eval', got {split!r}")
        epoch, place = divmod(index, self.size(split))
        return self._problems[split][place if split == "eval" else self._epoch(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.size("train")))
        random.Random(text_hash("math-order", self.options.seed, epoch)).shuffle(order)
        return order


def make_sandbox(options: MathOptions, option: str) -> Sandbox:
    """The sandbox of the tools; ValueError naming ``option``, which asks for it, where this machine has none."""
    limits = SandboxLimits(time_s=options.tool_time_s, memory_bytes=options.tool_memory_mb << 20)
    try:
        if not options.sandbox_image:
            require_interpreter()
        return chosen_sandbox(options.sandbox, options.sandbox_image, limits)
    except ValueError as error:
        raise ValueError(f"environment.options.{option}: {error}") from error


def write_answer(answer: str, rule: str) -> str:
    """A text in which ``find_answer`` finds ``answer`` by ``rule``."""
    forms = {"boxed": "\\boxed{%s}", "tag": "<answer>%s</answer>", "hashes": "#### %s", "number": "%s"}
    return forms[rule] % answer


def _load(options: MathOptions) -> Mapping[Split, Sequence[Problem]]:
    if not options.data:
        raise ValueError("environment.options.data: missing; name a file or directory of problems")
    try:
        rows = load_problems(options.data)
    except ValueError as error:
        raise ValueError(f"environment.options.data: {error}") from error
    if not options.eval_data:
        found: dict[Split, list[Problem]] = {"train": [], "eval": []}
        for problem in rows:
            found[split_of("math", problem.text)].append(problem)
    else:
        try:
            held_out = load_problems(options.eval_data)
        except ValueError as error:
            raise ValueError(f"environment.options.eval_data: {error}") from error
        texts = {problem.text for problem in held_out}
        found = {"train": [problem for problem in rows if problem.text not in texts], "eval": held_out}
    for split, problems in found.items():
        if not problems:
            raise ValueError(f"environment.options.data: {options.data} leaves no problem for the {split} split")
    return found
