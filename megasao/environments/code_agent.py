"""Mending a small repository with a shell and an editor in the sandbox; hidden tests give the reward.

A turn of the model does one thing, the last fenced block in it (``edits``). A turn without a block hands the work in:
the hidden tests run in a fresh sandbox on the workspace as it is, and the reward is 1 if all pass, else 0.

Invariants:
- nothing of the hidden tests is in the workspace while the model works, and files of their names are replaced;
- a command that fails, is stopped, or an edit that does not apply is an observation; a failing sandbox is a failure;
- work that is not handed in earns 0;
- with ``variants`` the names in a task are a function of (options, split, index), and those of held-out problems are
  never trained on.
"""

import random
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from megasao.environments.base import DemonstrationTurn, Episode, Prompt, Split, StepResult, shown_to_model
from megasao.environments.code_demonstrator import DONE, Habits, demonstrate
from megasao.environments.code_tasks import SHIPPED, CodeTask, load_tasks
from megasao.environments.code_tasks.variants import other_names, variant
from megasao.environments.edits import HOW, Block, find_block, replaced
from megasao.environments.options import OptionsEnvironment, nearest, require_positive
from megasao.environments.python_tool import INTERPRETER, require_interpreter
from megasao.environments.sandbox.contained import check_choice, chosen_sandbox
from megasao.environments.sandbox.container import MAX_SCRIPT
from megasao.environments.sandbox.limits import SandboxLimits
from megasao.environments.sandbox.run import Sandbox
from megasao.environments.sandbox.shown import shown
from megasao.environments.sandbox.workspace import in_the_way, is_inside, pack, unpack, with_files
from megasao.environments.splits import split_of, text_hash

NOTE = f"You mend a small Python repository, in the current directory. {HOW}\n"

HELD_OUT = 4
"""Without tasks of their own for evaluation, one in this many is held out."""

TRIES = 1000
"""Draws of names until some must have come that belong to the split: there is one in eight on average."""

LONGEST_COMMAND = MAX_SCRIPT - 1000
"""Bytes of a command, with what sets it off for a shell: a container's script is this and where it runs."""

_RUNNER = "run_hidden_tests.py"
_RUN = """import sys, unittest
word, *names = sys.argv[1:]
del sys.argv[1:]
sys.path.insert(0, ".")
result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromNames(names))
if result.wasSuccessful() and result.testsRun:
    print(word, flush=True)
"""


@dataclass(frozen=True)
class CodeAgentOptions:
    """Options under ``environment.options``."""

    tasks: str = ""
    """Directory of tasks (YAML); empty is the twelve that ship."""
    eval_tasks: str = ""
    """Directory of held-out tasks; empty holds one in four of ``tasks`` out, or with ``variants`` one in eight sets of
    names of every task."""
    only: list[str] = field(default_factory=list)
    """Names of the tasks of ``tasks`` that are used; none: all."""
    variants: bool = False
    """Each problem is a task with other names in its code (``names`` of the task), drawn by ``seed``."""
    most_names: int = 0
    """Only the first so many of a task's names are changed; 0: all."""
    seed: int = 0
    instructions: str = NOTE
    """What the model is told before the statement."""
    chat: bool = True
    """Speak through the model's chat template; false: plain text."""
    stop: str = ""
    """Token that ends a turn; empty is the model's own end of turn."""
    sandbox: str = "bubblewrap"
    """Where commands and tests run: bubblewrap, a container runtime, or none (this machine, without isolation)."""
    sandbox_image: str = ""
    """The image of a container runtime; with /usr/bin/python3."""
    time_s: float = 30.0
    """For one command, and for the hidden tests."""
    memory_mb: int = 512
    output: int = 4000
    """Characters of a command's output that the model is shown."""
    gives_up: float = 0.0
    """Share of demonstrations that hand in what they only looked at: a bad habit."""
    remembers: float = 0.0
    """Share of demonstrations that write the names of the original task, and not the variant's: another one."""

    def __post_init__(self) -> None:
        check_choice(self.sandbox, self.sandbox_image)
        require_positive(self, "time_s", "memory_mb", "output")
        if self.most_names < 0:
            raise ValueError(f"environment.options.most_names: expected 0 or more, got {self.most_names}")
        for name in ("gives_up", "remembers"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"environment.options.{name}: expected a share in [0, 1], got {getattr(self, name)}")
        if self.remembers and not self.variants:
            raise ValueError("environment.options.remembers: without variants a task has only its own names")


