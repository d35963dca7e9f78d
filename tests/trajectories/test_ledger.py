"""The ledger: records in order, a torn last line is cut off, other damage is an error."""

import pytest

from megasao.trajectories.ledger import (
    Batch,
    Checkpointed,
    Dropped,
    EvaluationStarted,
    Failed,
    GaveUp,
    Ledger,
    Reserved,
    Started,
)

RECORDS = [
    Started(1),
    Reserved(256),
    Batch(0, 0, ["a", "b"]),
    Dropped(1, 3, "calc", "stale", ["c"]),
    Failed(7, "engine_error"),
    GaveUp(7, "engine_error"),
    EvaluationStarted("step-000000/greedy", 0, "greedy", 0),
    Checkpointed(5),
]


def test_records_survive(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.open(path)
    assert ledger.recovered == []
    ledger.append(RECORDS[:3])
    ledger.append([])
    ledger.append(RECORDS[3:])
    ledger.close()
    assert Ledger.open(path).recovered == RECORDS


def test_every_torn_last_line_is_cut_off_and_writing_goes_on(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger.open(path).append(RECORDS[:3])
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        ledger = Ledger.open(path)
        assert ledger.recovered == RECORDS[:2]
        ledger.append([RECORDS[5]])
        ledger.close()
        assert Ledger.open(path).recovered == [*RECORDS[:2], RECORDS[5]]


def test_damage_before_the_last_line_names_the_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger.open(path).append(RECORDS)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"step"', b'"stop"')
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="line 3: damaged"):
        Ledger.open(path)
