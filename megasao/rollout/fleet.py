"""Several SGLang servers as one engine: an episode stays on one server, and outlives it.

Invariants, asserted by the tests:
- an episode's requests go to one server while that server is usable, so that its prefix cache is used again; episodes
  of a lost server spread over the others, and those of the others stay where they are;
- a server that comes back, or is added, takes over episodes of one that holds far more than its share;
- a request that loses its server, or is ended there by somebody else, goes on from the tokens it has, elsewhere if need
  be, with the versions they came from; with a seed the tokens are those that it would have had under the same weights;
- a server is used only with the committed weights: one that missed an update, or was restarted, gets them first;
- where prompts and decoding are apart, both servers of a request have one version from its begin to its end;
- every wait is bounded: for an answer, for a usable server, for an update;
- a request that has lost its server ``retries`` + 1 times fails, and it waits longer before each of its tries.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megasao.rollout.engines.base import Engine, EngineError, GenerateRequest, GenerateResult
from megasao.rollout.engines.parts import ended, joined, nothing, rest_of
from megasao.rollout.engines.sglang import CALL_TIMEOUT_S, RequestLost, SGLangEngine
from megasao.rollout.engines.sglang_client import ServerUnreachable
from megasao.rollout.engines.sglang_weights import WeightStaging

logger = logging.getLogger(__name__)

OVERLOAD = 1.25
"""A new episode goes elsewhere if its server would hold this many times its share of the episodes."""
FLIGHT = 1.5
"""Between two turns an episode leaves a server that holds more than this many times its share, and loses its cache."""

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_DOUBLINGS = 16


@dataclass
class Replica:
    """One server. ``usable``: it is up, has the committed weights, and is not being drained."""

    engine: SGLangEngine
    usable: bool = False
    draining: bool = False
    sessions: set[str] = field(default_factory=set)
    recovery: "asyncio.Task[None] | None" = None

    @property
    def url(self) -> str:
        """The server's address, which names the replica."""
        return self.engine.url


