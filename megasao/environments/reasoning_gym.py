"""Data sets of the package reasoning-gym: procedural problems, in one turn, scored by the package's own verifiers.

Some of those verifiers evaluate the answer as Python, so they run in killable processes inside a sandbox.

Invariants:
- a prompt is a function of (options, split, index) and the package's version;
- training and held-out problems are disjoint as texts;
- a response without an answer earns 0; one that cannot be scored is a failure, never 0.
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megasao.environments.answers import RULES, find_answer
from megasao.environments.base import DemonstrationTurn, Episode, Prompt, Split, StepResult, check_place
from megasao.environments.mathematics import write_answer
from megasao.environments.options import OptionsEnvironment, nearest
from megasao.environments.sandbox import bubblewrap
from megasao.environments.splits import split_of, text_hash
from megasao.environments.verifiers.pool import Limits, VerifierPool

GRADERS = ("megasao.environments.verifiers.reasoning",)
TRIES = 1000
"""Draws until a problem must have come that belongs to the split: there is one in eight on average."""

_SEEDS = 2**31
"""A problem is the only one of a data set with a seed of its own: some data sets make all they have when they begin."""

UNREPEATABLE = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
"""Data sets that make other problems of the same seed in another process: they go through a set of strings."""


@dataclass(frozen=True)
class ReasoningGymOptions:
    """Options under ``environment.options``."""

    datasets: dict[str, Any] = field(default_factory=dict)
    """Names of data sets, each with its own settings: ``{chain_sum: {max_terms: 3}, leg_counting: {}}``."""
    template: str = "{problem}\n\nGive the final answer as <answer>...</answer>."
    """The prompt, with ``{problem}`` in it."""
    chat: bool = True
    """The prompt is a user message of the model's chat template; false: it is the whole text."""
    answer: str = "tag"
    """Where the final answer is: tag (``<answer>``), boxed, hashes (``####``) or number (the last one)."""
    stop: str = ""
    """Token that ends the response; empty is the model's own end of turn."""
    seed: int = 0
    sandbox: str = "bubblewrap"
    """Where the package's verifiers run: bubblewrap, or none (they may execute what the model wrote)."""
    verifiers: int = 2
    """Processes that score."""
    time_limit_s: float = 10.0
    """For scoring one answer; then the episode is excluded."""
    memory_mb: int = 2048
    """Address space of a scoring process."""
    repeats: float = 0.0
    """Share of demonstrations that repeat the problem's last number instead of working the answer out: a bad habit."""

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ValueError("environment.options.datasets: missing; for example {chain_sum: {}}")
        if "{problem}" not in self.template:
            raise ValueError(f"environment.options.template: expected {{problem}} in it, got {self.template!r}")
        if self.answer not in RULES:
            raise ValueError(f"environment.options.answer: expected one of {', '.join(RULES)}, got {self.answer!r}")
        if self.sandbox not in ("bubblewrap", "none"):
            raise ValueError(f"environment.options.sandbox: expected bubblewrap or none, got {self.sandbox!r}")
        if not 0 <= self.repeats <= 1:
            raise ValueError(f"environment.options.repeats: expected a share in [0, 1], got {self.repeats}")
        for name, least in (("verifiers", 1), ("time_limit_s", 1e-3), ("memory_mb", 64)):
            if getattr(self, name) < least:
                raise ValueError(f"environment.options.{name}: expected {least:g} or more, got {getattr(self, name)}")


class ReasoningGymEpisode(Episode):
    """One problem being answered."""

    def __init__(self, payload: Mapping[str, Any], rule: str, pool: VerifierPool) -> None:
        self._payload, self._rule, self._pool = payload, rule, pool

    async def step(self, action_text: str) -> StepResult:
        """Score the response. VerifierError if that is not possible."""
        answer = find_answer(action_text, self._rule)
        reward = 0.0
        if answer is not None:
            reward = await self._pool.grade("reasoning_gym", answer=answer, **self._payload)
        return StepResult("", reward, True, {"answered": float(answer is not None), "solved": float(reward >= 1)})


