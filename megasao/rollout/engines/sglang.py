"""One SGLang server as a rollout engine: token ids in; token ids, log-probs and version spans out, over HTTP.

Every version of the weights has a label of its own at the server, and every answer says which labels its tokens came
from. Invariants, asserted by the tests beside those of ``base.py``:
- an answer from weights that were not current while its request ran (those of a server that was restarted, say) is an
  error and no sample; where another server computes the prompts, so is one whose server has other weights afterwards;
- after an update that failed, whose weights may be mixed, nothing is sampled until one succeeds;
- a request that is lost with its server keeps the tokens whose version is certain (``RequestLost``), unless it asks for
  their experts, which are lost;
- a token's experts are those that it had when its successor was sampled, also where new weights compute it again;
- nothing is decoded for a caller that went away.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megasao.config.sglang import SGLangConfig
from megasao.rollout.engines.base import Engine, EngineError, GenerateRequest, GenerateResult
from megasao.rollout.engines.parts import ended, joined, nothing, rest_of
from megasao.rollout.engines.running import check_request
from megasao.rollout.engines.sampler import derive_seed
from megasao.rollout.engines.sglang_arguments import vocab_size
from megasao.rollout.engines.sglang_client import Piece, ServerClient, ServerUnreachable
from megasao.rollout.engines.sglang_experts import ExpertRows
from megasao.rollout.engines.sglang_weights import StagedWeights, WeightStaging, version_of_label
from megasao.weights.nodes import ServerNodes

CALL_TIMEOUT_S = 30.0
"""Bound of a call that the server answers without computing."""

_ABORT_AGAIN_S = 0.5
_REASONS: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


class RequestLost(ServerUnreachable):
    """The server, or its weights, went away under a request; ``partial`` holds what is certain, maybe nothing."""

    def __init__(self, reason: str, partial: GenerateResult) -> None:
        super().__init__(reason)
        self.partial = partial


class SGLangEngine(Engine):
    """Drives the server at ``url``, which serves the checkpoint at ``path``.

    ``staging`` is a directory of its own for weights, which the server can read. ``max_total_tokens`` bounds input plus
    new tokens of a request; ``seed`` is used by requests without one; ``key`` is what the server asks for. With
    ``router`` requests go there, and may be answered by any server that has the same weights. With ``fp8`` versions
    have their products in blocks of FP8, and the server starts without weights. ``nodes`` are those that it runs on,
    where they keep its weights themselves.
    """

    def __init__(
        self,
        url: str,
        path: Path,
        config: SGLangConfig,
        *,
        staging: Path,
        max_total_tokens: int,
        seed: int,
        start_timeout_s: float,
        update_timeout_s: float,
        key: str | None = None,
        router: str | None = None,
        fp8: bool = False,
        nodes: ServerNodes | None = None,
    ) -> None:
        self.router, self._nodes = router, nodes
        self.siblings: Callable[[], Sequence[SGLangEngine]] = lambda: [self]
        """Engines of the servers that may have a request of this one: behind a router, all of them."""
        self.url, self._path, self._config, self._staging_path, self._key = url, path, config, staging, key
        self._max_total, self._seed, self._fp8 = max_total_tokens, seed, fp8
        self._start_timeout_s, self._update_timeout_s = start_timeout_s, update_timeout_s
        self._vocab_size = vocab_size(path)
        self._experts = ExpertRows.of(path)
        self._client: ServerClient | None = None
        self._staging: WeightStaging | None = None
        self._labels: list[str] = []
        self._current = 0
        self._version = 0
        self._running: dict[str, _Running] = {}
        self._asked: set[str] = set()
        self._given_up: set[str] = set()
        self._keys: dict[str, str] = {}
        self._refuses: str | None = "the engine was not started"
        self._updating = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._busy_since: float | None = None
        self._totals = dict.fromkeys(
            ("generated_tokens", "prefill_tokens", "cached_tokens", "retractions", "busy_seconds"), 0.0
        )

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def is_split(self) -> bool:
        """Whether one server computes prompts and another one decodes, behind a router."""
        return self._config.prefill_servers > 0

    @property
    def label(self) -> str | None:
        """What the server calls its weights; None before it was asked."""
        return self._labels[self._current] if self._labels else None

    async def start(self) -> None:
        """Wait for the server. ServerUnreachable after ``start_timeout_s``."""
        if self._client is not None:
            raise EngineError("the engine was started before; make a new one")
        self._client = ServerClient(
            self.url, silence_timeout_s=self._config.silence_timeout_s, key=self._key, router=self.router
        )
        await self.reconnect()

    async def reconnect(self) -> None:
        """Take the server as it is now, with whatever weights it has; it may be another life of it."""
        client = self._connected()
        await client.wait_until_ready(self._start_timeout_s)
        info = await client.call("/model_info", None, CALL_TIMEOUT_S)
        label = str(info["weight_version"])
        self._labels, self._current, self._version = [label], 0, version_of_label(label)
        self._refuses = "it has no weights yet" if self._fp8 and "." not in label else None
        self._keys.clear()

    async def check_label(self) -> None:
        """ServerUnreachable if the server does not have the weights that it is thought to have."""
        info = await self._connected().call("/model_info", None, CALL_TIMEOUT_S)
        if str(info["weight_version"]) != self.label:
            raise ServerUnreachable(f"{self.url} has weights {info['weight_version']!r}, not {self.label!r}")

    # requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._connected()
        check_request(request, vocab_size=self._vocab_size, max_total_tokens=self._max_total)
        if request.sampling.return_routed_experts and self._experts is None:
            raise ValueError(f"request {request.request_id!r} asks for routed experts of a model that has none")
        if request.request_id in self._asked:
            raise ValueError(f"request {request.request_id!r} is already running; request ids must be unique")
        self._asked.add(request.request_id)
        try:
            return await self._generate(request)
        finally:
            self._asked.discard(request.request_id)
            self._given_up.discard(request.request_id)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        """In parts, where an update of the weights cuts the request off."""
        so_far = nothing(request)
        while True:
            if self._cuts(request):
                async with self._updating:  # what would be asked for now would be cut off at once
                    pass
            if request.request_id in self._given_up:
                return so_far
            try:
                part, was_cut = await self._part(rest_of(request, so_far))
            except RequestLost as lost:
                raise RequestLost(str(lost), joined(so_far, lost.partial)) from lost
            so_far = joined(so_far, part)
            if not was_cut or part.finish_reason != "abort":
                return so_far
            if reason := ended(request, so_far):
                return replace(so_far, finish_reason=reason)

    def _cuts(self, request: GenerateRequest) -> bool:
        """Whether an update cuts this request off: recomputed tokens would have the experts of the new weights."""
        return request.sampling.return_routed_experts and self._config.pause == "retract"

    async def _part(self, request: GenerateRequest) -> tuple[GenerateResult, bool]:
        """Until the end, or until the request is cut off: then it is to go on."""
        client = self._connected()
        if self._refuses is not None:
            raise RequestLost(f"{self.url}: {self._refuses}", nothing(request))
        # Another server behind a router may have been updated a little before this one, or a little after.
        first = max(0, self._current - 1) if self.router else self._current
        running = _Running(request, self._labels, first, self._experts)
        if self._updating.locked() or self.router:
            running.hold()
        self._running[request.request_id] = running
        self._clock()
        running.reading = asyncio.ensure_future(self._read(client, running))
        try:
            await running.reading
            if self.is_split:
                await asyncio.gather(*(engine.check_label() for engine in self.siblings()))
            return running.result(self.url, is_split=self.is_split), running.is_cut
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or self._refuses is None:
                raise
            raise RequestLost(f"{self.url}: {self._refuses}", running.certain()) from None
        except RequestLost:
            raise
        except ServerUnreachable as error:
            raise RequestLost(str(error), running.certain()) from error
        finally:
            del self._running[request.request_id]
            self._clock()
            running.ended.set()
            if not running.finished and not client.closed:
                self._spawn(self._abort_once(running.rid))

    async def _read(self, client: ServerClient, running: "_Running") -> None:
        if self._config.pause == "none":  # a cache of older weights is there until the end of an update
            async with self._updating:
                pass
        async with aclosing(client.stream(self._body(running), running.request.session_id)) as pieces:
            async for piece in pieces:
                self._take(running, piece)

    def _body(self, running: "_Running") -> dict[str, Any]:
        request, sampling = running.request, running.request.sampling
        seed = derive_seed(self._seed, request.request_id) if sampling.seed is None else sampling.seed
        body: dict[str, Any] = {
            "rid": running.rid,
            "input_ids": [int(token) for token in request.input_ids],
            # Of a request of one message there is nothing to keep when the server is lost; a stream costs it more.
            "stream": sampling.max_new_tokens > self._config.stream_interval,
            "return_logprob": sampling.return_logprobs,
            "logprob_start_len": -1,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_new_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": seed % 2**63,
            },
        }
        if sampling.return_routed_experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": sampling.routed_experts_from}
        if self._config.pause == "in_place":
            # Keys and values of older weights live on after an update, and only an episode that began under those
            # weights may go on from them.
            body["extra_key"] = self._keys.setdefault(request.session_id, self._labels[self._current])
        return body

    def _take(self, running: "_Running", piece: Piece) -> None:
        first = not running.pieces
        running.take(piece)
        self._totals["generated_tokens"] += len(piece.output_ids)
        if piece.meta_info is not None and first:
            self._totals["prefill_tokens"] += piece.meta_info.prompt_tokens
            self._totals["cached_tokens"] += piece.meta_info.cached_tokens
        if piece.meta_info is not None and running.finished:
            self._totals["retractions"] += piece.meta_info.num_retractions

    async def abort(self, request_id: str) -> None:
        if request_id in self._asked:
            self._given_up.add(request_id)
        running = self._running.get(request_id)
        if running is not None and not running.finished:
            self._spawn(self._abort_until_gone(request_id, running))

    async def _abort_until_gone(self, request_id: str, running: "_Running") -> None:
        """A request that the server has not registered yet cannot be aborted there: say it again."""
        while self._running.get(request_id) is running and not running.finished:
            await self._abort_once(running.rid)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _abort_once(self, rid: str) -> None:
        await asyncio.gather(*(engine.abort_here(rid) for engine in self.siblings()))

    async def abort_here(self, rid: str) -> None:
        """End a request at this server, if it has it."""
        if self._client is not None and not self._client.closed:
            try:
                await self._client.call("/abort_request", {"rid": rid}, CALL_TIMEOUT_S)
            except EngineError:
                return  # a server that is gone decodes nothing

    async def abort_all(self) -> None:
        """End every running request early."""
        for request_id in list(self._running):
            await self.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        self._keys.pop(session_id, None)

    # weights

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._connected()
        if self._staging is None:
            self._staging = await asyncio.to_thread(WeightStaging, self._staging_path, self._path, fp8=self._fp8)
        await asyncio.to_thread(self._staging.stage, version, tensors)

    async def commit_weights(self, version: int) -> None:
        staged = self._staging.staged if self._staging is not None else None
        if self._staging is None or staged is None or staged.version != version:
            raise EngineError(f"weights {version} were not prepared (staged: {staged.version if staged else None})")
        await self.load(staged)
        self._staging.commit(staged)

    async def discard_weights(self, version: int) -> None:
        if self._staging is not None:
            self._staging.discard(version)

    async def load(self, weights: StagedWeights) -> None:
        """Make ``weights`` current at the server. After an EngineError, or if cancelled, nothing is sampled any more
        until a later call succeeds."""
        async with self._updating:
            self._connected()
            self._labels.append(weights.label)
            for running in self._running.values():
                running.hold()
            try:
                await self._cut()
                await self._update(weights)
            except BaseException as error:
                self._refuse(f"the update to weights {weights.version} failed: {error or type(error).__name__}")
                raise
            self._version, self._current = weights.version, len(self._labels) - 1
            self._refuses = None

    async def _cut(self) -> None:
        """End the requests that go on after the update (``_cuts``), each with the experts that its tokens have now."""
        cut = [running for running in self._running.values() if self._cuts(running.request)]
        for running in cut:
            running.is_cut = True
            self._spawn(self._abort_until_gone(running.request.request_id, running))
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                for running in cut:
                    await running.ended.wait()
        except TimeoutError:
            raise ServerUnreachable(f"{self.url} did not end {len(cut)} requests in {CALL_TIMEOUT_S:g} s") from None

    async def _update(self, weights: StagedWeights) -> None:
        client, mode = self._connected(), self._config.pause
        body = {
            "model_path": str(self._path_of(weights)),
            "load_format": "safetensors",
            "weight_version": weights.label,
            "flush_cache": mode == "retract",
        }
        if mode != "none":
            await client.call("/pause_generation", {"mode": mode}, CALL_TIMEOUT_S)
        try:
            await client.call("/update_weights_from_disk", body, self._update_timeout_s)
            self._path_of(weights)  # the first node answers for all, but another one may have lost it meanwhile
            if mode == "none":
                # The last request may have been answered and not yet be gone, when a flush with the update would fail.
                wait_s = self._update_timeout_s
                await client.call(f"/flush_cache?timeout={wait_s:g}", {}, wait_s + CALL_TIMEOUT_S)
        finally:
            if mode != "none":
                await asyncio.shield(client.call("/continue_generation", {}, CALL_TIMEOUT_S))

    def _path_of(self, weights: StagedWeights) -> Path:
        """Where the server reads a version. EngineError if one of its nodes does not have it (any more)."""
        if weights.path is not None:
            return weights.path
        assert self._nodes is not None, "versions on nodes are for engines that have some"
        if (reason := self._nodes.lacking(weights.label)) is not None:
            raise EngineError(f"{self.url}: {reason}")
        return self._nodes.directory / weights.label

    # the end

    def _refuse(self, reason: str) -> None:
        """Nothing is sampled from now on; what runs ends with the reason."""
        self._refuses = reason
        for running in self._running.values():
            if running.reading is not None:
                running.reading.cancel()

    async def close(self) -> None:
        """Let go of the server, which lives on. Running requests end with EngineError."""
        if self._client is None or self._client.closed:
            self._refuses = "the engine was closed"
            return
        self._refuse("the engine was closed")
        await asyncio.sleep(0.01)  # those that wait for the requests tell the server to end them
        if self._background:
            await asyncio.wait(self._background, timeout=CALL_TIMEOUT_S)
        for task in self._background:
            task.cancel()
        await self._client.close()

    def _connected(self) -> ServerClient:
        if self._client is None or self._client.closed:
            raise EngineError(f"{self.url}: {self._refuses}")
        return self._client

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _clock(self) -> None:
        """Count the time in which a request runs."""
        now = time.monotonic()
        if self._busy_since is not None:
            self._totals["busy_seconds"] += now - self._busy_since
        self._busy_since = now if self._running else None

    def stats(self) -> dict[str, float]:
        """Totals. ``prefill_tokens`` are all input tokens, ``cached_tokens`` those of them that were not computed."""
        self._clock()
        return dict(self._totals)


class _Running:
    """One request: its tokens so far, and the labels that they may come from."""

    def __init__(
        self, request: GenerateRequest, labels: list[str], first: int, experts: ExpertRows | None = None
    ) -> None:
        """Tokens may come from ``labels[first:]``; the list grows with every update."""
        self.request, self._experts = request, experts
        self.is_cut = False
        self.ended = asyncio.Event()
        self.rid = uuid.uuid4().hex  # the server aborts by prefix: ids of one length are no prefix of each other
        self.reading: asyncio.Future[None] | None = None
        self.pieces = 0
        self.finished = False
        self._labels, self._first = labels, first
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._last: Piece | None = None
        self._held: int | None = None
        self._started = time.perf_counter()

    def hold(self) -> None:
        """New weights come: of the tokens that arrive from here on the version is known at the end only."""
        if self._held is None:
            self._held = len(self._ids)

    def take(self, piece: Piece) -> None:
        """The next message."""
        self.pieces += 1
        self._ids += piece.output_ids
        if piece.meta_info is not None:
            self._logprobs += [entry[0] for entry in piece.meta_info.output_token_logprobs]
            self.finished = piece.meta_info.finish_reason is not None
        self._last = piece

    def certain(self) -> GenerateResult:
        """What is known for sure of a request that was lost. Experts are told at the end only: without it, nothing."""
        if self.request.sampling.return_routed_experts:
            return nothing(self.request)
        count = len(self._ids) if self._held is None else self._held
        count = min(count, len(self._logprobs)) if self.request.sampling.return_logprobs else count
        logprobs = [value for value in self._logprobs[:count] if value is not None and math.isfinite(value)]
        asked = self.request.sampling.return_logprobs
        if asked and len(logprobs) < count:
            count, logprobs = 0, []
        spans = [(0, version_of_label(self._labels[self._first]))] if count else []
        return GenerateResult(self._ids[:count], logprobs if asked else None, spans, "abort")

    def result(self, url: str, *, is_split: bool) -> GenerateResult:
        """The whole answer, checked. EngineError if it is not one."""
        meta = self._last.meta_info if self._last is not None else None
        if meta is None or meta.finish_reason is None:
            raise RequestLost(f"{url}/generate: the stream ended before the request did", self.certain())
        end, sampling = meta.finish_reason, self.request.sampling
        if is_split and end.type == "abort" and (end.status_code or 0) >= 500:  # also where it was to be ended
            raise RequestLost(f"{url}/generate: its keys and values did not arrive: {end.message}", self.certain())
        reason = _REASONS.get(end.type)
        if reason is None or isinstance(end.matched, str) or (end.status_code or 0) >= 400:
            raise EngineError(f"{url}/generate: ended by {end.type}: {end.message or end.matched}")
        if reason == "stop" and self._ids[-1] not in sampling.stop_token_ids:
            raise EngineError(
                f"{url}/generate: token {self._ids[-1]} ended the request, which is none of its stop tokens"
            )
        if reason == "length" and len(self._ids) != sampling.max_new_tokens:
            raise EngineError(
                f"{url}/generate: {len(self._ids)} tokens, not max_new_tokens = {sampling.max_new_tokens}"
            )
        routed = self._routed(meta.routed_experts, url)
        if routed is None and sampling.return_routed_experts:
            return nothing(self.request)
        return GenerateResult(
            output_ids=self._ids,
            logprobs=self._finite(url) if sampling.return_logprobs else None,
            weight_versions=self._spans(meta.weight_versions, url),
            finish_reason=reason,
            metrics={
                "cached_tokens": float(meta.cached_tokens),
                "retractions": float(meta.num_retractions),
                "seconds": time.perf_counter() - self._started,
            },
            routed_experts=routed,
        )

    def _routed(self, data: bytes | None, url: str) -> np.ndarray | None:
        """The experts, where they were asked for. A request that is aborted while it waits at the server has none."""
        if not self.request.sampling.return_routed_experts:
            return None
        assert self._experts is not None and self._last is not None and self._last.meta_info is not None
        if data is None:
            end = self._last.meta_info.finish_reason
            if end is not None and end.type == "abort":
                return None
            raise EngineError(f"{url}/generate: no routed experts; does the server have enable_return_routed_experts?")
        return self._experts.read(data, self.request, len(self._ids), f"{url}/generate")

    def _finite(self, url: str) -> list[float]:
        logprobs = [value for value in self._logprobs if value is not None and math.isfinite(value)]
        if len(logprobs) != len(self._ids):
            raise EngineError(f"{url}/generate: {len(logprobs)} finite log-probs of {len(self._ids)} tokens")
        return logprobs

    def _spans(self, spans: list[Any], url: str) -> list[tuple[int, int]]:
        """Labels as versions, checked: they cover every token, and were current while the request ran."""
        known = self._labels[self._first :]
        strange = [span.version for span in spans if span.version not in known]
        if strange:
            raise RequestLost(f"{url}: tokens of weights {strange[0]!r}, which were not current", nothing(self.request))
        covered = [token for span in spans for token in (span.start, span.end)]
        expected = [0, *covered[1:-1], len(self._ids)] if covered else []
        if self._ids and (covered != expected or covered[1:-1:2] != covered[2:-1:2]):
            raise EngineError(f"{url}: version spans {covered} do not cover {len(self._ids)} tokens")
        return [(span.start, version_of_label(span.version)) for span in spans if span.end > span.start]
