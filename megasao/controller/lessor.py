"""What a lease says: prompt, seed, temperature, weights. Pure.

Invariant: prompt and seed are functions of the run's seed and the key alone, so that an attempt that is made again,
also after a restart, is the same episode.
"""

import hashlib

from megasao.config import Config
from megasao.controller.leases import Key, LeaseBook
from megasao.environments.base import Environment, Prompt, Split
from megasao.transport.messages import Lease


class Lessor:
    """Makes leases; it does not decide which."""

    def __init__(self, config: Config, environment: Environment, leases: LeaseBook) -> None:
        self._seed = config.run.seed
        self._want_logprobs = config.wants_logprobs
        self._environment = environment
        self._leases = leases

    def prompt(self, key: Key) -> Prompt:
        """The problem that ``key`` names."""
        split: Split = "train" if key.is_training else "eval"
        return self._environment.prompt(split, key.index)

    def make(self, key: Key, temperature: float, min_version: int) -> Lease:
        """A new lease on ``key``, under a name of its own."""
        prompt = self.prompt(key)
        return Lease(
            lease_id=self._leases.new_id(key),
            prompt_id=prompt.prompt_id,
            group_id=prompt.prompt_id,
            split="train" if key.is_training else "eval",
            prompt_index=key.index,
            task=prompt.task,
            seed=episode_seed(self._seed, key),
            temperature=temperature,
            min_version=min_version,
            evaluation_id=None if key.is_training else key.stream,
            want_logprobs=key.is_training and self._want_logprobs,
        )


def episode_seed(run_seed: int, key: Key) -> int:
    """31 bits. All evaluations of one mode use the same seeds: what differs between them is the weights."""
    mode = key.stream.rpartition("/")[2]
    digest = hashlib.blake2b(f"{run_seed}/{mode}/{key.index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
