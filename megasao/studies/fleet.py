"""An asynchronous fleet by event simulation: episodes of random duration on a fixed number of slots.

Only time is simulated: what an episode says, earns and weighs is the real engine's. An episode keeps the weights that
it began with. While the trainer is at work the slots go on with the old weights.

Invariants:
- a slot is never idle: an episode that ends makes place for the next rollout at once;
- nothing is trained on that is older than ``loop.max_lag`` versions; what is dropped is counted;
- a batch holds whole groups, in the order in which they were complete.
"""

import heapq
import math
import random

from megasao.config import Config
from megasao.studies.laboratory import Record
from megasao.studies.play import Player
from megasao.studies.staleness import Weights
from megasao.trajectories.schema import Trajectory


class SimulatedFleet:
    """``rollout.concurrency`` slots; durations are lognormal with mean 1 and the shape ``sigma``.

    ``training``: how long a training step takes, in the same unit.
    """

    def __init__(self, config: Config, player: Player, *, sigma: float, training: float) -> None:
        self._config, self._player = config, player
        self._sigma, self._training = sigma, training
        self._version, self._weights = -1, {}  # type: int, Weights
        self._now = 0.0
        self._begun = 0
        self._running: list[tuple[float, int]] = []
        self._unplayed: list[int] = []
        self._played: dict[int, Trajectory] = {}
        self._versions: dict[int, int] = {}
        self._finished: dict[int, list[int]] = {}
        self._complete: list[list[int]] = []
        self._dropped = 0
        self._newest = 0

    def published(self, version: int, weights: Weights) -> None:
        """The trainer has worked for its time; from now on episodes begin with the new weights."""
        if self._version >= 0:
            self._advance(self._now + self._training)
            self._play_begun()
        self._version, self._weights = version, weights
        while len(self._running) < self._config.rollout.concurrency:
            self._begin()

    def next_batch(self, version: int) -> list[Trajectory]:
        """Wait for the first ``loop.batch_size`` rollouts in whole groups that are fresh enough."""
        chosen: list[int] = []
        while len(chosen) < self._config.loop.batch_size:
            while not self._complete:
                self._finish_one()
            group = self._complete.pop(0)
            if version - min(self._versions.pop(index) for index in group) > self._config.loop.max_lag:
                self._drop(group)
            else:
                chosen += group
        self._newest = max(chosen)
        self._play_begun()
        return [self._played.pop(index) for index in chosen]

    def notes(self) -> Record:
        """Of the run so far: the simulated time, and rollouts begun, dropped as too old, and newest in the batch."""
        return {
            "fleet/time": self._now,
            "fleet/begun": float(self._begun),
            "fleet/dropped": float(self._dropped),
            "fleet/newest": float(self._newest),
        }

    def _drop(self, group: list[int]) -> None:
        self._dropped += len(group)
        self._unplayed = [index for index in self._unplayed if index not in group]
        for index in group:
            self._played.pop(index, None)

    def _begin(self) -> None:
        index, self._begun = self._begun, self._begun + 1
        generator = random.Random(f"{self._config.run.seed}/{index}")
        duration = math.exp(generator.gauss(-(self._sigma**2) / 2, self._sigma))
        heapq.heappush(self._running, (self._now + duration, index))
        self._unplayed.append(index)
        self._versions[index] = self._version

    def _finish_one(self) -> None:
        self._now, index = heapq.heappop(self._running)
        group = self._finished.setdefault(index // self._config.loop.group_size, [])
        group.append(index)
        if len(group) == self._config.loop.group_size:
            self._complete.append(self._finished.pop(index // self._config.loop.group_size))
        self._begin()

    def _advance(self, until: float) -> None:
        while self._running[0][0] <= until:
            self._finish_one()
        self._now = until

    def _play_begun(self) -> None:
        """Play what was begun with the present weights, all at once."""
        if self._unplayed:
            leases = [self._player.training_lease(index) for index in self._unplayed]
            trajectories = self._player.play(leases, self._version, self._weights)
            self._played |= dict(zip(self._unplayed, trajectories, strict=True))
            self._unplayed = []
