"""The second engine of a worker: its weights stay fixed during one evaluation.

Invariants: all episodes of one evaluation on one worker see one weight version, not older than the evaluation
asks for; the training engine goes on and is never held up.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from megasao.rollout.engines.base import Engine, EngineError


class WeightSource(Protocol):
    """What a worker must know of its weights; ``WeightReceiver`` is one."""

    quarantined: str | None
    """Why the engine is not at the trainer's version though it should be."""

    @property
    def version(self) -> int | None:
        """The version that the training engine runs; None before the first one has arrived."""

    def latest(self) -> tuple[int, Mapping[str, Any]] | None:
        """That version and its tensors."""

    async def wait_for_version(self, version: int, timeout: float) -> int:
        """Until ``version`` or a newer one is there. TimeoutError."""


class WeightsLate(EngineError):
    """The weight version that a lease asks for did not arrive in time."""


async def wait_for_weights(source: WeightSource, version: int, timeout_s: float) -> None:
    """Until the training engine runs ``version`` or newer; WeightsLate after ``timeout_s``."""
    try:
        await source.wait_for_version(version, timeout_s)
    except TimeoutError as error:
        raise WeightsLate(str(error)) from None


def evaluation_key(evaluation_id: str) -> str:
    """Modes of one evaluation (``step-000050/greedy``, ``step-000050/sampled``) share its weights."""
    return evaluation_id.partition("/")[0]


class EvaluationGate:
    """Admits the episodes of one evaluation at a time, and loads the weights at its beginning."""

    def __init__(self, source: WeightSource, engine: Engine, *, timeout_s: float) -> None:
        """``timeout_s`` bounds the wait for the evaluation's weight version."""
        self._source = source
        self._engine = engine
        self._timeout_s = timeout_s
        self._key: str | None = None
        self._active = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admit(self, evaluation_id: str, min_version: int) -> AsyncIterator[None]:
        """Hold the evaluation's weights for one episode. WeightsLate if its version does not arrive."""
        key = evaluation_key(evaluation_id)
        async with self._changed:
            # Episodes are bounded in time, so those of the evaluation before this one end.
            await self._changed.wait_for(lambda: self._active == 0 or self._fits(key, min_version))
            if not self._fits(key, min_version):
                await self._load(min_version)
                self._key = key
            self._active += 1
        try:
            yield
        finally:
            async with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def _fits(self, key: str, min_version: int) -> bool:
        return self._key == key and self._engine.weight_version >= min_version

    async def _load(self, min_version: int) -> None:
        """The newest weights into the evaluation engine. Nothing runs on it now."""
        await wait_for_weights(self._source, min_version, self._timeout_s)
        self._key = None
        await self._engine.commit_weights(await self._prepare())

    async def _prepare(self) -> int:
        """Stage the newest version; the next one if it was replaced, and its directory removed, meanwhile."""
        while True:
            latest = self._source.latest()
            assert latest is not None, "a version was waited for"
            version, tensors = latest
            try:
                await self._engine.prepare_weights(version, tensors)
            except (OSError, ValueError):
                newest = self._source.latest()
                if newest is None or newest[1] is tensors:
                    raise
            else:
                return version
