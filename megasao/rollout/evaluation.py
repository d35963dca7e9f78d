"""The second engine of a worker: its weights stay fixed during one evaluation.

Invariants: all episodes of one evaluation on one worker see one weight version, not older than the evaluation
asks for; the training engine goes on and is never held up.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megasao.rollout.engines.base import Engine
from megasao.rollout.versions import VersionedEngine


def evaluation_key(evaluation_id: str) -> str:
    """Modes of one evaluation (``step-000050/greedy``, ``step-000050/sampled``) share its weights."""
    return evaluation_id.partition("/")[0]


class EvaluationGate:
    """Admits the episodes of one evaluation at a time, and loads the weights at its beginning."""

    def __init__(self, source: VersionedEngine, engine: Engine, *, timeout_s: float) -> None:
        """``timeout_s`` bounds the wait for the evaluation's weight version."""
        self._source = source
        self._engine = engine
        self._timeout_s = timeout_s
        self._key: str | None = None
        self._active = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admit(self, evaluation_id: str, min_version: int) -> AsyncIterator[None]:
        """Hold the evaluation's weights for one episode. EngineError if its version does not arrive."""
        key = evaluation_key(evaluation_id)
        async with self._changed:
            # Episodes are bounded in time, so the one before ends; its leases are bounded by the controller.
            await self._changed.wait_for(lambda: self._active == 0 or self._fits(key, min_version))
            if not self._fits(key, min_version):
                await self._source.wait_for(min_version, self._timeout_s)
                await self._source.copy_to(self._engine)
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
