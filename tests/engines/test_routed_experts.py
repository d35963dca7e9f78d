"""The embedded engine says which experts every token went to (routing replay)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.register_assert_rewrite("contract", "expert_contract")

from contract import make_request, prompt  # noqa: E402
from embedded_harness import EmbeddedHarness  # noqa: E402
from engine_checkpoints import dense_config, make_checkpoint, moe_config  # noqa: E402
from expert_contract import *  # noqa: E402, F403
from expert_contract import check_ids, episode  # noqa: E402

from megasao.rollout.engines.base import Engine  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())


@pytest.fixture(scope="module")
def narrow(checkpoint: Path) -> Iterator[EmbeddedHarness]:
    """Three slots only, so that sessions lose theirs between turns."""
    harness = EmbeddedHarness(checkpoint, slots=3)
    yield harness
    harness.close()


@pytest.fixture(scope="module", params=["keep", "recompute"])
def harness(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[EmbeddedHarness]:
    harness = EmbeddedHarness(checkpoint, kv_after_update=request.param)
    yield harness
    harness.close()


def test_ids_do_not_depend_on_what_was_cached(narrow: EmbeddedHarness) -> None:
    async def body(engine: Engine) -> list[tuple[list[int], np.ndarray]]:
        await narrow.load(engine)
        before = engine.stats()["evictions"]
        others = [engine.generate(make_request(prompt(90 + i), session=f"other {i}")) for i in range(4)]
        played, *_ = await asyncio.gather(
            asyncio.gather(*(episode(engine, "e" * (number + 1)) for number in range(6))), *others
        )
        assert engine.stats()["evictions"] > before, "some turn had to compute its whole prefix again"
        return played

    for tokens, ids in narrow.run(body):
        check_ids(narrow.path, tokens, ids)


def test_a_dense_model_has_no_ids_to_give(tmp_path: Path) -> None:
    harness = EmbeddedHarness(make_checkpoint(tmp_path, dense_config()))

    async def body(engine: Engine) -> None:
        await harness.load(engine)
        with pytest.raises(ValueError, match="asks for routed experts of a model that has none"):
            await engine.generate(make_request(prompt(1), return_routed_experts=True))
        assert (await engine.generate(make_request(prompt(1)))).routed_experts is None

    try:
        harness.run(body)
    finally:
        harness.close()
