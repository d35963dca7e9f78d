"""An engine whose weight versions can be waited for and copied to a second engine.

Invariants: ``wait_for`` returns only while the engine's version is at least the one asked for; the tensors that
``copy_to`` gives are exactly those of the current version.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from megasao.rollout.engines.base import Engine, EngineError, GenerateRequest, GenerateResult


class VersionedEngine(Engine):
    """Passes everything on to ``engine`` and remembers its newest weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._staged: dict[int, Mapping[str, Any]] = {}
        self._current: Mapping[str, Any] | None = None
        self._changed = asyncio.Condition()

    async def wait_for(self, version: int, timeout_s: float) -> None:
        """Until the engine runs ``version`` or newer; EngineError after ``timeout_s``."""
        if self.weight_version >= version:
            return
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.weight_version >= version)
        except TimeoutError:
            raise EngineError(
                f"weight version {version} did not arrive within {timeout_s:g} s; the engine has {self.weight_version}"
            ) from None

    async def copy_to(self, other: Engine) -> None:
        """Give ``other`` the current version; nothing to do where it has it already."""
        version = self.weight_version
        if other.weight_version == version:
            return
        if self._current is None:
            raise EngineError(f"the tensors of version {version} are not known here; {other.weight_version} stays")
        await other.prepare_weights(version, self._current)
        await other.commit_weights(version)

    @property
    def weight_version(self) -> int:
        """The version that the next sampled token will come from."""
        return self._engine.weight_version

    async def start(self) -> None:
        """Bring the engine up."""
        await self._engine.start()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn."""
        return await self._engine.generate(request)

    async def abort(self, request_id: str) -> None:
        """End a running request early."""
        await self._engine.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        """The episode is over."""
        await self._engine.end_session(session_id)

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Stage a version."""
        await self._engine.prepare_weights(version, tensors)
        self._staged[version] = dict(tensors)

    async def commit_weights(self, version: int) -> None:
        """Make a staged version current, and wake who waits for it."""
        await self._engine.commit_weights(version)
        self._current = self._staged.pop(version)
        async with self._changed:
            self._changed.notify_all()

    async def discard_weights(self, version: int) -> None:
        """Forget a staged version."""
        self._staged.pop(version, None)
        await self._engine.discard_weights(version)

    async def close(self) -> None:
        """Stop."""
        await self._engine.close()

    def stats(self) -> dict[str, float]:
        """Monotone totals of the engine."""
        return self._engine.stats()
