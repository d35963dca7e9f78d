"""A real SGLang server keeps the contract of every engine, with either treatment of the KV cache."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contract", "expert_contract")

from contract import *  # noqa: E402, F403
from contract import LONG, LONG_TOLERANCE, TOLERANCE, make_request, prompt, until_generated, worst  # noqa: E402
from engine_checkpoints import (  # noqa: E402
    MAX_TOTAL,
    Reference,
    load_tensors,
    make_checkpoint,
    moe_config,
    perturb,
    save_tensors,
)
from expert_contract import *  # noqa: E402, F403
from sglang_harness import SGLangHarness  # noqa: E402
from sglang_server import RunningServer, needs_sglang, sglang_config  # noqa: E402

from megasao.rollout.engines.base import Engine, GenerateResult  # noqa: E402

pytestmark = needs_sglang


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(
        checkpoint,
        tmp_path_factory.mktemp("server"),
        sglang_config(pause="in_place", stream_interval=1),
        max_tokens=MAX_TOTAL,
        routed_experts=True,
    )
    try:
        yield running.wait()
    finally:
        running.kill()


@pytest.fixture(scope="module", params=["in_place", "retract"])
def harness(
    request: pytest.FixtureRequest, checkpoint: Path, server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangHarness]:
    harness = SGLangHarness(checkpoint, server.url, tmp_path_factory.mktemp("weights"), pause=request.param)
    yield harness
    harness.close()


def test_without_a_pause_running_requests_end_first_and_new_ones_come_after(
    checkpoint: Path, server: RunningServer, tmp_path: Path
) -> None:
    """No request has two versions; with the other modes it may have (see the contract)."""
    changed = perturb(load_tensors(checkpoint), 5)
    harness = SGLangHarness(checkpoint, server.url, tmp_path / "weights", pause="none")

    async def body(engine: Engine) -> tuple[list[int], list[GenerateResult], GenerateResult]:
        old, new = await harness.load(engine), harness.new_version()
        await engine.prepare_weights(new, changed)
        running = [asyncio.create_task(engine.generate(make_request(prompt(i), max_new_tokens=LONG))) for i in range(3)]
        await until_generated(engine, 10, running)
        committing = asyncio.create_task(engine.commit_weights(new))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(engine.generate(make_request(prompt(9), max_new_tokens=20)))
        assert not committing.done() and engine.weight_version == old
        first = await asyncio.gather(*running)
        await committing
        assert engine.weight_version == new
        return [old, new], first, await late

    try:
        (old, new), first, late = harness.run(body)
    finally:
        harness.close()
    assert [result.weight_versions for result in first] == [[(0, old)]] * 3 and late.weight_versions == [(0, new)]
    before, after = Reference(checkpoint), Reference(save_tensors(checkpoint, tmp_path / "changed", changed))
    assert worst(before, [(prompt(i), result) for i, result in enumerate(first)], 1.0) < LONG_TOLERANCE
    assert worst(after, [(prompt(9), late)], 1.0) < TOLERANCE
    assert worst(before, [(prompt(9), late)], 1.0) > 100 * TOLERANCE, "the same tokens under any weights"
