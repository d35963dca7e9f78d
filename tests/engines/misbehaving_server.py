"""A small server with SGLang's HTTP that misbehaves as told, for faults that a real one cannot be made to show."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from sglang_server import sglang_config

from megasao.launch.ports import free_ports
from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.fleet import Fleet

LONG_S = 120.0
"""Of waits that are not to end by themselves."""
SHORT_S = 2.0
"""Of those that are, and still long for whatever must be done before on a slow machine."""
FIRST_LABEL = "default"


def piece(
    ids: list[int], *, finish: str | None = None, spans: Any = None, logprob: float | None = -1.0
) -> dict[str, Any]:
    """One message of the stream; ``spans`` of the last one cover its four tokens, unless given."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": finish} if finish else None,
        "prompt_tokens": 2,
        "output_token_logprobs": [[logprob, token, None] for token in ids],
    }
    if finish:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans or [(FIRST_LABEL, 0, 4)]]
    return {"output_ids": ids, "meta_info": meta}


class Misbehaving:
    """Streams ``pieces``, then ``then``: end, drop the connection, say nothing more, or end when it is asked to."""

    def __init__(self) -> None:
        self.pieces: list[dict[str, Any]] = [piece([3, 4]), piece([5, 6], finish="length")]
        self.then = "end"
        self.update: dict[str, Any] | None = {"success": True}
        self.calls: list[str] = []
        self.label = FIRST_LABEL
        self._aborted = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/health_generate", self._ok)
        app.router.add_get("/model_info", self._info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/abort_request", self._abort)
        for path in ("/pause_generation", "/continue_generation"):
            app.router.add_post(path, self._ok)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()

    async def _ok(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborted.set()
        return await self._ok(request)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _update(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        if self.update is None:
            await asyncio.sleep(600)
        assert self.update is not None
        if self.update["success"]:
            self.label = (await request.json())["weight_version"]
        return web.json_response(self.update, status=200 if self.update["success"] else 400)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for message in self.pieces:
            await response.write(b"data: " + web.json_response(message).body + b"\n\n")  # type: ignore[operator]
        if self.then == "abort":
            spans = [(self.label, 0, sum(len(message["output_ids"]) for message in self.pieces))]
            await self._aborted.wait()
            await response.write(b"data: " + web.json_response(piece([], finish="abort", spans=spans)).body + b"\n\n")
            return response
        if self.then == "silence":
            await asyncio.sleep(600)
        if self.then == "drop":
            assert request.transport is not None
            request.transport.abort()
        return response


def make_engine(
    url: str,
    checkpoint: Path,
    directory: Path,
    *,
    silence_timeout_s: float = LONG_S,
    start_timeout_s: float = LONG_S,
    update_timeout_s: float = LONG_S,
    **options: Any,
) -> SGLangEngine:
    return SGLangEngine(
        url,
        checkpoint,
        sglang_config(silence_timeout_s=silence_timeout_s, **{"stream_interval": 1, **options}),
        staging=directory / "weights",
        max_total_tokens=64,
        seed=0,
        start_timeout_s=start_timeout_s,
        update_timeout_s=update_timeout_s,
    )


def with_fleet(
    checkpoint: Path,
    directory: Path,
    servers: Sequence[Misbehaving],
    retries: int,
    body: Callable[[Fleet], Awaitable[Any]],
    *,
    routed: bool = False,
    **options: Any,
) -> Any:
    """What ``body`` gives with a fleet of these; ``routed``: the first one is the router too."""

    async def whole() -> Any:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(server.running()) for server in servers]
            engines = [
                make_engine(url, checkpoint, directory / str(number), **options) for number, url in enumerate(urls)
            ]
            for engine in engines:
                engine.router = urls[0] if routed else None
            fleet = Fleet(engines, checkpoint, staging=directory / "fleet", retries=retries, patience_s=300.0)
            await fleet.start()
            try:
                return await asyncio.wait_for(body(fleet), 300)
            finally:
                await fleet.close()

    return asyncio.run(whole())
