"""Faults that a real server cannot be made to show, by a small server that speaks the same HTTP and misbehaves."""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from engine_checkpoints import load_tensors, make_checkpoint, moe_config
from misbehaving_server import FIRST_LABEL, LONG_S, SHORT_S, Misbehaving, make_engine, piece

from megasao.launch.ports import free_ports
from megasao.rollout.engines.base import EngineError, GenerateRequest, SamplingParams
from megasao.rollout.engines.sglang import RequestLost, SGLangEngine
from megasao.rollout.engines.sglang_client import ServerUnreachable

REQUEST = GenerateRequest("request", "session", [1, 2], SamplingParams(1.0, 4, stop_token_ids=(9,), seed=1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


def run(
    checkpoint: Path,
    directory: Path,
    server: Misbehaving,
    body: Callable[[SGLangEngine], Awaitable[Any]],
    **options: Any,
) -> Any:
    async def whole() -> Any:
        async with server.running() as url:
            engine = make_engine(url, checkpoint, directory, **options)
            await engine.start()
            try:
                return await asyncio.wait_for(body(engine), 200)
            finally:
                await engine.close()

    return asyncio.run(whole())


async def generate(engine: SGLangEngine) -> Any:
    return await engine.generate(REQUEST)


def test_the_small_server_can_also_behave(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, tmp_path, Misbehaving(), generate)
    assert (result.output_ids, result.weight_versions, result.finish_reason) == ([3, 4, 5, 6], [(0, 0)], "length")


@pytest.mark.parametrize("then", ["silence", "drop", "end"])
def test_a_cut_stream_keeps_what_arrived(checkpoint: Path, tmp_path: Path, then: str) -> None:
    server = Misbehaving()
    server.pieces, server.then = [piece([3, 4]), piece([5])], then
    with pytest.raises(RequestLost) as caught:
        run(checkpoint, tmp_path, server, generate, silence_timeout_s=SHORT_S)
    partial = caught.value.partial
    assert (partial.output_ids, partial.logprobs, partial.weight_versions) == ([3, 4, 5], [-1.0] * 3, [(0, 0)])


BAD_ANSWERS = {
    "finite log-probs": [piece([3, 4], logprob=None), piece([5, 6], finish="length")],
    "do not cover": [piece([3, 4]), piece([5, 6], finish="length", spans=[(FIRST_LABEL, 0, 3)])],
    "not cover 4": [piece([3, 4]), piece([5, 6], finish="length", spans=[(FIRST_LABEL, 0, 1), (FIRST_LABEL, 2, 4)])],
    "none of its stop tokens": [piece([3, 4]), piece([5, 6], finish="stop")],
    "not max_new_tokens = 4": [piece([3, 4]), piece([5], finish="length", spans=[(FIRST_LABEL, 0, 3)])],
    "out of memory": [piece([3]), {"error": {"message": "out of memory"}}],
    "not understood": [piece([3]), {"output_ids": "three"}],
}


@pytest.mark.parametrize("reason", BAD_ANSWERS)
def test_a_wrong_answer_is_no_sample(checkpoint: Path, tmp_path: Path, reason: str) -> None:
    server = Misbehaving()
    server.pieces = BAD_ANSWERS[reason]
    with pytest.raises(EngineError, match=reason):
        run(checkpoint, tmp_path, server, generate)


WITH_EXPERTS = replace(REQUEST, sampling=replace(REQUEST.sampling, return_routed_experts=True))


def whole_answer(experts: np.ndarray | None) -> list[dict[str, Any]]:
    """Five tokens went through two layers, with two experts each; int32, as a server says it."""
    last = piece([5, 6], finish="length")
    if experts is not None:
        last["meta_info"]["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    return [piece([3, 4]), last]


def test_experts_of_exactly_the_tokens_asked_for_are_a_sample(checkpoint: Path, tmp_path: Path) -> None:
    server, experts = Misbehaving(), np.arange(20).reshape(5, 2, 2) % 8
    server.pieces = whole_answer(experts)

    async def body(engine: SGLangEngine) -> Any:
        return await engine.generate(WITH_EXPERTS)

    result = run(checkpoint, tmp_path, server, body)
    assert result.routed_experts.dtype == np.uint8 and (result.routed_experts == experts).all()


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (None, "does the server have enable_return_routed_experts"),
        (np.zeros((4, 2, 2)), "64 bytes of routed experts, not 80"),
        (np.zeros((6, 2, 2)), "96 bytes of routed experts, not 80"),
        (np.full((5, 2, 2), 8), "routed experts 8..8, not 0..7"),
        (np.full((5, 2, 2), -1), "routed experts -1..-1, not 0..7"),
    ],
)
def test_other_experts_are_none(checkpoint: Path, tmp_path: Path, experts: np.ndarray | None, reason: str) -> None:
    server = Misbehaving()
    server.pieces = whole_answer(experts)

    async def body(engine: SGLangEngine) -> Any:
        return await engine.generate(WITH_EXPERTS)

    with pytest.raises(EngineError, match=re.escape(reason)):
        run(checkpoint, tmp_path, server, body)


def test_tokens_whose_experts_died_with_their_server_are_given_up(checkpoint: Path, tmp_path: Path) -> None:
    server = Misbehaving()
    server.pieces, server.then = [piece([3, 4])], "drop"

    async def body(engine: SGLangEngine) -> Any:
        return await engine.generate(WITH_EXPERTS)

    with pytest.raises(RequestLost) as caught:
        run(checkpoint, tmp_path, server, body)
    assert caught.value.partial.output_ids == []


def test_a_line_may_be_longer_than_any_buffer(checkpoint: Path, tmp_path: Path) -> None:
    """As that of a long turn with experts is."""
    server = Misbehaving()
    server.pieces[-1]["meta_info"]["unknown"] = "x" * (10 * 2**20)
    assert run(checkpoint, tmp_path, server, generate).output_ids == [3, 4, 5, 6]


def test_tokens_of_weights_that_were_not_current_are_lost(checkpoint: Path, tmp_path: Path) -> None:
    """So answers a server that was restarted between two requests."""
    server = Misbehaving()
    server.label = "7.abc"
    with pytest.raises(RequestLost, match="'default', which were not current") as caught:
        run(checkpoint, tmp_path, server, generate)
    assert caught.value.partial.output_ids == []


@pytest.mark.parametrize("update", [{"success": False, "message": "no such file"}, None])
def test_after_a_failed_update_nothing_is_sampled_until_one_succeeds(
    checkpoint: Path, tmp_path: Path, update: dict[str, Any] | None
) -> None:
    server, tensors = Misbehaving(), load_tensors(checkpoint)

    async def body(engine: SGLangEngine) -> Any:
        await engine.prepare_weights(3, tensors)
        server.update = update
        with pytest.raises(EngineError, match="no such file" if update else "no answer"):
            await engine.commit_weights(3)
        assert server.calls[-1] == "/continue_generation", "a paused server would hang whoever comes next"
        assert engine.weight_version == 0
        with pytest.raises(EngineError, match="the update to weights 3 failed"):
            await engine.generate(REQUEST)
        server.update = {"success": True}
        await engine.commit_weights(3)
        server.pieces[-1]["meta_info"]["weight_versions"][0]["version"] = server.label
        return await engine.generate(REQUEST)

    bound_s = LONG_S if update else SHORT_S
    assert run(checkpoint, tmp_path, server, body, update_timeout_s=bound_s).weight_versions == [(0, 3)]


def test_tokens_that_arrive_during_an_update_are_not_certain(checkpoint: Path, tmp_path: Path) -> None:
    server = Misbehaving()
    server.pieces, server.then, server.update = [piece([3, 4])], "silence", {"success": True}

    async def body(engine: SGLangEngine) -> None:
        await engine.prepare_weights(3, load_tensors(checkpoint))
        running = asyncio.create_task(engine.generate(REQUEST))
        while engine.stats()["generated_tokens"] < 2:
            await asyncio.sleep(0.001)
        (request,) = engine._running.values()
        await engine.commit_weights(3)
        request.take(engine._client._decode(web.json_response(piece([5])).body))  # type: ignore[union-attr, arg-type]
        with pytest.raises(RequestLost) as caught:
            await running
        assert caught.value.partial.output_ids == [3, 4]

    run(checkpoint, tmp_path, server, body, silence_timeout_s=2 * SHORT_S)


def test_a_server_that_was_left_paused_is_let_go_on(checkpoint: Path, tmp_path: Path) -> None:
    """As by a worker that was killed in the middle of an update."""
    server = Misbehaving()

    async def body(_: SGLangEngine) -> None:
        assert server.calls == ["/continue_generation", "/health_generate"]

    run(checkpoint, tmp_path, server, body)


def test_a_server_that_is_not_there_is_named_in_time(checkpoint: Path, tmp_path: Path) -> None:
    async def body() -> None:
        (port,) = free_ports(1)
        engine = make_engine(f"http://127.0.0.1:{port}", checkpoint, tmp_path, start_timeout_s=0.4)
        with pytest.raises(ServerUnreachable, match=rf"127\.0\.0\.1:{port} was not ready within 0\.4 s"):
            await engine.start()
        await engine.close()

    asyncio.run(asyncio.wait_for(body(), 30))