class CodeAgentEpisode(Episode):
    """One repository being mended."""

    def __init__(self, task: CodeTask, sandbox: Sandbox, options: CodeAgentOptions) -> None:
        self._task, self._sandbox, self._options = task, sandbox, options
        self.workspace = pack({name: text.encode() for name, text in task.files.items()})

    async def step(self, action_text: str) -> StepResult:
        """Do what the turn says, or run the hidden tests. EnvironmentFailure if the sandbox breaks."""
        block = find_block(action_text)
        if block is None:
            passed = await hidden_tests_pass(self._task, self.workspace, self._sandbox)
            return StepResult("", float(passed), True, {"handed_in": 1.0})
        if block.kind == "bash":
            return await self._command(block.text)
        error = self._edit(block)
        return self._answer(error or DONE, {"edits": 1.0, "edit_errors": float(error is not None)})

    async def _command(self, text: str) -> StepResult:
        command = ["/bin/sh", "-c", text.replace("\0", "")]
        if len(shlex.join(command).encode()) > LONGEST_COMMAND:
            return self._answer("error: the command is too long", {"commands": 1.0, "command_errors": 1.0})
        outcome = await self._sandbox.run(command, self.workspace)
        self.workspace = outcome.workspace
        return self._answer(
            shown(outcome, self._options.output),
            {"commands": 1.0, "command_errors": float(outcome.exit_code != 0)},
        )

    def _edit(self, block: Block) -> str | None:
        """Change the workspace; what is wrong with the edit, if anything."""
        path, text, error = block.path, block.text, None
        if not is_inside(path):
            return f"error: {path!r} is no file in the workspace"
        files = unpack(self.workspace)
        if block.kind == "replace":
            if path not in files:
                return f"error: there is no file {path}"
            text, error = replaced(files[path].decode(errors="replace"), text, path)
        elif in_the_way(path := str(PurePosixPath(path)), files.keys() - {path}):
            return f"error: {path} is a directory, or in one that is a file"
        if error is None:
            self.workspace = pack({**files, path: text.encode()})
        return error

    def _answer(self, text: str, metrics: dict[str, float]) -> StepResult:
        return shown_to_model(text, metrics, chat=self._options.chat)


async def hidden_tests_pass(task: CodeTask, workspace: bytes, sandbox: Sandbox) -> bool:
    """Whether the hidden tests all pass on this workspace, in a fresh sandbox.

    The sign of success is a random word that the code under test is not given. Code that searches the test process for
    it could still forge it.
    """
    tests = {name: text.encode() for name, text in task.tests.items()}
    files = with_files(unpack(workspace), {**tests, _RUNNER: _RUN.encode()})
    word = secrets.token_hex(16)
    modules = [name.removesuffix(".py").replace("/", ".") for name in task.tests]
    outcome = await sandbox.run([INTERPRETER, "-I", _RUNNER, word, *modules], pack(files))
    return outcome.exit_code == 0 and word in outcome.output.splitlines()


