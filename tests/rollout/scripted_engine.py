"""An engine whose turns are written by the test. It is a real Engine: tokens, versions and log-probs are its word."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megasao.rollout.engines.base import Engine, EngineError, GenerateRequest, GenerateResult

Script = Callable[[GenerateRequest], GenerateResult | Exception | Awaitable[GenerateResult] | None]
"""What to answer; None never answers."""


class ScriptedEngine(Engine):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.version = 0
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []
        self.staged: dict[int, dict[str, Any]] = {}
        self.tensors: dict[str, Any] = {}

    @property
    def weight_version(self) -> int:
        return self.version

    async def start(self) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        await asyncio.sleep(0)
        answer = self.script(request)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Awaitable):
            answer = await answer
        assert isinstance(answer, GenerateResult)
        return answer

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)

    async def prepare_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.staged[version] = dict(tensors)

    async def commit_weights(self, version: int) -> None:
        if version not in self.staged:
            raise EngineError(f"{version} was not staged")
        self.tensors = self.staged.pop(version)
        self.version = version

    async def discard_weights(self, version: int) -> None:
        self.staged.pop(version, None)

    async def close(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {"generated_tokens": float(len(self.requests)), "busy_seconds": 0.0}
