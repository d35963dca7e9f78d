"""Servers that are named to a worker while it runs, played by a small HTTP server that may refuse the weights."""

import asyncio
from pathlib import Path

from aiohttp import web
from engine_checkpoints import MAX_TOTAL, load_tensors, make_checkpoint, moe_config

from megasao.config.sglang import SGLangConfig
from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.fleet import Fleet
from megasao.rollout.members import FleetMembers


class Server:
    """Says that it is up, and takes an update only if ``takes_weights``."""

    def __init__(self) -> None:
        self.takes_weights = False
        self.refused = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/model_info":
            return web.json_response({"weight_version": "default"})
        if request.path == "/update_weights_from_disk" and not self.takes_weights:
            self.refused += 1
            return web.Response(status=500, text="no room for them")
        return web.json_response({})

    async def start(self) -> str:
        """Its address; it ends with the event loop."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        return f"http://{host}:{port}"


def test_a_server_that_cannot_be_added_is_tried_again_when_it_is_named_again(tmp_path: Path) -> None:
    """It comes up and does not take the weights: nobody would ever ask it again if it stayed in the fleet so."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", moe_config())
    made: list[SGLangEngine] = []

    def make(url: str) -> SGLangEngine:
        made.append(
            SGLangEngine(
                url,
                checkpoint,
                SGLangConfig(),
                staging=tmp_path / "staging",
                max_total_tokens=MAX_TOTAL,
                seed=1,
                start_timeout_s=60.0,
                update_timeout_s=60.0,
            )
        )
        return made[-1]

    async def body() -> None:
        server = Server()
        url = await server.start()
        fleet = Fleet([], checkpoint, staging=tmp_path / "fleet", retries=0, patience_s=1.0)
        await fleet.start()
        await fleet.prepare_weights(1, load_tensors(checkpoint))
        await fleet.commit_weights(1)
        members = FleetMembers(fleet, make)

        async def told() -> None:
            members.told([url], [])
            async with asyncio.timeout(60):
                while members._changing:
                    await asyncio.sleep(0.01)

        await told()
        assert server.refused == 1 and (fleet.urls, fleet.usable) == ([], [])
        assert made[0]._client is not None and made[0]._client.closed, "no connection is left behind"
        server.takes_weights = True
        await told()
        assert (fleet.urls, fleet.usable) == ([url], [url]) and len(made) == 2
        await told()
        assert len(made) == 2, "it is here"
        await members.close()
        await fleet.close()

    asyncio.run(body())
