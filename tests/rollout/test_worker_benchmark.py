"""The benchmark of a rollout worker plays the same both ways: through the worker, and as bare requests."""

import asyncio
from pathlib import Path

import pytest

from benchmarks import rollout_worker
from megasao.config import Config
from megasao.studies.tiny_model import write_model, write_tokenizer
from tests.engines.sglang_server import PYTHON, needs_sglang

pytestmark = [pytest.mark.e2e, pytest.mark.full, needs_sglang]


@pytest.mark.timeout(600)
def test_both_ways_give_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    write_model(model, seed=0, hidden=32, layers=2, experts=4, moe_hidden=16)
    config = rollout_worker.config_of(model, concurrency=4, python=str(PYTHON))
    assert isinstance(config, Config)
    with rollout_worker.serving(config, model, tmp_path) as url:
        found = asyncio.run(rollout_worker.measure(config, model, url, tmp_path, 16, 1))
    assert len(found["worker"]) == len(found["bare"]) == 1 and min(found["worker"] + found["bare"]) > 0
    assert found["ratio"] == found["worker"][0] / found["bare"][0]
    assert capsys.readouterr().out.count("tokens: worker") == 2, "one that is not counted, and one that is"
