"""Tasksets of the package verifiers (its v1) that one answer ends: their prompts, and their own rewards.

Tasks that need tools, a container or a conversation are refused: there the package runs the model's program and its
client itself, in text, where here the engine's ids are what counts.

Invariants:
- a task is held out, or not, by its key; training ones come in a new order in every epoch;
- a reward is what the task's own functions say, with their weights; one that raises or takes too long is a failure;
- scoring that hangs loses its episode and a thread, and no more than ``MOST_HUNG`` of them.
"""

import asyncio
import inspect
import random
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from megasao.environments.base import (
    EnvironmentFailure,
    Episode,
    Prompt,
    Split,
    StepResult,
    check_place,
)
from megasao.environments.options import OptionsEnvironment, require_positive
from megasao.environments.splits import split_of, text_hash
from megasao.environments.threads import MOST_HUNG, CallingThread

_END_OF_TURN = re.compile(r"(<\|[^<>|]*\|>|</s>)\s*$")


@dataclass(frozen=True)
class VerifiersOptions:
    """Options under ``environment.options``."""

    taskset: str = ""
    """Installed module that exports a Taskset, as ``verifiers`` names it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the taskset's own config."""
    most_tasks: int = 65536
    """Only the first so many tasks: some tasksets go on for ever."""
    chat: bool = True
    """Speak through the model's chat template; false: plain text."""
    stop: str = ""
    """Token that ends the answer; empty is the model's own end of turn."""
    seed: int = 0
    time_limit_s: float = 30.0
    """For scoring one answer; then the episode is excluded."""

    def __post_init__(self) -> None:
        if not self.taskset:
            raise ValueError("environment.options.taskset: missing; name an installed taskset")
        require_positive(self, "most_tasks", "time_limit_s")


class VerifiersEpisode(Episode):
    """One task being answered."""

    def __init__(self, environment: "VerifiersEnvironment", task: Any) -> None:
        self._environment, self._task = environment, task
        self._thread: CallingThread | None = None

    async def step(self, action_text: str) -> StepResult:
        """Score the answer. EnvironmentFailure if the task's functions fail, or too many of them hang."""
        options = self._environment.options
        thought, _, said = action_text.removesuffix(options.stop).rpartition("</think>")
        answer = _END_OF_TURN.sub("", said)
        self._thread = self._environment.thread()
        try:
            trace = await asyncio.wait_for(
                self._thread.run(lambda: _scored(self._task, answer, thought)), options.time_limit_s
            )
        except TimeoutError as error:
            raise EnvironmentFailure(f"{options.taskset}: scoring took more than {options.time_limit_s:g} s") from error
        except Exception as error:  # whatever a task's functions raise
            raise EnvironmentFailure(f"{options.taskset}: {type(error).__name__}: {error}") from error
        numbers = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return StepResult("", float(trace.reward), True, numbers)

    async def close(self) -> None:
        """End the thread; one that hangs is left to itself."""
        if self._thread is not None:
            self._environment.hung += self._thread.is_busy
            self._thread.end()


class VerifiersEnvironment(OptionsEnvironment[VerifiersOptions]):
    """The tasks of one taskset."""

    name = "verifiers"
    options_type = VerifiersOptions

    def __init__(self, options: VerifiersOptions) -> None:
        """ValueError where the package or the taskset is missing, or its tasks need more than an answer."""
        super().__init__(options)
        self.hung = 0
        try:
            tasks = _load(options)
        except Exception as error:  # whatever a taskset raises when it is imported and loaded
            raise ValueError(f"environment.options.taskset: {options.taskset}: {error}") from error
        self._tasks: dict[Split, list[Any]] = {"train": [], "eval": []}
        for task in tasks:
            self._tasks[split_of(self.name, task.key)].append(task)
        if not all(self._tasks.values()):
            raise ValueError(
                f"environment.options.taskset: {options.taskset}: its {len(tasks)} tasks are too few to split"
            )

    def task(self, split: Split, index: int) -> Any:
        """The task with this index; ValueError below 0 or for an unknown split."""
        check_place(split, index)
        tasks = self._tasks[split]
        epoch, place = divmod(index, len(tasks))
        if split == "eval":
            return tasks[place]
        order = list(range(len(tasks)))
        random.Random(text_hash("verifiers-order", self.options.seed, epoch)).shuffle(order)
        return tasks[order[place]]

    def prompt(self, split: Split, index: int) -> Prompt:
        """The task's own messages."""
        task = self.task(split, index)
        messages = _messages(task)
        return Prompt(
            prompt_id=f"{self.name}/{split}/{task.key}",
            task=self.options.taskset,
            text="".join(f"{message['content']}\n\n" for message in messages),
            payload={"split": split, "index": index},
            messages=tuple(messages) if self.options.chat else (),
        )

    def start(self, prompt: Prompt, seed: int) -> VerifiersEpisode:
        """Begin an episode; nothing in it is random."""
        return VerifiersEpisode(self, self.task(prompt.payload["split"], prompt.payload["index"]))

    def thread(self) -> CallingThread:
        """A thread for an episode. EnvironmentFailure where too many hang already."""
        if self.hung >= MOST_HUNG:
            raise EnvironmentFailure(f"{self.options.taskset}: {self.hung} scorings hang; no further one is begun")
        return CallingThread()


def _load(options: VerifiersOptions) -> list[Any]:
    """The tasks. ValueError for those that need more than an answer, and whatever the package raises."""
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import environment_class
    except ImportError as error:
        raise ValueError(
            f"the package verifiers is not installed ({error}); `pip install 'megasao[verifiers]'`"
        ) from error

    if environment_class(options.taskset) is not vf.SingleAgentEnv:
        raise ValueError("it brings an environment of its own, and only tasks for one agent are supported")
    config = vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": options.taskset, **options.settings}})
    tasks = list(islice(vf.load_taskset(config.taskset), options.most_tasks))
    for task in tasks:
        if (needs := _needs(task)) is not None:
            raise ValueError(f"task {task.data.idx} needs {needs}, and only tasks that one answer ends are supported")
    return tasks


def _needs(task: Any) -> str | None:
    """What a task needs beyond a prompt and an answer."""
    if task.NEEDS_CONTAINER or task.data.image is not None:
        return "a container"
    if task.data.prompt is None:
        return "a user who speaks first"
    if type(task).toolsets(task.config):
        return "tools"
    if task.plugged_judges():
        return "a judge"
    for function in (*task.hooks("reward"), *task.hooks("metric")):
        given = inspect.signature(function).parameters.get("runtime")
        if given is not None and given.default is inspect.Parameter.empty:
            return f"a runtime, for {function.__name__}"
    return None


def _messages(task: Any) -> list[dict[str, Any]]:
    """The task's prompt as role and content."""
    system, prompt = task.data.system_prompt, task.data.prompt
    said = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*said, {"role": "user", "content": prompt}]
    return said + [message.model_dump(exclude_none=True) for message in prompt]


def _scored(task: Any, answer: str, thought: str) -> Any:
    """A trace of the prompt and this answer, with the rewards of the task's functions."""
    import verifiers.v1 as vf

    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    messages = [kinds[message["role"]].model_validate(message) for message in _messages(task)]
    thoughts = thought.rpartition("<think>")[2].strip() or None
    said = [*messages, vf.AssistantMessage(content=answer.strip("\n"), reasoning_content=thoughts)]
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(parent=number - 1 if number else None, message=message, sampled=number == len(said) - 1)
            for number, message in enumerate(said)
        ],
    )
    asyncio.run(task.score(trace))
    return trace
