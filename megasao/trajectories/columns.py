"""The Arrow schema of a trajectory row, and how any batch that claims to follow it is brought to exactly this form.

Invariants:
- a batch with a missing required column, a column of another type, or another schema version is refused by name;
- extra columns are allowed, and dropped; optional columns that are missing get their default;
- after ``conform`` the columns are those of SCHEMA, in its order, and log-probs at observation tokens are 0.
"""

from typing import Any

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 1
VERSION_KEY = b"megasao.trajectory_schema_version"

VERSION_SPAN = pa.struct([pa.field("start", pa.int32()), pa.field("version", pa.int64())])

SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("action_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("rewards", pa.list_(pa.float32()), nullable=False),
        pa.field("weight_versions", pa.list_(VERSION_SPAN)),
        pa.field("turn_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("segment_starts", pa.list_(pa.int32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32())),
        pa.field("temperature", pa.float64()),
        pa.field("routed_experts", pa.binary()),
        pa.field("metrics", pa.map_(pa.string(), pa.float64())),
        pa.field("created_at", pa.float64()),
        pa.field("finished_at", pa.float64()),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)

REQUIRED = tuple(field.name for field in SCHEMA if not field.nullable)

# What a row means where an optional column is missing, or null in it.
_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "metrics": [], "created_at": 0.0, "finished_at": 0.0}


def check_columns(schema: pa.Schema) -> None:
    """ValueError naming the schema version, the missing column, or the column of a wrong type."""
    found = (schema.metadata or {}).get(VERSION_KEY)
    if found != str(SCHEMA_VERSION).encode():
        shown = "none" if found is None else found.decode(errors="replace")
        raise ValueError(f"trajectory schema version: expected {SCHEMA_VERSION}, got {shown}")
    for field in SCHEMA:
        positions = schema.get_all_field_indices(field.name)
        if len(positions) > 1:
            raise ValueError(f"column {field.name}: appears {len(positions)} times")
        if not positions:
            if field.name in REQUIRED:
                raise ValueError(f"column {field.name}: missing (required, {field.type})")
            continue
        got = schema.field(positions[0]).type
        if not got.equals(field.type):
            raise ValueError(f"column {field.name}: expected {field.type}, got {got}")


def conform(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``batch`` with exactly the columns of SCHEMA. ValueError as ``check_columns``; rows are not looked at."""
    check_columns(batch.schema)
    columns = [_column(batch, field) for field in SCHEMA]
    return _silence_observations(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    default = _DEFAULTS.get(field.name)
    if field.name not in batch.schema.names:
        return pa.array([default] * batch.num_rows, type=field.type)
    column = batch.column(field.name)
    if default is None or not column.null_count:
        return column
    return pa.array([default if value is None else value for value in column.to_pylist()], type=field.type)


def _silence_observations(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Log-probs at observation tokens become 0; rows whose lengths disagree are left for validation to name."""
    position = SCHEMA.get_field_index("rollout_logprobs")
    logprobs, mask = batch.column(position), batch.column("action_mask")
    values, actions = logprobs.flatten(), mask.flatten()
    clean = not (values.null_count or actions.null_count or logprobs.null_count or mask.null_count)
    if clean and logprobs.value_lengths().equals(mask.value_lengths()):
        masked = np.where(actions.to_numpy(zero_copy_only=False), values.to_numpy(zero_copy_only=False), np.float32(0))
        offsets = np.concatenate([[0], np.cumsum(logprobs.value_lengths().to_numpy())]).astype(np.int32)
        silent = pa.ListArray.from_arrays(pa.array(offsets), pa.array(masked, pa.float32()), type=logprobs.type)
    else:
        rows = zip(logprobs.to_pylist(), mask.to_pylist(), strict=True)
        silent = pa.array([_silent_row(*row) for row in rows], type=logprobs.type)
    return batch.set_column(position, SCHEMA.field(position), silent)


def _silent_row(logprobs: list[float] | None, mask: list[bool] | None) -> list[float] | None:
    if logprobs is None or mask is None or len(logprobs) != len(mask):
        return logprobs
    return [value if action else 0.0 for value, action in zip(logprobs, mask, strict=True)]
