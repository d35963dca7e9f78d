"""The embedded engine: continuous batching of a transformers model inside the rollout process.

A scheduler task runs one model step at a time in one worker thread, so the event loop stays free; requests join and
leave, and weights are swapped, only between two steps. The one rule of a request: the tokens that its slot does not
hold yet are pending; once none is pending after a step, that step's last logits give the next token. A prompt, an
observation, a decoded token and a recompute under new weights all follow it.

Invariants, asserted by the tests beside those of ``base.py``:
- at most ``config.slots`` requests run together, at most ``max_queue`` wait: more is an EngineError, never a hang;
- a failed step, or ``close``, ends every request with EngineError, and later calls say what failed;
- what is sampled for (seed, prefix, weights) does not depend on the other requests, to fp32 rounding.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch

from megasao.config.rollout import EmbeddedEngineConfig
from megasao.rollout.engines.base import Engine, EngineError, GenerateRequest, GenerateResult
from megasao.rollout.engines.embedded_model import EmbeddedModel, ModelStep, StepOutput
from megasao.rollout.engines.running import RunningRequest, check_request
from megasao.rollout.engines.sampler import derive_seed
from megasao.rollout.engines.slot_attention import StepRow
from megasao.rollout.engines.slots import SlotTable

STEP_TOKENS = 4096
"""Most tokens of one step: a long prompt is prefilled over several, so that decoding requests are not held up."""

START_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 30.0


class EmbeddedEngine(Engine):
    """Runs the Hugging Face checkpoint at ``path``, in fp32 on CPU, as weight version 0.

    ``max_total_tokens`` bounds input plus new tokens of a request; ``seed`` is used by requests without one.
    """

    def __init__(
        self, path: Path, config: EmbeddedEngineConfig, *, max_total_tokens: int, seed: int, max_queue: int = 4096
    ) -> None:
        if max_total_tokens < 2:
            raise ValueError(
                f"max_total_tokens must be at least 2 (a prompt token and a new one), got {max_total_tokens}"
            )
        self._path, self._config = Path(path), config
        self._max_total, self._seed, self._max_queue = max_total_tokens, seed, max_queue
        self._model: EmbeddedModel | None = None
        self._version = 0
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._by_id: dict[str, RunningRequest] = {}
        self._sessions: set[str] = set()
        self._between_steps: deque[tuple[Callable[[EmbeddedModel], None], asyncio.Future[None]]] = deque()
        self._slots = SlotTable(config.slots)
        self._wake = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._failure: str | None = "the engine was not started"
        self._cause: Exception | None = None
        self._closing = False
        self._totals = {
            name: 0.0
            for name in ("generated_tokens", "prefill_tokens", "cached_tokens", "decode_steps", "busy_seconds")
        }

    @property
    def weight_version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Load the model. ValueError for a checkpoint that cannot be run, EngineError after START_TIMEOUT_S."""
        if self._thread is not None:
            raise EngineError("the embedded engine was started before; make a new one")
        threads = self._config.threads
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="embedded-engine", initializer=torch.set_num_threads, initargs=(threads,)
        )
        loading = asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        try:
            self._model = await asyncio.wait_for(loading, START_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"loading {self._path} took more than {START_TIMEOUT_S} s") from None
        self._failure = None
        self._loop_task = asyncio.create_task(self._run(self._model), name="embedded-engine")

    def _load(self) -> EmbeddedModel:
        return EmbeddedModel(self._path, slots=self._config.slots, max_tokens=self._max_total)

    # requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        model = self._check_alive()
        check_request(request, vocab_size=model.vocab_size, max_total_tokens=self._max_total)
        if request.sampling.return_routed_experts and model.recorder.routing is None:
            raise ValueError(f"request {request.request_id!r} asks for routed experts of a model that has none")
        if request.request_id in self._by_id:
            raise ValueError(f"request {request.request_id!r} is already running; request ids must be unique")
        if request.session_id in self._sessions:
            raise ValueError(f"session {request.session_id!r} already has a running request; await it first")
        if len(self._waiting) >= self._max_queue:
            raise EngineError(f"the embedded engine's queue is full: {self._max_queue} requests wait")
        seed = request.sampling.seed
        running = RunningRequest(
            request,
            seed=derive_seed(self._seed, request.request_id) if seed is None else seed,
            future=asyncio.get_running_loop().create_future(),
        )
        self._by_id[request.request_id] = running
        self._sessions.add(request.session_id)
        self._waiting.append(running)
        self._wake.set()
        try:
            return await running.future
        finally:
            running.aborted = True  # a caller that was cancelled must not keep a slot
            del self._by_id[request.request_id]
            self._sessions.discard(request.session_id)
            self._wake.set()

    async def abort(self, request_id: str) -> None:
        running = self._by_id.get(request_id)
        if running is not None:
            running.aborted = True
            self._wake.set()

    async def end_session(self, session_id: str) -> None:
        self._slots.end_session(session_id)

    def _check_alive(self) -> EmbeddedModel:
        if self._failure is not None:
            raise self._failed()
        assert self._model is not None
        return self._model

    # weights

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        model = self._check_alive()
        await asyncio.to_thread(model.stage, version, tensors)

    async def commit_weights(self, version: int) -> None:
        model = self._check_alive()
        if model.staged_version() != version:
            raise EngineError(f"weights {version} were not prepared (staged: {model.staged_version()})")
        done = asyncio.get_running_loop().create_future()
        self._between_steps.append((lambda model: self._commit(model, version), done))
        self._wake.set()
        await done

    async def discard_weights(self, version: int) -> None:
        self._check_alive().discard(version)

    def _commit(self, model: EmbeddedModel, version: int) -> None:
        if model.staged_version() != version:
            raise EngineError(f"weights {version} were discarded or replaced before their commit")
        model.commit(version)
        self._version = version
        if self._config.kv_after_update == "recompute":
            self._slots.invalidate()

    # the scheduler

    async def _run(self, model: EmbeddedModel) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._closing:
                await self._run_between_steps(model)
                self._finish_aborted()
                self._admit()
                rows = self._plan()
                if not rows:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                started = time.perf_counter()
                output = await loop.run_in_executor(self._thread, model.step, self._work(rows))
                self._totals["busy_seconds"] += time.perf_counter() - started
                self._totals["decode_steps"] += 1
                self._apply(model, rows, output)
            self._fail("the embedded engine was closed")
        except Exception as error:  # whatever broke the step ends every request, by name
            self._fail(f"the embedded engine failed at weight version {self._version}: {error!r}", error)

    async def _run_between_steps(self, model: EmbeddedModel) -> None:
        while self._between_steps:
            action, done = self._between_steps[0]
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, action, model)
            except EngineError as error:
                _set(done, error=error)
            else:
                _set(done)
            self._between_steps.popleft()

    def _finish_aborted(self) -> None:
        for running in [running for running in self._running if running.aborted]:
            self._finish(running, "abort")
        if any(running.aborted for running in self._waiting):
            for running in [running for running in self._waiting if running.aborted]:
                running.resolve("abort")
            self._waiting = deque(running for running in self._waiting if not running.aborted)

    def _admit(self) -> None:
        """First come, first served, while slots last."""
        while self._waiting:
            running = self._waiting[0]
            slot = self._slots.acquire(running.request.session_id, running.ids)
            if slot is None:
                return
            self._waiting.popleft()
            running.admit(slot)
            self._totals["cached_tokens"] += len(slot.tokens)
            self._running.append(running)

    def _plan(self) -> list[tuple[RunningRequest, list[int]]]:
        """Who computes which tokens in the next step: decoding requests first, then prefill within the budget."""
        pending = [(running, running.pending()) for running in self._running]
        rows = [(running, tokens) for running, tokens in pending if len(tokens) == 1]
        left = max(STEP_TOKENS - len(rows), 2)
        for running, tokens in pending:
            if len(tokens) > 1 and left > 1:
                rows.append((running, tokens[:left]))
                left -= len(rows[-1][1])
        return rows

    def _work(self, rows: list[tuple[RunningRequest, list[int]]]) -> ModelStep:
        return ModelStep(
            rows=[StepRow(running.slot.index, len(running.slot.tokens), tokens) for running, tokens in rows],
            samples=[running.sample_row() if running.completes(tokens) else None for running, tokens in rows],
            record_routing=any(running.request.sampling.return_routed_experts for running, _ in rows),
        )

    def _apply(
        self,
        model: EmbeddedModel,
        rows: list[tuple[RunningRequest, list[int]]],
        output: StepOutput,
    ) -> None:
        done = 0
        for index, (running, tokens) in enumerate(rows):
            if output.routed_experts is not None and running.request.sampling.return_routed_experts:
                running.record(len(running.slot.tokens), output.routed_experts[done : done + len(tokens)])
            done += len(tokens)
            running.slot.tokens.extend(tokens)
            self._totals["prefill_tokens"] += len(tokens) if len(tokens) > 1 or not running.output_ids else 0
            if index not in output.samples:
                continue
            token, logprob = output.samples[index]
            if not math.isfinite(logprob):
                self._refuse(model, running)
                continue
            self._totals["generated_tokens"] += 1
            finished = running.append(token, logprob, self._version)
            if finished is not None:
                self._finish(running, finished)

    def _refuse(self, model: EmbeddedModel, running: RunningRequest) -> None:
        model.cache.clear(running.slot.index)
        running.slot.tokens.clear()
        self._release(running)
        running.fail(EngineError(f"logits are not finite at weight version {self._version}"))

    def _finish(self, running: RunningRequest, reason: Literal["stop", "length", "abort"]) -> None:
        self._release(running)
        running.resolve(reason)

    def _release(self, running: RunningRequest) -> None:
        self._running.remove(running)
        self._slots.release(running.slot)

    def _fail(self, reason: str, cause: Exception | None = None) -> None:
        self._failure, self._cause = reason, cause
        for running in [*self._running, *self._waiting]:
            running.fail(self._failed())
        self._running.clear()
        self._waiting.clear()
        while self._between_steps:
            _set(self._between_steps.popleft()[1], error=self._failed())

    def _failed(self) -> EngineError:
        error = EngineError(self._failure)
        error.__cause__ = self._cause
        return error

    async def close(self) -> None:
        """Stop. EngineError if the step that is running does not end within CLOSE_TIMEOUT_S."""
        self._closing = True
        self._wake.set()
        if self._loop_task is not None:
            done, _ = await asyncio.wait({self._loop_task}, timeout=CLOSE_TIMEOUT_S)
            if not done:
                self._fail(f"the model step did not end within {CLOSE_TIMEOUT_S} s of close")
                raise self._failed()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self._failure = self._failure or "the embedded engine was closed"

    def stats(self) -> dict[str, float]:
        return {**self._totals, "evictions": float(self._slots.evictions)}


def _set(future: "asyncio.Future[None]", error: EngineError | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
