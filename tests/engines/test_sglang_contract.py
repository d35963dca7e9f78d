"""A real SGLang server keeps the contract of every engine, with either treatment of the KV cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contract", "expert_contract")

from contract import *  # noqa: E402, F403
from engine_checkpoints import MAX_TOTAL, make_checkpoint, moe_config  # noqa: E402
from expert_contract import *  # noqa: E402, F403
from sglang_harness import SGLangHarness  # noqa: E402
from sglang_server import RunningServer, needs_sglang, sglang_config  # noqa: E402

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
