"""Rows: what goes in comes out, and what is wrong is named by column and row."""

import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_samples import sample, trajectories

from megasao.trajectories.schema import (
    SCHEMA,
    conform,
    from_batch,
    from_ipc,
    select_rows,
    to_batch,
    to_ipc,
    validate,
    validate_rows,
)

NAN, INF = math.nan, math.inf


@settings(deadline=None)
@given(st.lists(trajectories(), max_size=4))
def test_round_trip(rows):
    batch = to_batch(rows)
    assert batch.schema.equals(SCHEMA, check_metadata=True)
    assert validate_rows(batch) == {}
    assert from_batch(batch) == rows
    assert from_batch(from_ipc(to_ipc(batch))) == rows


@settings(max_examples=40, deadline=None)
@given(st.lists(trajectories(), min_size=2, max_size=5), st.data())
def test_slices_and_selections_keep_rows_apart(rows, data):
    batch = from_ipc(to_ipc(to_batch(rows)))
    start = data.draw(st.integers(0, len(rows) - 1))
    assert from_batch(batch.slice(start)) == rows[start:]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=4))
    assert from_batch(select_rows(batch, chosen)) == [rows[row] for row in chosen]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trajectory_id": ""}, "trajectory_id: empty"),
        ({"tokens": [], "action_mask": [], "rewards": [], "rollout_logprobs": []}, "tokens: empty"),
        ({"tokens": [5, -6, 7, 8]}, "tokens: token id below 0 (position 1: -6)"),
        ({"action_mask": [True]}, "action_mask: length 1, tokens has 4"),
        ({"action_mask": [False] * 4}, "action_mask: no action token"),
        ({"rewards": [0.0] * 5}, "rewards: length 5, tokens has 4"),
        ({"rewards": [0.0, NAN, 0.0, 0.0]}, "rewards: not finite (position 1: nan)"),
        ({"rewards": [0.0, 0.0, 0.0, INF]}, "rewards: not finite"),
        ({"rollout_logprobs": [0.0, -0.5, 0.0]}, "rollout_logprobs: length 3, tokens has 4"),
        ({"rollout_logprobs": [0.0, NAN, 0.0, -1.0]}, "rollout_logprobs: not finite at an action token (position 1"),
        ({"rollout_logprobs": [0.0, -INF, 0.0, -1.0]}, "rollout_logprobs: not finite at an action token"),
        ({"rollout_logprobs": [0.0, 2e-4, 0.0, -1.0]}, "rollout_logprobs: a log-probability above 0"),
        ({"weight_versions": []}, "weight_versions: empty"),
        ({"weight_versions": [(1, 3)]}, "weight_versions: starts at token 1, not at 0"),
        ({"weight_versions": [(0, 3), (2, 4), (2, 5)]}, "weight_versions: token positions do not increase"),
        ({"weight_versions": [(0, 3), (4, 4)]}, "weight_versions: position 4 of 4 tokens"),
        ({"weight_versions": [(0, -1)]}, "weight_versions: version below 0"),
        ({"turn_starts": [4]}, "turn_starts: outside 4 tokens (position 0: 4)"),
        ({"turn_starts": [-1]}, "turn_starts: outside 4 tokens"),
        ({"turn_starts": [3, 1]}, "turn_starts: positions do not increase"),
        ({"segment_starts": []}, "segment_starts: the first is not 0"),
        ({"segment_starts": [2]}, "segment_starts: the first is not 0"),
        ({"segment_starts": [0, 2, 2]}, "segment_starts: positions do not increase"),
        ({"segment_starts": [0, 4]}, "segment_starts: position 4 of 4 tokens"),
        ({"segment_starts": [0, 3]}, "segment_starts: a segment begins with an action (position 1: 3)"),
        ({"finish_reason": ""}, "finish_reason: empty"),
        ({"temperature": -1.0}, "temperature: -1.0"),
        ({"temperature": NAN}, "temperature: nan"),
        ({"finished_at": INF}, "finished_at: not finite"),
    ],
)
def test_a_bad_row_is_named_and_the_good_ones_survive(changes, reason):
    batch = to_batch([sample("a"), sample("b", **changes), sample("c")])
    reasons = validate_rows(batch)
    assert list(reasons) == [1]
    assert reasons[1].startswith(reason)
    with pytest.raises(ValueError) as raised:
        validate(batch)
    assert str(raised.value).startswith(f"row 1: {reason}")
    assert from_batch(select_rows(batch, [0, 2])) == [sample("a"), sample("c")]


