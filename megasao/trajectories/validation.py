"""What a trajectory row must satisfy before anything else in the system sees it.

Invariants:
- every reason names the column;
- one bad row never costs the good rows beside it;
- NaN at an observation token is not an error (it is replaced by 0), at an action token it is.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from megasao.trajectories.columns import REQUIRED, SCHEMA, conform

# A sampled token's log-probability may exceed 0 by rounding, not by more.
MAX_LOGPROB = 1e-4

_PER_TOKEN = ("action_mask", "rewards", "rollout_logprobs")


class _BadRow(ValueError):
    """A row breaks a rule."""


def validate(batch: pa.RecordBatch) -> None:
    """Raise ValueError naming column and row of the first rule that ``batch`` breaks."""
    for row, reason in validate_rows(batch).items():
        raise ValueError(f"row {row}: {reason}")


def validate_rows(batch: pa.RecordBatch) -> dict[int, str]:
    """Reasons by row, for the rows that break a rule. ValueError where the columns themselves are wrong."""
    conformed = conform(batch)
    reasons = {}
    for row in range(conformed.num_rows):
        try:
            _check_row(conformed, row)
        except _BadRow as bad:
            reasons[row] = str(bad)
    return reasons


def select_rows(batch: pa.RecordBatch, rows: Iterable[int]) -> pa.RecordBatch:
    """The rows with these positions, in this order."""
    return batch.take(pa.array(list(rows), type=pa.int64()))


def _check_row(batch: pa.RecordBatch, row: int) -> None:
    lists: dict[str, pa.Array] = {}
    for field in SCHEMA:
        scalar = batch.column(field.name)[row]
        if not scalar.is_valid:
            _require(field.name not in REQUIRED, f"{field.name}: null")
        elif pa.types.is_list(field.type):
            lists[field.name] = scalar.values
            _require(scalar.values.null_count == 0, f"{field.name}: holds a null")
    _check_text(batch, row)
    _check_tokens(lists)
    _check_rewards(lists)
    _check_logprobs(lists)
    _check_versions(lists)
    _check_turns(lists)
    _check_segments(lists)
    _check_scalars(batch, row)


def _check_text(batch: pa.RecordBatch, row: int) -> None:
    for name in ("trajectory_id", "prompt_id", "task", "finish_reason"):
        _require(bool(batch.column(name)[row].as_py()), f"{name}: empty")


def _check_tokens(lists: dict[str, pa.Array]) -> None:
    length = len(lists["tokens"])
    _require(length > 0, "tokens: empty")
    for name in _PER_TOKEN:
        if name in lists:
            _require(len(lists[name]) == length, f"{name}: length {len(lists[name])}, tokens has {length}")
    _first_bad("tokens", _numbers(lists["tokens"]), lambda ids: ids < 0, "token id below 0")
    _require(bool(_numbers(lists["action_mask"]).any()), "action_mask: no action token")


def _check_rewards(lists: dict[str, pa.Array]) -> None:
    _first_bad("rewards", _numbers(lists["rewards"]), lambda values: ~np.isfinite(values), "not finite")


def _check_logprobs(lists: dict[str, pa.Array]) -> None:
    if "rollout_logprobs" not in lists:
        return
    logprobs = _numbers(lists["rollout_logprobs"])
    _first_bad("rollout_logprobs", logprobs, lambda values: ~np.isfinite(values), "not finite at an action token")
    _first_bad("rollout_logprobs", logprobs, lambda values: values > MAX_LOGPROB, "a log-probability above 0")


def _check_versions(lists: dict[str, pa.Array]) -> None:
    if "weight_versions" not in lists:
        return
    spans = lists["weight_versions"]
    _require(len(spans) > 0, "weight_versions: empty")
    starts, versions = spans.field("start"), spans.field("version")
    _require(starts.null_count == 0 and versions.null_count == 0, "weight_versions: holds a null")
    first, values = _numbers(starts), _numbers(versions)
    length = len(lists["tokens"])
    _require(first[0] == 0, f"weight_versions: starts at token {first[0]}, not at 0")
    _require(bool((np.diff(first) > 0).all()), "weight_versions: token positions do not increase")
    _require(first[-1] < length, f"weight_versions: position {first[-1]} of {length} tokens")
    _first_bad("weight_versions", values, lambda numbers: numbers < 0, "version below 0")


def _check_turns(lists: dict[str, pa.Array]) -> None:
    starts, length = _numbers(lists["turn_starts"]), len(lists["tokens"])
    _first_bad("turn_starts", starts, lambda values: (values < 0) | (values >= length), f"outside {length} tokens")
    _require(bool((np.diff(starts) > 0).all()), "turn_starts: positions do not increase")


def _check_segments(lists: dict[str, pa.Array]) -> None:
    if "segment_starts" not in lists:
        return
    starts, mask = _numbers(lists["segment_starts"]), _numbers(lists["action_mask"])
    _require(len(starts) > 0 and starts[0] == 0, "segment_starts: the first is not 0")
    _require(bool((np.diff(starts) > 0).all()), "segment_starts: positions do not increase")
    _require(starts[-1] < len(mask), f"segment_starts: position {starts[-1]} of {len(mask)} tokens")
    _first_bad("segment_starts", starts, lambda values: mask[values], "a segment begins with an action")


def _check_scalars(batch: pa.RecordBatch, row: int) -> None:
    temperature = batch.column("temperature")[row].as_py()
    _require(np.isfinite(temperature) and temperature >= 0, f"temperature: {temperature} is not a temperature")
    for name in ("created_at", "finished_at"):
        _require(bool(np.isfinite(batch.column(name)[row].as_py())), f"{name}: not finite")
    for key, value in batch.column("metrics")[row].as_py():
        _require(value is not None, f"metrics: {key!r} is null")


def _numbers(values: pa.Array) -> np.ndarray:
    array: np.ndarray = values.to_numpy(zero_copy_only=False)
    return array


def _first_bad(column: str, values: np.ndarray, bad: Callable[[np.ndarray], np.ndarray], what: str) -> None:
    wrong = np.flatnonzero(bad(values))
    if wrong.size:
        raise _BadRow(f"{column}: {what} (position {wrong[0]}: {values[wrong[0]]})")


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise _BadRow(reason)
