"""Example trajectories with the trainer's numbers: written by the trainer, read by the report.

Invariants:
- a file ``step_NNNNNN.jsonl`` is complete or absent: a reader never sees half of it;
- writing a step again (after a resume) replaces it;
- every per-token list of a row has the length of ``tokens``; a row that breaks this is refused by name.
"""

import json
import math
from pathlib import Path
from typing import Any

from megasao.config.rundir import RunDirectory, write_atomically
from megasao.observability.jsonl import Row, read_rows

PER_TOKEN = (
    "tokens",
    "text",
    "action_mask",
    "rollout_logprobs",
    "logprobs",
    "ratio",
    "kept",
    "advantages",
    "returns",
    "values",
)


def write_examples(run: RunDirectory, step: int, weight_version: int, rows: list[dict[str, Any]]) -> Path:
    """Write the examples of ``step``; each row gets ``step`` and ``weight_version``.

    Per-token fields are plain lists (see ``PER_TOKEN``); any may be absent. Non-finite numbers become null.
    """
    lines = []
    for row in rows:
        check_example(row)
        whole = {"step": step, "weight_version": weight_version, **row}
        lines.append(json.dumps(_finite(whole), allow_nan=False) + "\n")
    run.examples.mkdir(parents=True, exist_ok=True)
    path = run.examples / f"step_{step:06d}.jsonl"
    write_atomically(path, "".join(lines))
    return path


def read_examples(run: RunDirectory) -> list[Row]:
    """All examples, by step; rows that break the length rule are left out."""
    rows = [row for path in sorted(run.examples.glob("step_*.jsonl")) for row in read_rows(path)]
    return [row for row in rows if not _problem(row)]


def check_example(row: Row) -> None:
    """ValueError if a per-token list has another length than ``tokens``."""
    problem = _problem(row)
    if problem:
        raise ValueError(f"example {row.get('trajectory_id', '?')!r}: {problem}")


def _problem(row: Row) -> str | None:
    tokens = row.get("tokens")
    if not isinstance(tokens, list):
        return f"'tokens' must be a list, got {type(tokens).__name__}"
    for name in PER_TOKEN:
        values = row.get(name)
        if values is not None and (not isinstance(values, list) or len(values) != len(tokens)):
            got = len(values) if isinstance(values, list) else type(values).__name__
            return f"{name!r} must be a list of {len(tokens)} entries like 'tokens', got {got}"
    return None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
