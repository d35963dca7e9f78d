"""What an environment is: it hands out prompts by index, and answers a model's turns with observations.

Invariants:
- a prompt is a pure function of (options, split, index): the same on every machine and after every resume;
- ``train`` and ``eval`` prompts are disjoint as problems, not only as indices;
- an environment reads the text of an action but never changes its ids; it returns observation text, which is
  tokenised on its own (token in, token out);
- a failure of the environment itself raises EnvironmentFailure: it is never a reward.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "eval"]


def check_place(split: str, index: int) -> None:
    """ValueError where there is no prompt: below 0, or in an unknown split."""
    if index < 0:
        raise ValueError(f"prompt index: expected 0 or more, got {index}")
    if split not in ("train", "eval"):
        raise ValueError(f"split: expected 'train' or 'eval', got {split!r}")


@dataclass(frozen=True)
class Prompt:
    """One problem. ``payload`` is what the environment needs to run it (plain data).

    With ``messages`` (role, content) the model sees these through its own chat template, and not ``text``; the template
    also gets the declarations of ``tools``.
    """

    prompt_id: str
    task: str
    text: str
    payload: dict[str, Any]
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class StepResult:
    """Answer to one turn. ``observation`` is empty when the episode is over.

    With ``messages`` the model is answered through its chat template, and not with ``observation``.
    """

    observation: str
    reward: float
    done: bool
    metrics: dict[str, float] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()


def shown_to_model(text: str, metrics: dict[str, float], *, chat: bool) -> StepResult:
    """What a turn that does not end the episode is answered with: a user message, or plain text on lines of its own."""
    if chat:
        return StepResult("", 0.0, False, metrics, ({"role": "user", "content": text},))
    return StepResult(f"\n{text}\n", 0.0, False, metrics)


@dataclass(frozen=True)
class DemonstrationTurn:
    """A piece of a demonstration: text, and whether the model should learn to produce it."""

    text: str
    is_action: bool


class EnvironmentFailure(RuntimeError):
    """The environment broke; the episode is excluded with this reason."""

    reason = "environment_failure"
    """Under which the failure is counted."""


class Episode(ABC):
    """One running problem."""

    @abstractmethod
    async def step(self, action_text: str) -> StepResult:
        """Take the model's turn (text of its ids, stop token included)."""

    async def close(self) -> None:  # noqa: B027 - most episodes hold nothing
        """Release what the episode holds."""


class Environment(ABC):
    """A task family."""

    name: str
    prompts_wait: bool = False
    """Whether ``prompt`` waits for a server or a package: then it is made in a thread, while other episodes go on.
    Otherwise episodes begin in the order of their leases, so that a run without a clock can be repeated bit for bit."""

    @property
    @abstractmethod
    def stop_strings(self) -> tuple[str, ...]:
        """Single tokens that end the model's turn; none: those with which the model itself ends one."""

    @abstractmethod
    def prompt(self, split: Split, index: int) -> Prompt:
        """The problem with this index; ValueError below 0."""

    def named(self, split: Split, index: int) -> tuple[str, str]:
        """Prompt id and task of the problem, for the controller. All wait for that meanwhile: an environment whose
        ``prompt`` asks somebody else answers this by itself."""
        prompt = self.prompt(split, index)
        return prompt.prompt_id, prompt.task

    @abstractmethod
    def start(self, prompt: Prompt, seed: int) -> Episode:
        """Begin an episode."""

    async def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release what the environment itself holds, such as verifier processes; it may be used again."""

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        """A demonstration on a training problem, for fine-tuning. ValueError where there is none."""
        raise ValueError(f"environment {self.name}: it has no demonstrations; fine-tune on another environment")