class CodeAgentEnvironment(OptionsEnvironment[CodeAgentOptions]):
    """Repositories to be mended."""

    name = "code_agent"
    options_type = CodeAgentOptions

    def __init__(self, options: CodeAgentOptions | None = None) -> None:
        """ValueError for tasks that cannot be read, or where there is no sandbox."""
        super().__init__(options or CodeAgentOptions())
        self._tasks = _split(self.options)
        limits = SandboxLimits(time_s=self.options.time_s, memory_bytes=self.options.memory_mb << 20)
        try:
            self._sandbox = chosen_sandbox(self.options.sandbox, self.options.sandbox_image, limits)
            if not self.options.sandbox_image:
                require_interpreter()
        except ValueError as error:
            raise ValueError(f"environment.options.sandbox: {error}") from error

    def task(self, split: Split, index: int) -> CodeTask:
        """The task with this index, round and round; ValueError below 0 or for an unknown split."""
        if index < 0:
            raise ValueError(f"prompt index: expected 0 or more, got {index}")
        if split not in self._tasks:
            raise ValueError(f"split: expected 'train' or 'eval', got {split!r}")
        tasks = self._tasks[split]
        chosen = tasks[index % len(tasks)]
        return self._variant(chosen, split, split, index) if self.options.variants else chosen

    def _variant(self, task: CodeTask, split: Split, stream: str, index: int) -> CodeTask:
        """The first variant of this stream and index whose names belong to ``split``."""
        for attempt in range(TRIES):
            names = other_names(task, text_hash("code-agent-variant", self.options.seed, stream, index, attempt))
            if self.options.eval_tasks or split_of("code-agent-variant", " ".join([task.name, *names])) == split:
                return variant(task, names)
        raise ValueError(f"environment.options.tasks: {task.name}: {TRIES} variants, and none for the {split} split")

    def prompt(self, split: Split, index: int) -> Prompt:
        """The task's statement and how to work on it."""
        task = self.task(split, index)
        text = self._asked(task)
        return Prompt(
            prompt_id=f"{self.name}/{split}/{task.name}" + (f"/{index}" if self.options.variants else ""),
            task=self.name,
            text=f"{text}\n\n",
            payload={"split": split, "index": index},
            messages=({"role": "user", "content": text},) if self.options.chat else (),
        )

    def start(self, prompt: Prompt, seed: int) -> CodeAgentEpisode:
        """Begin an episode; nothing in it is random."""
        task = self.task(prompt.payload["split"], prompt.payload["index"])
        return CodeAgentEpisode(task, self._sandbox, self.options)

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        """Looking at the files, editing them, and handing in (a stream of its own, not the prompts of training)."""
        if self.options.chat:
            raise ValueError("environment.options.chat: fine-tuning on demonstrations needs plain prompts; use false")
        if index < 0:
            raise ValueError(f"demonstration index: expected 0 or more, got {index}")
        options, tasks = self.options, self._tasks["train"]
        first_seen = task = tasks[index % len(tasks)]
        if options.variants:
            task = self._variant(first_seen, "train", f"demonstration-{seed}", index)
        habits = Habits(options.gives_up, options.remembers)
        generator = random.Random(text_hash("code-agent-habits", seed, index))
        said = demonstrate(task, first_seen, habits, generator, end=options.stop, output=options.output)
        return [DemonstrationTurn(f"{self._asked(task)}\n\n", False), *said]

    def _asked(self, task: CodeTask) -> str:
        return f"{self.options.instructions}{task.statement}\n\nFiles: {', '.join(sorted(task.files))}"


def _split(options: CodeAgentOptions) -> Mapping[Split, list[CodeTask]]:
    tasks = _tasks("tasks", options.tasks)
    known = [task.name for task in tasks]
    if unknown := [name for name in options.only if name not in known]:
        raise ValueError(f"environment.options.only: no task {unknown[0]!r}{nearest(str(unknown[0]), known)}")
    tasks = [task for task in tasks if task.name in options.only or not options.only]
    if options.most_names:
        tasks = [replace(task, names=task.names[: options.most_names]) for task in tasks]
    if options.variants and (nameless := [task.name for task in tasks if not task.names]):
        raise ValueError(f"environment.options.variants: tasks without names: {', '.join(nameless)}")
    if options.eval_tasks:
        return {"train": tasks, "eval": _tasks("eval_tasks", options.eval_tasks)}
    if options.variants:
        return {"train": tasks, "eval": tasks}
    if len(tasks) < 2:
        raise ValueError("environment.options.tasks: with one task none can be held out; name eval_tasks")
    ordered = sorted(tasks, key=lambda task: text_hash("code-agent-split", task.name))
    count = max(1, len(tasks) // HELD_OUT)
    return {"train": ordered[count:], "eval": ordered[:count]}


def _tasks(option: str, directory: str) -> list[CodeTask]:
    try:
        return load_tasks(Path(directory) if directory else SHIPPED)
    except ValueError as error:
        raise ValueError(f"environment.options.{option}: {error}") from error
