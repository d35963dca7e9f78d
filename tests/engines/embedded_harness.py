"""The embedded engine under the contract tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from contract import EngineHarness
from engine_checkpoints import MAX_TOTAL

from megasao.config.rollout import EmbeddedEngineConfig
from megasao.rollout.engines.base import Engine
from megasao.rollout.engines.embedded import EmbeddedEngine


class EmbeddedHarness(EngineHarness):
    """One engine and one event loop for many tests."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__()
        self.path = path
        self.config = EmbeddedEngineConfig(**{"slots": 48, **options})
        self.kv_after_update = self.config.kv_after_update
        self._runner = asyncio.Runner()
        self._engine = self.make()
        self._runner.run(self._engine.start())

    def make(self, **options: Any) -> EmbeddedEngine:
        return EmbeddedEngine(self.path, self.config, max_total_tokens=MAX_TOTAL, seed=1, **options)

    def run(self, body: Callable[[Engine], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(body(self._engine), 120)

        return self._runner.run(bounded())

    @asynccontextmanager
    async def fresh(self, **options: Any) -> AsyncIterator[EmbeddedEngine]:
        engine = self.make(**options)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()
