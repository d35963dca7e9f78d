"""What a rollout engine is: token ids in; token ids, exact log-probabilities and version spans out.

Invariants, asserted by the contract tests for every engine:
- log-probabilities are those of the distribution that was sampled (temperature included), fp32;
- ``weight_versions`` says for every output token which weights produced it;
- an engine never alters ids: what it returns is what it sampled;
- a weight version is current on an engine only after ``commit_weights``; until then nothing of it is visible.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. ``temperature`` 0 is greedy (log-probs are then those at temperature 1)."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    return_logprobs: bool = True
    return_routed_experts: bool = False
    routed_experts_from: int = 0
    """The caller knows the experts of the input ids before this one; an engine need not say them again."""


@dataclass(frozen=True)
class GenerateRequest:
    """One turn. ``session_id`` names the episode, whose earlier tokens may be cached."""

    request_id: str
    session_id: str
    input_ids: Sequence[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class GenerateResult:
    """What was sampled.

    ``weight_versions``: run-length (first output index, version), starting at index 0, strictly increasing
    indices. ``finish_reason``: ``stop`` (a stop token was sampled, and is the last output id), ``length``, or
    ``abort`` (the tokens so far are returned). ``routed_experts``: where they were asked for, the experts that the last
    tokens of input and output but the very last went to, [n, M, K] in the dtype of ``megasao.families.routing``: all
    those that this request computed, or all from ``routed_experts_from`` on, each as it was when it was first computed.
    """

    output_ids: list[int]
    logprobs: list[float] | None
    weight_versions: list[tuple[int, int]]
    finish_reason: Literal["stop", "length", "abort"]
    metrics: dict[str, float] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None


class EngineError(RuntimeError):
    """The engine, not the policy, failed; the episode is excluded or retried, never scored."""


class Engine(ABC):
    """A rollout engine."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """The version that the next sampled token will come from."""

    @abstractmethod
    async def start(self) -> None:
        """Bring the engine up. Raises EngineError within a bounded time."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn. Raises ValueError for a request that can never work, EngineError otherwise."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a running request early; its ``generate`` returns with finish_reason ``abort``. Unknown ids: no-op."""

    @abstractmethod
    async def end_session(self, session_id: str) -> None:
        """The episode is over: forget its cache. Unknown ids: no-op."""

    @abstractmethod
    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Stage a complete set of Hugging Face named tensors. ValueError names a missing, extra or misshapen one."""

    @abstractmethod
    async def commit_weights(self, version: int) -> None:
        """Make the staged version current between two decode steps. EngineError if it was not staged."""

    @abstractmethod
    async def discard_weights(self, version: int) -> None:
        """Forget a staged version; the current one stays. Unknown versions: no-op."""

    @abstractmethod
    async def close(self) -> None:
        """Stop. Running requests end with EngineError."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Monotone totals: generated_tokens, prefill_tokens, decode_steps, busy_seconds."""