class ReasoningGymEnvironment(OptionsEnvironment[ReasoningGymOptions]):
    """Problems of one or several data sets, in turn."""

    name = "reasoning_gym"
    options_type = ReasoningGymOptions

    def __init__(self, options: ReasoningGymOptions) -> None:
        """ValueError for an unknown data set or setting, or where there is no sandbox."""
        super().__init__(options)
        if options.sandbox == "bubblewrap":
            try:
                bubblewrap.require()
            except bubblewrap.SandboxUnavailable as error:
                raise ValueError(f"environment.options.sandbox: {error}") from error
        self._names = list(options.datasets)
        self._settings = {
            name: json.dumps(settings or {}, sort_keys=True) for name, settings in options.datasets.items()
        }
        for name in self._names:
            _check(name, self._settings[name])
        self._pool = VerifierPool(
            GRADERS,
            Limits(options.verifiers, options.time_limit_s, options.memory_mb << 20),
            guarding="evaluate",
            wrap=bubblewrap.wrap_python if options.sandbox == "bubblewrap" else None,
        )

    def prompt(self, split: Split, index: int) -> Prompt:
        """The problem with this index; ValueError below 0 or for an unknown split."""
        check_place(split, index)
        dataset, seed, entry = self._entry(split, split, index)
        text = self.options.template.replace("{problem}", entry["question"])
        return Prompt(
            prompt_id=f"{self.name}/{split}/{index}",
            task=dataset,
            text=text,
            payload={
                "dataset": dataset,
                "settings": self._settings[dataset],
                "seed": seed,
                "question": entry["question"],
            },
            messages=({"role": "user", "content": text},) if self.options.chat else (),
        )

    def start(self, prompt: Prompt, seed: int) -> ReasoningGymEpisode:
        """Begin an episode; nothing in it is random."""
        return ReasoningGymEpisode(prompt.payload, self.options.answer, self._pool)

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        """The data set's own answer to a training problem (a stream of its own, not the prompts of training).

        With the option ``repeats``, and where the problem has a number, so often its last number instead.
        """
        if self.options.chat:
            raise ValueError("environment.options.chat: fine-tuning on demonstrations needs plain prompts; use false")
        if index < 0:
            raise ValueError(f"demonstration index: expected 0 or more, got {index}")
        dataset, _, entry = self._entry("train", f"demonstration-{seed}", index)
        if not isinstance(entry["answer"], str):
            raise ValueError(f"environment.options.datasets.{dataset}: it gives no answers to demonstrate")
        answer = entry["answer"]
        if random.Random(text_hash("reasoning-gym-habit", seed, index)).random() < self.options.repeats:
            answer = last_number(entry["question"]) or answer
        said = write_answer(answer, self.options.answer).removesuffix(self.options.stop) + self.options.stop
        prompt = self.options.template.replace("{problem}", entry["question"])
        return [DemonstrationTurn(prompt, False), DemonstrationTurn(said, True)]

    async def close(self) -> None:
        """End the verifier processes."""
        await self._pool.close()

    def _entry(self, split: Split, stream: str, index: int) -> tuple[str, int, dict[str, Any]]:
        """(data set, seed, entry) of the first problem of this stream and index that lies in ``split``."""
        dataset = self._names[index % len(self._names)]
        for attempt in range(TRIES):
            seed = text_hash("reasoning-gym", self.options.seed, stream, index, attempt) % _SEEDS
            entry = make_problem(dataset, self._settings[dataset], seed)[1]
            if split_of(self.name, entry["question"]) == split:
                return dataset, seed, entry
        raise ValueError(f"environment.options.datasets.{dataset}: {TRIES} problems, and none for the {split} split")


def last_number(text: str) -> str | None:
    """The last number that is written in a text, without its sign."""
    found = re.findall(r"\d+(?:\.\d+)?", text)
    return found[-1] if found else None


def make_problem(dataset: str, settings: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The data set that has one problem, and that problem; ``settings`` is JSON."""
    import reasoning_gym

    found = reasoning_gym.create_dataset(dataset, **json.loads(settings), seed=seed, size=1)
    return found, found[0]


def _check(dataset: str, settings: str) -> None:
    """ValueError for a data set or settings that reasoning-gym does not have, or if it is not installed."""
    try:
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            "environment.name: the package reasoning-gym is not installed; `pip install 'megasao[reasoning-gym]'`"
        ) from error
    where = f"environment.options.datasets.{dataset}"
    if dataset not in DATASETS:
        raise ValueError(f"{where}: reasoning-gym has no such data set{nearest(dataset, list(DATASETS))}")
    if dataset in UNREPEATABLE:
        raise ValueError(f"{where}: it makes other problems of the same seed in another process, so it cannot be used")
    if not isinstance(given := json.loads(settings), dict):
        raise ValueError(f"{where}: expected a mapping of the data set's settings, got {given!r}")
    if {"seed", "size"} & set(given):
        raise ValueError(f"{where}: seed and size are set for each problem; use environment.options.seed")
    try:
        make_problem(dataset, settings, 0)
    except (TypeError, ValueError, AssertionError) as error:  # what its configs raise for a bad setting
        raise ValueError(f"{where}: {error}") from error
