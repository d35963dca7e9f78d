"""How long episodes are: laws with a name, or the episodes of a run's journal.

Invariant: the episode of a lease is a function of the lease's seed, so that every mode plays the same ones.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megasao.config import Config
from megasao.config.simulate import EpisodeConfig
from megasao.trajectories.files import read_trajectories
from megasao.trajectories.schema import Trajectory


@dataclass(frozen=True)
class Turn:
    """Tokens that are new to the engine before it generates, and those that it generates."""

    prefill: int
    decode: int


@dataclass(frozen=True)
class Shape:
    """The turns of an episode; ``rest``: tokens behind the last one, which no engine computes."""

    turns: tuple[Turn, ...]
    rest: int = 0

    @property
    def action_tokens(self) -> int:
        """Tokens that the model generates."""
        return sum(turn.decode for turn in self.turns)

    @property
    def tokens(self) -> int:
        """All tokens."""
        return sum(turn.prefill + turn.decode for turn in self.turns) + self.rest


MOST_EPISODES = 4096
"""Of a journal, evenly over it; the law that they are drawn from hardly gains by more."""

Lengths = Callable[[int], Shape]
"""From the seed of a lease to the shape of its episode."""


def of_law(options: EpisodeConfig, max_tokens: int) -> Lengths:
    """Episodes of the configured law, none longer than ``max_tokens``."""
    prompt, observation = round(options.prompt_tokens.value), round(options.observation_tokens.value)
    room = max_tokens - prompt - (options.turns - 1) * observation

    def shape(seed: int) -> Shape:
        response = min(room, max(options.turns, round(_draw(options, random.Random(seed)))))
        each, more = divmod(response, options.turns)
        return Shape(
            tuple(Turn(observation if turn else prompt, each + (turn < more)) for turn in range(options.turns))
        )

    return shape


def _draw(options: EpisodeConfig, generator: random.Random) -> float:
    mean = options.mean.value
    if options.response == "lognormal":
        assert options.sigma is not None
        return math.exp(generator.gauss(math.log(mean) - options.sigma**2 / 2, options.sigma))
    if options.response == "pareto":
        assert options.alpha is not None
        return mean * (1 - 1 / options.alpha) * generator.paretovariate(options.alpha)
    return mean


def of_run(run: str | Path, config: Config) -> Lengths:
    """The episodes of a run's journal (or of any Arrow files), drawn with replacement.

    ValueError: there are none, or one is longer than ``environment.max_tokens`` of ``config``.
    """
    stored = read_trajectories([run])
    rows = range(0, len(stored), -(-len(stored) // MOST_EPISODES))
    shapes = [shape_of(trajectory) for trajectory in stored.fetch(rows)]
    longest, limit = max(shape.tokens for shape in shapes), config.environment.max_tokens
    if longest > limit:
        raise ValueError(
            f"{run}: an episode of {longest} tokens; the config's environment.max_tokens = {limit} allows none so long"
        )
    return lambda seed: shapes[random.Random(seed).randrange(len(shapes))]


def shape_of(trajectory: Trajectory) -> Shape:
    """The turns of a trajectory: from each start, the actions that follow, up to the next observation."""
    mask = trajectory.action_mask
    turns, seen = [], 0
    starts = [*trajectory.turn_starts, len(mask)]
    for start, following in pairwise(starts):
        end = start
        while end < following and mask[end]:
            end += 1
        turns.append(Turn(start - seen, end - start))
        seen = end
    return Shape(tuple(turns), len(mask) - seen)