def test_rounding_above_zero_is_no_error():
    assert validate_rows(to_batch([sample(rollout_logprobs=[0.0, 9e-5, 0.0, -1.0])])) == {}


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 7.0])
def test_rubbish_at_observation_tokens_becomes_zero(rubbish):
    dirty = sample(rollout_logprobs=[rubbish, -0.5, rubbish, -2.25])
    assert from_batch(to_batch([dirty])) == [sample()]
    rows = to_batch([sample()]).to_pylist()
    rows[0]["rollout_logprobs"] = dirty.rollout_logprobs
    foreign = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    assert from_batch(foreign) == [sample()]
    mixed = pa.RecordBatch.from_pylist([*rows, {**rows[0], "rollout_logprobs": None}], schema=SCHEMA)
    assert from_batch(mixed) == [sample(), sample(rollout_logprobs=None)]


@pytest.mark.parametrize("field", [field.name for field in SCHEMA if not field.nullable])
def test_a_missing_required_column_is_named(field):
    with pytest.raises(ValueError, match=f"column {field}: missing"):
        validate(to_batch([sample()]).drop_columns([field]))


@pytest.mark.parametrize("field", [field.name for field in SCHEMA if field.nullable])
def test_a_missing_optional_column_gets_its_default(field):
    [row] = from_batch(to_batch([sample(metrics={}, created_at=0.0, finished_at=0.0)]).drop_columns([field]))
    assert row == sample(
        metrics={},
        created_at=0.0,
        finished_at=0.0,
        rollout_logprobs=None if field == "rollout_logprobs" else sample().rollout_logprobs,
        weight_versions=None if field == "weight_versions" else sample().weight_versions,
    )


def test_extra_columns_are_allowed_and_order_does_not_matter():
    batch = to_batch([sample()])
    extra = batch.append_column("more", pa.array([1]))
    shuffled = extra.select(list(reversed(extra.schema.names)))
    validate(shuffled)
    assert from_batch(shuffled) == [sample()]
    assert conform(shuffled).schema.equals(SCHEMA, check_metadata=True)


def test_a_wrong_type_names_expected_and_got():
    batch = to_batch([sample()])
    position = batch.schema.get_field_index("tokens")
    wrong = batch.set_column(position, "tokens", batch.column("tokens").cast(pa.list_(pa.int64())))
    with pytest.raises(ValueError, match=r"column tokens: expected list<.*int32>, got list<.*int64>"):
        validate(wrong)


def test_another_schema_version_is_refused():
    batch = to_batch([sample()])
    key = next(iter(SCHEMA.metadata))
    with pytest.raises(ValueError, match="schema version: expected 1, got 2"):
        validate(batch.replace_schema_metadata({key: b"2"}))
    with pytest.raises(ValueError, match="schema version: expected 1, got none"):
        validate(batch.replace_schema_metadata(None))


def test_nulls_are_named():
    rows = to_batch([sample()]).to_pylist()
    open_schema = pa.schema([field.with_nullable(True) for field in SCHEMA], metadata=SCHEMA.metadata)
    for column, value, reason in [
        ("tokens", None, "tokens: null"),
        ("tokens", [1, None, 3, 4], "tokens: holds a null"),
        ("action_mask", [True, None, True, True], "action_mask: holds a null"),
        ("rollout_logprobs", [0.0, None, 0.0, -1.0], "rollout_logprobs: holds a null"),
        ("weight_versions", [{"start": 0, "version": None}], "weight_versions: holds a null"),
        ("weight_versions", [None], "weight_versions: holds a null"),
        ("task", None, "task: null"),
        ("metrics", [("a", None)], "metrics: 'a' is null"),
    ]:
        batch = pa.RecordBatch.from_pylist([{**rows[0], column: value}], schema=open_schema)
        assert validate_rows(batch) == {0: reason}, column


def test_values_that_do_not_fit_are_value_errors():
    with pytest.raises(ValueError, match="does not fit the schema"):
        to_batch([sample(tokens=[2**31, 1, 1, 1])])


def test_versions():
    assert (sample().oldest_version, sample().newest_version) == (3, 5)
    untagged = sample(weight_versions=None)
    assert (untagged.oldest_version, untagged.newest_version) == (None, None)
