"""Prompts and decoding apart: both servers of a request have one version, which an answer says of one of them only."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_checkpoints import load_tensors, make_checkpoint, moe_config
from misbehaving_server import Misbehaving, piece, with_fleet

from megasao.rollout.engines.base import GenerateRequest, GenerateResult, SamplingParams
from megasao.rollout.fleet import Fleet

REQUEST = GenerateRequest("request", "session", [1, 2], SamplingParams(1.0, 4, seed=1))
SPLIT = {"prefill_servers": 1}


class Router(Misbehaving):
    """Says to every request what is left of four tokens, all of its own version; from an abort on, if not before."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    async def _abort(self, request: Any) -> Any:
        self.then = "end"
        return await super()._abort(request)

    async def _generate(self, request: Any) -> Any:
        known = len((await request.json())["input_ids"]) - 2
        self.asked.append(known)
        if self.then == "end":
            rest = [3, 4, 5, 6][known:]
            self.pieces = [piece(rest, finish="length", spans=[(self.label, 0, len(rest))])]
        return await super()._generate(request)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


async def load(fleet: Fleet, version: int, checkpoint: Path) -> None:
    await fleet.prepare_weights(version, load_tensors(checkpoint))
    await fleet.commit_weights(version)


@pytest.mark.parametrize("apart", [True, False])
def test_an_answer_is_none_if_the_other_server_was_restarted(checkpoint: Path, tmp_path: Path, apart: bool) -> None:
    """Nobody noticed, and it has the weights of its start. Without ``prefill_servers`` it has no part in the answer."""
    router, other = Router(), Misbehaving()

    async def body(fleet: Fleet) -> GenerateResult:
        await load(fleet, 1, checkpoint)
        other.label = "default"
        return await fleet.generate(REQUEST)

    options = SPLIT if apart else {}
    result = with_fleet(checkpoint, tmp_path, [router, other], 1, body, routed=True, **options)
    assert (result.output_ids, result.weight_versions) == ([3, 4, 5, 6], [(0, 1)])
    assert router.asked == ([0, 0] if apart else [0])
    assert (other.label == router.label) is apart, "it got the weights before it was used again"


def test_requests_end_before_an_update_and_go_on_after_it(checkpoint: Path, tmp_path: Path) -> None:
    """That is no loss: none is allowed here."""
    router = Router()

    async def body(fleet: Fleet) -> GenerateResult:
        await load(fleet, 1, checkpoint)
        router.pieces, router.then = [piece([3])], "abort"
        running = asyncio.create_task(fleet.generate(REQUEST))
        while fleet.stats()["generated_tokens"] < 1:
            await asyncio.sleep(0.001)
        await load(fleet, 2, checkpoint)
        return await running

    result = with_fleet(checkpoint, tmp_path, [router, Misbehaving()], 0, body, routed=True, **SPLIT)
    assert (result.output_ids, result.weight_versions) == ([3, 4, 5, 6], [(0, 1), (1, 2)])
    assert router.asked == [0, 1]


def test_nothing_is_asked_while_one_of_both_is_away(checkpoint: Path, tmp_path: Path) -> None:
    router, other = Router(), Misbehaving()

    async def body(fleet: Fleet) -> GenerateResult:
        await load(fleet, 1, checkpoint)
        other.update = {"success": False, "message": "not now"}
        await load(fleet, 2, checkpoint)
        assert fleet.usable == [], "the one that has them is not enough"
        running = asyncio.create_task(fleet.generate(REQUEST))
        await asyncio.sleep(0.3)
        assert not router.asked
        other.update = {"success": True}
        return await running

    result = with_fleet(checkpoint, tmp_path, [router, other], 0, body, routed=True, **SPLIT)
    assert (result.weight_versions, router.asked) == ([(0, 2)], [0])
