"""How old the rollouts of a study's training step are: as old as the config's bounds permit, without a clock.

Invariants:
- no trajectory is older than ``loop.max_lag`` versions;
- of a step's rollouts, at most the share ``loop.max_stale_share`` is stale at all;
- the rollouts of one group have one age.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from megasao.config import Config
from megasao.studies.play import Player
from megasao.trajectories.schema import Trajectory

Weights = Mapping[str, Any]


class BoundedStaleness:
    """Batches whose rollouts were begun earlier, with the weights of that time.

    Without a stale share (``loop.max_stale_share`` = 1) every rollout of a step is ``loop.max_lag`` versions old: what
    happens where rollouts are faster than training, and the queue is as long as the bound permits. With one, that
    share of the groups is 1 to ``max_lag`` versions old (drawn evenly), and the rest is fresh. The age grows by one
    every other step until it has reached the bound.
    """

    def __init__(self, config: Config, player: Player) -> None:
        self._config, self._player = config, player
        self._generator = random.Random(config.run.seed)
        self._kept: dict[int, Weights] = {}
        self._indices = count()

    def published(self, version: int, weights: Weights) -> None:
        """A version is new; those that no rollout can begin with any more are forgotten."""
        self._kept[version] = weights
        self._kept = {v: w for v, w in self._kept.items() if v >= version - self._config.loop.max_lag}

    def next_batch(self, version: int) -> list[Trajectory]:
        """The rollouts of the step that moves the weights on from ``version``."""
        loop = self._config.loop
        by_version: dict[int, list[int]] = {}
        for lag in self._lags(version):
            indices = [next(self._indices) for _ in range(loop.group_size)]
            by_version.setdefault(version - lag, []).extend(indices)
        return [trajectory for old, indices in by_version.items() for trajectory in self._play(old, indices)]

    def notes(self) -> dict[str, float | None]:
        """Nothing beyond what the trajectories say."""
        return {}

    def _play(self, version: int, indices: list[int]) -> list[Trajectory]:
        leases = [self._player.training_lease(index) for index in indices]
        return self._player.play(leases, version, self._kept[version])

    def _lags(self, version: int) -> Iterator[int]:
        """An age for each group of the step."""
        loop = self._config.loop
        groups = loop.batch_size // loop.group_size
        oldest = min(loop.max_lag, version // 2)
        if loop.max_stale_share == 1:
            yield from [oldest] * groups
            return
        stale = int(loop.max_stale_share * groups)
        for number in range(groups):
            yield self._generator.randint(1, oldest) if number < stale and oldest else 0
