"""SGLang under the contract tests: one server, and one engine beside others that tests break."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from contract import EngineHarness
from engine_checkpoints import MAX_TOTAL
from sglang_server import sglang_config

from megasao.rollout.engines.base import Engine
from megasao.rollout.engines.sglang import SGLangEngine


class SGLangHarness(EngineHarness):
    """Engines on the server at ``url``."""

    def __init__(self, path: Path, url: str, directory: Path, **options: Any) -> None:
        super().__init__()
        self.path, self.url = path, url
        self.config = sglang_config(**options)
        self.kv_after_update = "keep" if self.config.pause == "in_place" else "recompute"
        self._directory, self._names = directory, itertools.count()
        self._runner = asyncio.Runner()
        self._engine = self.make()
        self._runner.run(self._engine.start())

    def make(self) -> SGLangEngine:
        return SGLangEngine(
            self.url,
            self.path,
            self.config,
            staging=self._directory / f"weights-{next(self._names)}",
            max_total_tokens=MAX_TOTAL,
            seed=1,
            start_timeout_s=240.0,
            update_timeout_s=30.0,
        )

    def run(self, body: Callable[[Engine], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(body(self._engine), 120)

        return self._runner.run(bounded())

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[SGLangEngine]:
        engine = self.make()
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()
