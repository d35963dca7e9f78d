"""Episodes played in this process, on the embedded engine, with any weight version.

Invariants: an episode is the one that a rollout worker would play for the same lease and weights; all episodes of one
call see one version.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasao.config import Config
from megasao.controller.leases import TRAIN, Key, make_lease_id
from megasao.controller.lessor import episode_seed
from megasao.environments.base import Split
from megasao.environments.encoding import TokenizerCodec
from megasao.environments.registry import make_environment
from megasao.rollout.engines.embedded import EmbeddedEngine
from megasao.rollout.episode import EpisodeRunner
from megasao.trajectories.schema import Trajectory
from megasao.transport.messages import Lease


class Player:
    """The engine and the environment of one run. Use as a context manager."""

    def __init__(self, path: Path, config: Config) -> None:
        """``path``: the Hugging Face checkpoint of version 0."""
        self._config = config
        self._environment = make_environment(config.environment)
        self._engine = EmbeddedEngine(
            path, config.rollout.embedded, max_total_tokens=config.environment.max_tokens, seed=config.run.seed
        )
        codec = TokenizerCodec.from_directory(path)
        self._runner = EpisodeRunner.build(self._environment, self._engine, codec, config.environment)
        self._loop = asyncio.Runner()

    def __enter__(self) -> "Player":
        self._loop.run(self._engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._engine.close())
        self._loop.close()

    def play(self, leases: Sequence[Lease], version: int, weights: Mapping[str, Any]) -> list[Trajectory]:
        """Play ``leases`` with these weights, in their order."""
        return self._loop.run(self._play(leases, version, weights))

    async def _play(self, leases: Sequence[Lease], version: int, weights: Mapping[str, Any]) -> list[Trajectory]:
        if self._engine.weight_version != version:
            await self._engine.prepare_weights(version, weights)
            await self._engine.commit_weights(version)
        return list(await asyncio.gather(*(self._runner.run(lease) for lease in leases)))

    def training_lease(self, index: int) -> Lease:
        """The run's rollout number ``index``; ``loop.group_size`` of them share a group, and the problem of its first.

        So problems are numbered by rollouts in every run, whatever the size of its groups.
        """
        first = index - index % self._config.loop.group_size
        return self._lease(TRAIN, "train", index, first, f"group-{first}", self._config.rollout.temperature)

    def evaluation_leases(self, temperature: float) -> list[Lease]:
        """The held-out problems of ``evaluation.problems``, the same each time."""
        mode = "sampled" if temperature else "greedy"
        problems = range(self._config.evaluation.problems)
        return [self._lease(f"evaluation/{mode}", "eval", index, index, "", temperature) for index in problems]

    def _lease(self, stream: str, split: Split, index: int, problem: int, group: str, temperature: float) -> Lease:
        key = Key(stream, index)
        prompt = self._environment.prompt(split, problem)
        return Lease(
            lease_id=make_lease_id(key, 1, 1),
            prompt_id=prompt.prompt_id,
            group_id=group or prompt.prompt_id,
            split=split,
            prompt_index=problem,
            task=prompt.task,
            seed=episode_seed(self._config.run.seed, key),
            temperature=temperature,
            min_version=0,
            want_logprobs=key.is_training and self._config.wants_logprobs,
            want_versions=True,
            want_routed_experts=key.is_training and self._config.actor.router_replay,
        )
