"""One request inside the embedded engine."""

import asyncio
import math
import time
from typing import Literal

import numpy as np

from megasao.rollout.engines.base import EngineError, GenerateRequest, GenerateResult
from megasao.rollout.engines.sampler import SampleRow, uniform
from megasao.rollout.engines.slots import Slot


class RunningRequest:
    """Tokens so far of a request, and the future its caller waits on."""

    def __init__(self, request: GenerateRequest, *, seed: int, future: "asyncio.Future[GenerateResult]") -> None:
        self.request = request
        self.ids = [int(token) for token in request.input_ids]
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.weight_versions: list[tuple[int, int]] = []
        self.future = future
        self.aborted = False
        self._slot: Slot | None = None
        self._seed = seed
        self._queued_at = time.perf_counter()
        self._admitted_at = self._queued_at
        self._cached = 0
        self._routed: list[np.ndarray] = []
        self._routed_end = 0

    @property
    def slot(self) -> Slot:
        """The KV slot; only once admitted."""
        assert self._slot is not None
        return self._slot

    def admit(self, slot: Slot) -> None:
        """A slot was found."""
        self._slot, self._cached, self._admitted_at = slot, len(slot.tokens), time.perf_counter()

    def pending(self) -> list[int]:
        """Tokens whose keys and values are not in the slot; never empty."""
        return self.ids[len(self.slot.tokens) :]

    def completes(self, tokens: list[int]) -> bool:
        """Whether nothing is pending any more once ``tokens`` are computed."""
        return len(self.slot.tokens) + len(tokens) == len(self.ids)

    def sample_row(self) -> SampleRow:
        """How the next token is drawn."""
        temperature = self.request.sampling.temperature
        return SampleRow(temperature, uniform(self._seed, len(self.ids)) if temperature else 0.0)

    def append(self, token: int, logprob: float, version: int) -> Literal["stop", "length"] | None:
        """Take a sampled token; the reason if it was the last one."""
        if not self.weight_versions or self.weight_versions[-1][1] != version:
            self.weight_versions.append((len(self.output_ids), version))
        self.ids.append(token)
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        sampling = self.request.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.output_ids) == sampling.max_new_tokens else None

    def record(self, start: int, chosen: np.ndarray) -> None:
        """Take the experts [n, M, K] of tokens ``start``..; those of tokens that were computed before stay as known."""
        first = start if not self._routed else self._routed_end
        self._routed.append(chosen[max(0, first - start) :])
        self._routed_end = max(first, start + len(chosen))

    def resolve(self, reason: Literal["stop", "length", "abort"]) -> None:
        """Give the caller its result."""
        if self.future.done():
            return
        now = time.perf_counter()
        self.future.set_result(
            GenerateResult(
                output_ids=self.output_ids,
                logprobs=self.logprobs if self.request.sampling.return_logprobs else None,
                weight_versions=self.weight_versions,
                finish_reason=reason,
                routed_experts=np.concatenate(self._routed) if self._routed else None,
                metrics={
                    "cached_tokens": float(self._cached),
                    "queue_seconds": (self._admitted_at if self._slot else now) - self._queued_at,
                    "seconds": now - self._queued_at,
                },
            )
        )

    def fail(self, error: EngineError) -> None:
        """Give the caller the engine's failure."""
        if not self.future.done():
            self.future.set_exception(error)


def check_request(request: GenerateRequest, *, vocab_size: int, max_total_tokens: int) -> None:
    """ValueError for a request that can never work, saying which and why."""
    ids, sampling, name = request.input_ids, request.sampling, f"request {request.request_id!r}"
    if not len(ids):
        raise ValueError(f"{name} has no input ids; give at least one")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"{name} has ids outside 0..{vocab_size - 1}: {min(ids)}..{max(ids)}")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"{name} has max_new_tokens = {sampling.max_new_tokens}; at least 1 is needed")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"{name} has temperature {sampling.temperature}; it must be finite and not negative")
    if sampling.seed is not None and not isinstance(sampling.seed, int):
        raise ValueError(f"{name} has seed {sampling.seed!r}; it must be an integer or None")
    if len(ids) + sampling.max_new_tokens > max_total_tokens:
        raise ValueError(
            f"{name} needs {len(ids)} + {sampling.max_new_tokens} tokens, more than max_total_tokens = "
            f"{max_total_tokens}; shorten max_new_tokens or end the episode"
        )