class Fleet(Engine):
    """Routes requests to ``engines``, which serve the checkpoint at ``path``; ``staging`` is a directory for weights.

    ``retries``: how often one request may lose its server. ``patience_s`` bounds the wait for a usable server. With
    ``fp8`` versions have their products in blocks of FP8.
    """

    def __init__(
        self,
        engines: Sequence[SGLangEngine],
        path: Path,
        *,
        staging: Path,
        retries: int,
        patience_s: float,
        fp8: bool = False,
    ) -> None:
        self._replicas: dict[str, Replica] = {}
        self._busy_before = 0.0
        for engine in engines:
            self._take_in(engine)
        self._staging_path, self._path, self._fp8 = staging, path, fp8
        self._staging: WeightStaging | None = None
        self._retries, self._patience_s = retries, patience_s
        self._placed: dict[str, Replica] = {}
        self._aborted: set[str] = set()
        self._running: set[str] = set()
        self._asked: set[str] = set()
        self._cut: set[str] = set()
        self._changed = asyncio.Condition()
        self._updating = asyncio.Lock()
        self._closed = False
        self._gone: dict[str, float] = {}
        self._lost = self._continued = 0

    @property
    def weight_version(self) -> int:
        if self._staging is not None and self._staging.committed is not None:
            return self._staging.committed.version
        return max((replica.engine.weight_version for replica in self._replicas.values()), default=0)

    @property
    def urls(self) -> list[str]:
        """Addresses of all servers, usable or not."""
        return list(self._replicas)

    @property
    def usable(self) -> list[str]:
        """Addresses of the servers that requests go to."""
        return [replica.url for replica in self._usable()]

    async def start(self) -> None:
        """Wait for every server. EngineError names one that does not come up in its time."""
        self._staging = await asyncio.to_thread(WeightStaging, self._staging_path, self._path, fp8=self._fp8)
        await asyncio.gather(*(replica.engine.start() for replica in self._replicas.values()))
        for replica in self._replicas.values():
            replica.usable = True

    # requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.request_id in self._running:
            raise ValueError(f"request {request.request_id!r} is already running; request ids must be unique")
        self._running.add(request.request_id)
        try:
            return await self._generate(request)
        finally:
            for names in (self._running, self._aborted, self._cut):
                names.discard(request.request_id)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        so_far = nothing(request)
        losses: list[str] = []
        while len(losses) <= self._retries:
            if len(losses) > 1 or (losses and self._is_routed()):  # the first time another server goes on at once
                await back_off(len(losses) - 1)
            replica = await self._place(request.session_id)
            if request.request_id in self._aborted:
                return so_far
            try:
                result = await self._ask(replica, rest_of(request, so_far))
            except RequestLost as lost:
                if self._closed:
                    raise
                so_far = joined(so_far, lost.partial)
                if request.request_id in self._aborted:
                    return so_far
                # Behind a router it may have been any of them: each is used again once it is seen to be right.
                suspects = list(self._replicas.values()) if replica.engine.router else [replica]
                for suspect in suspects if request.request_id not in self._cut else []:
                    self._lose(suspect, str(lost))
            else:
                so_far = joined(so_far, result)
                if result.finish_reason != "abort" or request.request_id in self._aborted:
                    return so_far
            if reason := ended(request, so_far):
                return replace(so_far, finish_reason=reason)
            if request.request_id in self._cut:
                self._cut.discard(request.request_id)
                continue
            losses.append(replica.url)
            self._continued += 1
        raise EngineError(f"request {request.request_id!r} lost its server {len(losses)} times: {', '.join(losses)}")

    async def _ask(self, replica: Replica, request: GenerateRequest) -> GenerateResult:
        """Send a request. Where prompts and decoding are apart an answer says what the server has that decodes, and the
        other one must have the same: so there is no update meanwhile, and no server that goes away and comes back.
        """
        if not self._is_split():
            return await replica.engine.generate(request)
        async with self._updating:
            self._asked.add(request.request_id)
        lost = self._lost
        try:
            if not self._usable():
                raise RequestLost("a server of the request is away", nothing(request))
            result = await replica.engine.generate(request)
            if self._lost != lost:
                raise RequestLost("a server was away, which may have had a part of it", nothing(request))
            return result
        finally:
            self._asked.discard(request.request_id)
            async with self._changed:
                self._changed.notify_all()

    async def _end_requests(self) -> None:
        """All that run end with what they have, to go on after the update. EngineError if one does not end in time."""
        bound_s = 2 * CALL_TIMEOUT_S  # to be ended, and then to ask every server for its version
        self._cut |= self._asked
        await asyncio.gather(*(replica.engine.abort_all() for replica in self._replicas.values()))
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: not self._asked), bound_s)
            except TimeoutError:
                raise EngineError(f"{len(self._asked)} requests did not end in {bound_s:g} s") from None

    async def _place(self, session_id: str) -> Replica:
        """The episode's server; another one if that is not usable. EngineError if there is none in time."""
        while not self._closed and not self._usable():  # one may go again before this task has its turn
            await self._until_usable()
        if self._closed:
            raise EngineError("the fleet was closed")
        placed = self._placed.get(session_id)
        if placed is None or not placed.usable or placed.draining or self._is_overloaded(placed):
            self._forget(session_id)
            placed = self._choose(session_id)
            placed.sessions.add(session_id)
            self._placed[session_id] = placed
        return placed

    async def _until_usable(self) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._closed or self._usable()), self._patience_s)
            except TimeoutError:
                servers = ", ".join(self._replicas) or "an empty fleet"
                raise EngineError(f"no server of {servers} was usable for {self._patience_s:g} s") from None

    def _is_overloaded(self, placed: Replica) -> bool:
        usable = self._usable()
        share = sum(len(replica.sessions) for replica in usable) / len(usable)
        return len(placed.sessions) > math.ceil(FLIGHT * share)

    def _is_routed(self) -> bool:
        return any(replica.engine.router is not None for replica in self._replicas.values())

    def _is_split(self) -> bool:
        return any(replica.engine.is_split for replica in self._replicas.values())

    def _usable(self) -> list[Replica]:
        usable = [replica for replica in self._replicas.values() if replica.usable and not replica.draining]
        return [] if self._is_split() and len(usable) < len(self._replicas) else usable

    def _choose(self, session_id: str) -> Replica:
        """The first usable server in the order of this episode, but one that holds too many."""
        usable = self._usable()
        share = (sum(len(replica.sessions) for replica in usable) + 1) / len(usable)
        order = sorted(usable, key=lambda replica: preference(session_id, replica.url), reverse=True)
        return next(replica for replica in order if len(replica.sessions) < math.ceil(OVERLOAD * share))

    def _forget(self, session_id: str) -> None:
        placed = self._placed.pop(session_id, None)
        if placed is not None:
            placed.sessions.discard(session_id)

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._aborted.add(request_id)
            await asyncio.gather(*(replica.engine.abort(request_id) for replica in self._replicas.values()))

    async def end_session(self, session_id: str) -> None:
        placed = self._placed.get(session_id)
        self._forget(session_id)
        if placed is not None:
            await placed.engine.end_session(session_id)

    # servers that go and come

    def _lose(self, replica: Replica, reason: str) -> None:
        """Use the server no more until it is back with the right weights."""
        replica.usable = False
        if self._replicas.get(replica.url) is not replica:
            return  # it was removed
        if replica.recovery is None or replica.recovery.done():
            logger.warning("%s is not used until it is back: %s", replica.url, reason)
            self._lost += 1
            replica.recovery = asyncio.create_task(self._recover(replica), name=f"recover {replica.url}")

    async def _recover(self, replica: Replica) -> None:
        for attempt in itertools.count():
            try:
                await self._join(replica)
                if replica.usable:  # a request that it had before may have lost it once more meanwhile
                    logger.info("%s is used again", replica.url)
                    return
            except EngineError as error:
                logger.warning("%s is not back: %s", replica.url, error)
            await back_off(attempt)

    async def _join(self, replica: Replica) -> None:
        """Make a server that is up usable. EngineError if it is not up, or does not take the weights."""
        await replica.engine.reconnect()
        async with self._updating:  # no version may be committed between the load and the use
            committed = self._staging.committed if self._staging is not None else None
            if committed is not None and replica.engine.label != committed.label:
                await replica.engine.load(committed)
            replica.usable = True
        async with self._changed:
            self._changed.notify_all()

    async def add(self, engine: SGLangEngine) -> None:
        """One more server, from the next episode on. ValueError if it is here; EngineError, and it is not here, if it
        does not come up or take the weights."""
        if engine.url in self._replicas:
            raise ValueError(f"{engine.url} is in the fleet already")
        try:
            await engine.start()
            await self._join(self._take_in(engine))
        except BaseException:
            with self._same_busy_seconds():
                self._replicas.pop(engine.url, None)
            await engine.close()
            raise

    def _take_in(self, engine: SGLangEngine) -> Replica:
        if engine.router is not None:
            engine.siblings = lambda: [replica.engine for replica in self._replicas.values()]
        with self._same_busy_seconds():
            replica = self._replicas[engine.url] = Replica(engine)
        return replica

    async def drain(self, url: str) -> None:
        """Send nothing more to a server; what it runs goes on elsewhere. ValueError if it is not in the fleet."""
        replica = self._find(url)
        replica.draining = True
        await replica.engine.abort_all()

    async def remove(self, url: str) -> None:
        """Drain a server and let go of it."""
        replica = self._find(url)
        await self.drain(url)
        with self._same_busy_seconds():
            del self._replicas[url]
        for name, value in replica.engine.stats().items():
            self._gone[name] = self._gone.get(name, 0.0) + value
        await self._let_go(replica)

    def _find(self, url: str) -> Replica:
        if url not in self._replicas:
            raise ValueError(f"{url} is not in the fleet of {', '.join(self._replicas)}")
        return self._replicas[url]

    # weights

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        await asyncio.to_thread(self._started().stage, version, tensors)

    async def commit_weights(self, version: int) -> None:
        """Current on every usable server; one that fails is used again only once it has these weights. EngineError, and
        the weights before stay, if no server takes them though one is up."""
        staging = self._started()
        staged = staging.staged
        if staged is None or staged.version != version:
            raise EngineError(f"weights {version} were not prepared (staged: {staged.version if staged else None})")
        async with self._updating:
            if self._is_split():
                await self._end_requests()
            usable = [replica for replica in self._replicas.values() if replica.usable]
            errors = await _errors(replica.engine.load(staged) for replica in usable)
            for replica, error in zip(usable, errors, strict=True):
                if error is not None:
                    self._lose(replica, str(error))
            refusals = [error for error in errors if error is not None and not isinstance(error, ServerUnreachable)]
            if refusals and None not in errors:
                raise EngineError(f"no server took weights {version}: {refusals[0]}")
            staging.commit(staged)

    async def discard_weights(self, version: int) -> None:
        self._started().discard(version)

    def _started(self) -> WeightStaging:
        if self._closed or self._staging is None:
            raise EngineError("the fleet was closed" if self._closed else "the fleet was not started")
        return self._staging

    # the end

    async def close(self) -> None:
        """Let go of every server."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()
        await asyncio.gather(*(self._let_go(replica) for replica in self._replicas.values()))

    async def _let_go(self, replica: Replica) -> None:
        if replica.recovery is not None:
            replica.recovery.cancel()
            await asyncio.gather(replica.recovery, return_exceptions=True)
        await replica.engine.close()

    def stats(self) -> dict[str, float]:
        """Totals over all servers that were ever in the fleet; ``busy_seconds`` grows as the mean of those that are."""
        totals = dict(self._gone)
        for replica in self._replicas.values():
            for name, value in replica.engine.stats().items():
                totals[name] = totals.get(name, 0.0) + value
        totals["busy_seconds"] = self._busy_before + self._mean_busy_seconds()
        return {**totals, "lost_servers": float(self._lost), "continued_requests": float(self._continued)}

    def _mean_busy_seconds(self) -> float:
        busy = [replica.engine.stats()["busy_seconds"] for replica in self._replicas.values()]
        return sum(busy) / max(1, len(busy))

    @contextmanager
    def _same_busy_seconds(self) -> Iterator[None]:
        """A server that comes or goes inside changes the mean, and not the total."""
        before = self._mean_busy_seconds()
        yield
        self._busy_before += before - self._mean_busy_seconds()


async def back_off(attempt: int) -> None:
    """Wait before a request, or a server, is tried again: twice as long as the last time, and never long."""
    await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, _DOUBLINGS)))


def preference(session_id: str, url: str) -> bytes:
    """How much an episode wants a server: the highest wins, and a server that goes moves only its own episodes."""
    return blake2b(f"{session_id}\n{url}".encode(), digest_size=8).digest()


async def _errors(work: Any) -> list[EngineError | None]:
    """The EngineError of each awaitable, or None; any other error is raised once all have ended."""
    calls: list[Awaitable[None]] = list(work)
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    return [result if isinstance(result, EngineError) else None for result in results]
