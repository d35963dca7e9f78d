"""The embedded engine keeps the contract of every engine, with either treatment of the KV cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contract")

from contract import *  # noqa: E402, F403
from embedded_harness import EmbeddedHarness  # noqa: E402
from engine_checkpoints import make_checkpoint, moe_config  # noqa: E402


@pytest.fixture(scope="module", params=["keep", "recompute"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedHarness]:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), moe_config())
    harness = EmbeddedHarness(path, kv_after_update=request.param)
    yield harness
    harness.close()
