"""A whole run with a chat model, tools, episodes in segments, and a benchmark in the background."""

import math
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase

import pytest

from megasao.trajectories.journal import Journal
from megasao.trajectories.schema import from_batch
from tests.benchmark_rows import ROWS, write_rows
from tests.chat_checkpoint import bigram_checkpoint
from tests.e2e import runs

pytestmark = pytest.mark.e2e

# The alphabet again and again; a turn ends only after a z.
BIGRAMS = {"\n": "a", **dict(pairwise(ascii_lowercase))}
BIGRAMS |= {"z": ["a", "<|im_end|>"], "<|im_end|>": "\n"}


def test_segments_are_trained_on_and_a_benchmark_is_measured_meanwhile(tmp_path: Path) -> None:
    model = bigram_checkpoint(tmp_path / "model", BIGRAMS)
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data", "gsm8k")
    config = runs.write_config(
        tmp_path / "config.yaml",
        model,
        environment={
            "name": "tool",
            "options": {"problems": 64},
            "max_tokens": 256,
            "max_turn_tokens": 200,
            "compaction": {"max_segments": 3, "summary_tokens": 30, "request": "Sum up.", "resume": " So: {summary}"},
        },
        trainer={"token_budget": 1024},
        loop={"steps": 3, "batch_size": 4, "max_lag": 2},
        evaluation={"problems": 2, "every": 0, "sampled": False, "benchmarks": ["gsm8k"], "concurrency": 4},
        benchmarks={"data": str(tmp_path / "data"), "samples": 2, "max_tokens": 256},
        checkpoint={"every": 0},
    )
    run = runs.train(config)

    rows = [row for batch, _ in Journal(run.journal).recover() for row in from_batch(batch)]
    long = [row for row in rows if row.segment_starts]
    assert {len(row.segment_starts or [0]) for row in rows} >= {1, 3}, "episodes of one turn, and cut ones"
    assert all(length <= 256 for row in rows for length in row.segment_lengths)
    assert any(len(row.tokens) > 256 for row in long) and all(row.metrics["segments"] >= 2 for row in long)
    used = {name for record in runs.read_ledger(run) for name in getattr(record, "trajectory_ids", [])}
    assert used & {row.trajectory_id for row in long}, "some were trained on"

    lines = runs.steps(run)
    assert len(lines) == 3
    assert all(math.isfinite(line["actor/loss"]) for line in lines[1:])
    found = {(row["mode"], row["newest_version"]): row for row in runs.evaluations(run)}
    assert {("gsm8k", 0), ("gsm8k", 2), ("greedy", 0), ("greedy", 2)} <= found.keys()
    for (mode, _), row in found.items():
        assert row["oldest_version"] == row["newest_version"] and row["failures"] == 0
        assert row["problems"] == (2 if mode == "greedy" else 2 * len(ROWS["gsm8k"][1]))
    assert "<td>gsm8k</td><td>v2</td>" in (run.path / "report.html").read_text(encoding="utf-8")
