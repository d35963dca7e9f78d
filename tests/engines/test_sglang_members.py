"""Servers that are named to a worker while it runs."""

import asyncio
from pathlib import Path

from engine_checkpoints import load_tensors, make_checkpoint, moe_config
from misbehaving_server import Misbehaving, make_engine

from megasao.rollout.engines.sglang import SGLangEngine
from megasao.rollout.fleet import Fleet
from megasao.rollout.members import FleetMembers


def test_a_server_that_cannot_be_added_is_tried_again_when_it_is_named_again(tmp_path: Path) -> None:
    """It comes up and does not take the weights: nobody would ever ask it again if it stayed in the fleet so."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", moe_config())
    made: list[SGLangEngine] = []

    def make(url: str) -> SGLangEngine:
        made.append(make_engine(url, checkpoint, tmp_path))
        return made[-1]

    async def body(server: Misbehaving, url: str) -> None:
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

        server.update = {"success": False, "message": "no room for them"}
        await told()
        assert "/update_weights_from_disk" in server.calls and (fleet.urls, fleet.usable) == ([], [])
        assert made[0]._client is not None and made[0]._client.closed, "no connection is left behind"
        server.update = {"success": True}
        await told()
        assert (fleet.urls, fleet.usable) == ([url], [url]) and len(made) == 2
        await told()
        assert len(made) == 2, "it is here"
        await members.close()
        await fleet.close()

    async def whole() -> None:
        server = Misbehaving()
        async with server.running() as url:
            await body(server, url)

    asyncio.run(whole())
