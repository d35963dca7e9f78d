"""The embedded engine keeps the contract of every engine with latent attention too, and says its experts.

Here selection begins with the longest requests, past ``index_topk`` tokens: under updates that come at any time a
near-tie of the indexer's scores may fall on either side. Shorter selections are in ``test_latent_engine.py``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("contract", "expert_contract")

from contract import *  # noqa: E402, F403
from embedded_harness import EmbeddedHarness  # noqa: E402
from engine_checkpoints import latent_config, make_checkpoint  # noqa: E402
from expert_contract import *  # noqa: E402, F403


@pytest.fixture(scope="module", params=["keep", pytest.param("recompute", marks=pytest.mark.full)])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedHarness]:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), latent_config(index_topk=128))
    harness = EmbeddedHarness(path, kv_after_update=request.param)
    yield harness
    harness.close()
