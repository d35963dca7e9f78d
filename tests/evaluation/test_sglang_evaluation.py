"""An evaluation with a real SGLang server: the same answers as the embedded engine's, and no server left."""

import json
from pathlib import Path

import psutil
import pytest

from megasao.config.errors import UserError
from megasao.config.load import load_config
from megasao.config.slurm import SlurmConfig
from megasao.evaluation.command import choose, run_evaluation, subject
from megasao.evaluation.records import ResultDirectory
from tests.benchmark_rows import write_rows
from tests.chat_checkpoint import bigram_checkpoint
from tests.engines.sglang_server import PYTHON, needs_sglang

pytestmark = needs_sglang

LAPTOP = str(Path(__file__).parents[2] / "configs" / "laptop.yaml")
BIGRAMS = {a: [b] for a, b in zip("\n\\boxed{14", "\\boxed{14}", strict=True)} | {"}": ["<|im_end|>"]}


def configured(place, engine, **server_args):
    changes = {
        "model.path": str(place / "model"),
        "benchmarks.data": str(place / "data"),
        "benchmarks.samples": 2,
        "benchmarks.max_tokens": 512,
        "rollout.engine": engine,
        "rollout.concurrency": 4,
        "rollout.sglang.python": str(PYTHON),
        "rollout.sglang.server_args": server_args,
    }
    return load_config(LAPTOP, [f"{name}={json.dumps(value)}" for name, value in changes.items()])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("sglang")
    bigram_checkpoint(path / "model", BIGRAMS)
    (path / "data").mkdir()
    write_rows(path / "data", "amc23")
    return path


def servers():
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "megasao-eval-" in " ".join(p.info["cmdline"] or [])]


@pytest.mark.timeout(600)
def test_a_server_gives_the_answers_of_the_embedded_engine(place, tmp_path):
    found = {}
    for engine in ("embedded", "sglang"):
        config, said = configured(place, engine), []
        run_evaluation(config, subject(config, None, None), choose("amc23"), tmp_path / engine, said.append)
        assert "mean@2" in "".join(said)
        records = ResultDirectory(tmp_path / engine / "amc23").read()
        found[engine] = {(r.problem_id, r.sample): (r.answer, r.reward, r.tokens, r.response) for r in records}
    assert found["sglang"] == found["embedded"] and len(found["sglang"]) == 8
    assert {answer for answer, *_ in found["sglang"].values()} == {"14"}
    assert {reward for _, reward, *_ in found["sglang"].values()} == {0.0, 1.0}
    assert not servers()


def test_what_one_node_cannot_serve_is_refused(place, tmp_path):
    config = configured(place, "sglang")
    wide = config.model_copy(update={"slurm": SlurmConfig.model_construct(nodes_per_server=4)})
    with pytest.raises(UserError, match=r"slurm\.nodes_per_server: 4, and an evaluation has one node"):
        run_evaluation(wide, subject(wide, None, None), choose("amc23"), tmp_path, lambda line: None)


@pytest.mark.full
def test_a_server_that_does_not_come_up_is_said_with_its_last_words(place, tmp_path):
    config = configured(place, "sglang", no_such_argument=1)
    with pytest.raises(
        UserError, match=r"rollout\.engine: the SGLang server ended \(exit code \d+\):(.|\n)*no_such_arg"
    ):
        run_evaluation(config, subject(config, None, None), choose("amc23"), tmp_path, lambda line: None)
    assert not servers()
