"""What a lease says: prompt, seed, temperature, weights. Pure.

Invariant: prompt, group and seed are functions of the run's seed and the key alone, so that an attempt that is made
again, also after a restart, is the same episode.
"""

import hashlib
from collections.abc import Mapping

from megasao.config import Config
from megasao.controller.groups import GroupBook
from megasao.controller.leases import Key, LeaseBook
from megasao.environments.base import Environment, Split
from megasao.environments.benchmarks.background import BackgroundBenchmark
from megasao.transport.messages import Lease


class Lessor:
    """Makes leases; it does not decide which."""

    def __init__(
        self,
        config: Config,
        environment: Environment,
        leases: LeaseBook,
        groups: GroupBook,
        benchmarks: Mapping[str, BackgroundBenchmark],
    ) -> None:
        self._seed = config.run.seed
        self._want_logprobs = config.wants_logprobs
        self._want_versions = config.wants_versions
        self._want_routed_experts = config.actor.router_replay
        self._environment = environment
        self._benchmarks = benchmarks
        self._leases = leases
        self._groups = groups

    def named(self, key: Key) -> tuple[str, str]:
        """Prompt id and task of the problem that ``key`` names."""
        benchmark = self._benchmarks.get(key.mode)
        environment = self._environment if benchmark is None else benchmark.environment
        return environment.named(*self._problem(key))

    def make(self, key: Key, temperature: float, min_version: int) -> Lease:
        """A new lease on ``key``, under a name of its own."""
        prompt_id, task = self.named(key)
        split, prompt_index = self._problem(key)
        # An evaluation's result is labelled with the weights that produced it.
        want_versions = self._want_versions or not key.is_training
        return Lease(
            lease_id=self._leases.new_id(key, None if want_versions else min_version),
            prompt_id=prompt_id,
            group_id=self._groups.name(key.index) if key.is_training else prompt_id,
            split=split,
            prompt_index=prompt_index,
            task=task,
            seed=episode_seed(self._seed, key),
            temperature=temperature,
            min_version=min_version,
            evaluation_id=None if key.is_training else key.stream,
            want_logprobs=key.is_training and self._want_logprobs,
            want_versions=want_versions,
            want_routed_experts=key.is_training and self._want_routed_experts,
        )

    def _problem(self, key: Key) -> tuple[Split, int]:
        """Split and number of the environment's problem; the rollouts of a group, or samples, share it."""
        if key.is_training:
            return "train", self._groups.prompt_index(key.index)
        benchmark = self._benchmarks.get(key.mode)
        return "eval", key.index if benchmark is None else benchmark.problem(key.index)


def episode_seed(run_seed: int, key: Key) -> int:
    """31 bits. All evaluations of one mode use the same seeds: what differs between them is the weights."""
    digest = hashlib.blake2b(f"{run_seed}/{key.mode}/{key.index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
