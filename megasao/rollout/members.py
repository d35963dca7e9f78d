"""Keeps a worker's fleet at the servers that the controller names, while episodes run.

Invariants, asserted by the tests:
- a server that is up is used from the next episode on, with the committed weights;
- one that is to leave gets nothing more, what it runs goes on elsewhere, and it is said to be used until then;
- a server that cannot be added is tried again when it is named again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from megasao.rollout.engines.base import EngineError
from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.fleet import Fleet

logger = logging.getLogger(__name__)


class FleetMembers:
    """Adds to ``fleet``, and removes from it; ``make_engine`` makes the engine for an address."""

    def __init__(self, fleet: Fleet, make_engine: Callable[[str], SGLangEngine]) -> None:
        self._fleet, self._make_engine = fleet, make_engine
        self._changing: dict[str, asyncio.Task[None]] = {}

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers in the fleet."""
        return self._fleet.urls

    def told(self, servers: list[str], leaving: list[str]) -> None:
        """What the controller says now; the changes are made in the background."""
        here = set(self._fleet.urls)
        for url in servers:
            if url not in here:
                self._begin(url, self._add)
        for url in leaving:
            if url in here:
                self._begin(url, self._remove)

    def _begin(self, url: str, change: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        if url not in self._changing:
            task = self._changing[url] = asyncio.create_task(change(url), name=f"{change.__name__} {url}")
            task.add_done_callback(lambda _: self._changing.pop(url))

    async def _add(self, url: str) -> None:
        try:
            await self._fleet.add(self._make_engine(url))
        except EngineError as error:
            logger.warning("%s was not added: %s", url, error)
        else:
            logger.info("%s was added", url)

    async def _remove(self, url: str) -> None:
        await self._fleet.remove(url)
        logger.info("%s was drained and let go", url)

    async def close(self) -> None:
        """Stop changing the fleet."""
        tasks = list(self._changing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
