"""Environments of the package Gymnasium whose actions are few or text: what is seen is text, a turn is one action.

Invariants:
- a problem is the seed of a reset: those of training are even, held-out ones odd; whether two seeds begin differently
  is the environment's own affair;
- a turn without a legal action is told what is legal, and steps nothing; it earns 0;
- an exception of the environment is a failure, never a reward;
- an environment that hangs loses its episode and a thread, and no more than ``MOST_HUNG`` of them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megasao.environments.answers import last_tagged
from megasao.environments.base import (
    EnvironmentFailure,
    Episode,
    Prompt,
    Split,
    StepResult,
    check_place,
    shown_to_model,
)
from megasao.environments.options import OptionsEnvironment
from megasao.environments.splits import text_hash
from megasao.environments.threads import MOST_HUNG, CallingThread

CLOSE_S = 5.0
"""Longest wait for an environment to close."""

_OPEN, _CLOSE = "<action>", "</action>"


@dataclass(frozen=True)
class GymnasiumOptions:
    """Options under ``environment.options``."""

    id: str = ""
    """As Gymnasium registers it: ``FrozenLake-v1``, or ``package.module:Name-v0``, whose module is imported first."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Passed to ``gymnasium.make``."""
    actions: list[str] = field(default_factory=list)
    """Names of the actions of a Discrete space, in order; none: their numbers."""
    instructions: str = ""
    """Said before the first observation."""
    chat: bool = True
    """Speak through the model's chat template; false: plain text."""
    stop: str = ""
    """Token that ends a turn; empty is the model's own end of turn."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("environment.options.id: missing; for example FrozenLake-v1")
        if len(set(self.actions)) < len(self.actions) or not all(isinstance(name, str) for name in self.actions):
            raise ValueError(f"environment.options.actions: expected different names, got {self.actions}")


class GymnasiumEpisode(Episode):
    """One environment of its own, reset to a seed."""

    def __init__(self, environment: "GymnasiumEnvironment", seed: int) -> None:
        self._environment, self._seed = environment, seed
        self._running: Any = None
        self._thread: CallingThread | None = None

    async def step(self, action_text: str) -> StepResult:
        """Do the action in ``<action>``. EnvironmentFailure if the environment raises, or too many of them hang."""
        owner = self._environment
        said = last_tagged(action_text.rpartition("</think>")[2], "action")
        action = owner.read_action(said.strip()) if said is not None else None
        if action is None:
            return owner.answer(f"error: {owner.legal}", 0.0, False, {"actions": 0.0, "illegal_actions": 1.0})
        if self._thread is None:
            self._thread = owner.thread()
        text, reward, done = await self._thread.run(lambda: _guarded(self._do, action))
        return owner.answer(text, reward, done, {"actions": 1.0, "illegal_actions": 0.0})

    def _do(self, action: Any) -> tuple[str, float, bool]:
        if self._running is None:
            self._running = self._environment.make()
            self._running.reset(seed=self._seed)
        observation, reward, terminated, truncated, _ = self._running.step(action)
        return see(self._running, observation), float(reward), bool(terminated or truncated)

    async def close(self) -> None:
        """Close the environment; one that hangs is left to itself."""
        if self._thread is None:
            return
        if self._running is not None and not self._thread.is_busy:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._thread.run(self._running.close), CLOSE_S)
        self._environment.hung += self._thread.is_busy
        self._thread.end()


class GymnasiumEnvironment(OptionsEnvironment[GymnasiumOptions]):
    """One registered environment."""

    name = "gymnasium"
    options_type = GymnasiumOptions
    prompts_wait = True

    def __init__(self, options: GymnasiumOptions) -> None:
        """ValueError where the package or the environment is missing, or its actions are neither few nor text."""
        super().__init__(options)
        self._settings = dict(options.settings)
        self.hung = 0
        try:
            running = self.make()
        except Exception as error:  # whatever a registered environment raises
            raise ValueError(f"environment.options.id: {options.id} cannot be made: {error}") from error
        if "ansi" in running.metadata.get("render_modes", ()):
            self._settings.setdefault("render_mode", "ansi")
        self.read_action, self.legal = _actions(running.action_space, options.actions)
        running.close()

    def make(self) -> Any:
        """A new instance, which draws itself as text where it can. Whatever Gymnasium raises."""
        try:
            import gymnasium
        except ImportError as error:
            raise ValueError("the package gymnasium is not installed; pip install 'megasao[gymnasium]'") from error

        return gymnasium.make(self.options.id, **self._settings)

    def thread(self) -> CallingThread:
        """A thread for an episode. EnvironmentFailure where too many hang already."""
        if self.hung >= MOST_HUNG:
            raise EnvironmentFailure(f"{self.options.id}: {self.hung} of its episodes hang; no further one is begun")
        return CallingThread()

    def prompt(self, split: Split, index: int) -> Prompt:
        """What is seen after a reset, and which actions there are; ValueError below 0 or for an unknown split."""
        check_place(split, index)
        seed = 2 * (text_hash("gymnasium", self.options.seed, split, index) >> 34) + (split == "eval")
        running = self.make()
        try:
            observation, _ = running.reset(seed=seed)
            parts = (self.options.instructions, see(running, observation), f"In each turn, {self.legal}")
        finally:
            running.close()
        text = "\n\n".join(part for part in parts if part)
        return Prompt(
            prompt_id=f"{self.name}/{split}/{index}",
            task=self.options.id,
            text=f"{text}\n\n",
            payload={"seed": seed},
            messages=({"role": "user", "content": text},) if self.options.chat else (),
        )

    def start(self, prompt: Prompt, seed: int) -> GymnasiumEpisode:
        """Begin an episode; what is random in it follows from the prompt's seed."""
        return GymnasiumEpisode(self, prompt.payload["seed"])

    def answer(self, text: str, reward: float, done: bool, metrics: dict[str, float]) -> StepResult:
        """The environment's answer to a turn."""
        if done:
            return StepResult("", reward, True, metrics)
        return replace(shown_to_model(text, metrics, chat=self.options.chat), reward=reward)


def see(running: Any, observation: Any) -> str:
    """An observation that is text, else what the environment draws as text, else its Python form."""
    if isinstance(observation, str):
        return observation
    drawn = running.render() if running.render_mode == "ansi" else None
    return drawn.strip("\n") if isinstance(drawn, str) else str(observation)


def _guarded(do: Callable[[Any], tuple[str, float, bool]], action: Any) -> tuple[str, float, bool]:
    try:
        return do(action)
    except Exception as error:  # whatever a registered environment raises
        raise EnvironmentFailure(f"{type(error).__name__}: {error}") from error


def _actions(space: Any, names: Sequence[str]) -> tuple[Callable[[str], Any], str]:
    """How a text becomes an action (None: it is none), and what the model is told of that."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        if names:
            raise ValueError("environment.options.actions: the actions are free text; leave the names out")
        return lambda text: text if space.contains(text) else None, f"write your action between {_OPEN} and {_CLOSE}."
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"environment.options.id: expected Discrete or Text actions, got {space}")
    count, first = int(space.n), int(space.start)
    if names and len(names) != count:
        raise ValueError(f"environment.options.actions: expected {count} names, got {len(names)}")
    known = {name: first + number for number, name in enumerate(names or [str(first + n) for n in range(count)])}
    return known.get, f"write one of {', '.join(known)} between {_OPEN} and {_CLOSE}."
