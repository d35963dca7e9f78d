"""A rollout host's own journal."""

import struct
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from megasao.trajectories.hosted import PayloadJournal
from megasao.trajectories.ipc import join
from megasao.trajectories.journal import Journal
from megasao.trajectories.schema import Trajectory, from_batch, to_batch


def rows(*names: str) -> list[Trajectory]:
    one = Trajectory(
        trajectory_id="",
        prompt_id="prompt",
        group_id="group",
        task="task",
        tokens=[1, 2, 3],
        action_mask=[False, True, True],
        rewards=[0.0, 0.0, 1.0],
        weight_versions=[(0, 4)],
        turn_starts=[1],
        finish_reason="done",
        rollout_logprobs=[0.0, -0.5, -0.25],
        routed_experts=b"123456",
    )
    return [replace(one, trajectory_id=name) for name in names]


def names(journal: PayloadJournal) -> list[str]:
    return [summary.trajectory_id for summary in journal.summaries]


def test_what_was_kept_comes_back_whole_and_in_order(tmp_path: Path) -> None:
    journal = PayloadJournal(tmp_path)
    (first,), _ = journal.keep(to_batch(rows("a"))), journal.keep(to_batch(rows("b", "c")))
    assert (first.tokens, first.oldest_version, first.reward, first.has_routed_experts) == (3, 4, 1.0, True)
    with pytest.raises(ValueError, match="another rollout worker with this payload is alive"):
        PayloadJournal(tmp_path)
    journal.close()
    again = PayloadJournal(tmp_path)
    assert names(again) == ["a", "b", "c"] and len(again) == 3
    assert from_batch(again.fetch(["c", "a"])) == rows("c", "a")
    with pytest.raises(ValueError, match="first 'd'"):
        again.fetch(["a", "d"])
    assert again.take_lacking() == ["d"] and again.take_lacking() == []
    again.close()


def test_of_a_batch_only_the_rows_that_are_asked_for_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of many large rows, put together, can be more than memory, or Arrow's 2 GiB of one column, hold."""
    put_together: list[int] = []

    def noting(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
        put_together.extend(batch.num_rows for batch in batches)
        return join(batches, schema)

    monkeypatch.setattr("megasao.trajectories.store.join", noting)
    journal = PayloadJournal(tmp_path)
    for letter in "abc":
        journal.keep(to_batch(rows(*(f"{letter}{number}" for number in range(5)))))
    asked = ["c4", "a1", "b0", "a1", "c0"]
    assert from_batch(journal.fetch(asked)) == rows(*asked)
    assert sorted(put_together) == [1, 1, 2]
    journal.close()


def test_a_segment_goes_when_all_of_it_is_forgotten(tmp_path: Path) -> None:
    journal = PayloadJournal(tmp_path, segment_bytes=1)
    for name in "ab":
        journal.keep(to_batch(rows(name, name + name)))
    journal.forget(["a", "never heard of"])
    assert names(journal) == ["aa", "b", "bb"] and len(list(tmp_path.glob("*.arrow"))) == 2
    assert from_batch(journal.fetch(["aa"])) == rows("aa"), "what shares a segment stays readable"
    journal.forget(["aa"])
    assert len(list(tmp_path.glob("*.arrow"))) == 1
    with pytest.raises(ValueError, match="not in the journal"):
        journal.fetch(["a"])
    journal.close()


def test_a_bad_row_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    journal = PayloadJournal(tmp_path)
    bad = [replace(row, weight_versions=[(1, 0)]) for row in rows("bad")]
    with pytest.raises(ValueError, match="weight_versions"):
        journal.keep(to_batch([*rows("a"), *bad]))
    assert names(journal) == [] and not list(tmp_path.glob("*.arrow"))
    journal.close()


def test_a_row_that_no_message_could_carry_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept, it would be asked for until the run fails."""
    monkeypatch.setattr("megasao.trajectories.hosted.ROW_BYTES", 10_000)
    journal = PayloadJournal(tmp_path)
    large = replace(rows("large")[0], routed_experts=bytes(10_000))
    with pytest.raises(ValueError, match=r"row 1: .* more than 10000"):
        journal.keep(to_batch([*rows("a"), large]))
    assert names(journal) == []
    journal.keep(to_batch(rows("a", "b")))
    assert names(journal) == ["a", "b"]
    journal.close()


def test_what_cannot_be_read_any_more_is_lacking(tmp_path: Path) -> None:
    """As what is not there: its step is assembled again, where it would be asked for until the run fails."""
    journal = PayloadJournal(tmp_path, segment_bytes=1)
    for name in "abc":
        journal.keep(to_batch(rows(name)))
    first, second, _ = sorted(tmp_path.glob("*.arrow"))
    first.unlink()
    second.write_bytes(bytes(second.stat().st_size))
    with pytest.raises(ValueError, match="no batch can be read"):
        journal.fetch(["c", "b", "a"])
    assert journal.take_lacking() == ["b", "a"]
    assert from_batch(journal.fetch(["c"])) == rows("c") and journal.take_lacking() == []
    journal.close()


def test_a_row_that_changes_on_the_disk_is_lacking(tmp_path: Path) -> None:
    """In any of its columns, while the process lives that wrote it: it is not trained on."""
    journal = PayloadJournal(tmp_path, segment_bytes=1)
    for name in "ab":
        journal.keep(to_batch(rows(name)))
    file = sorted(tmp_path.glob("*.arrow"))[0]
    whole = file.read_bytes()
    for sign in (struct.pack("<f", -0.25), struct.pack("<i", 3), b"123456"):
        place = whole.rindex(sign)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="does not match its checksum"):
            journal.fetch(["b", "a"])
        assert journal.take_lacking() == ["a"]
    file.write_bytes(whole)
    assert from_batch(journal.fetch(["b", "a"])) == rows("b", "a")
    journal.close()


def test_a_damaged_segment_costs_its_own_rows_only(tmp_path: Path) -> None:
    """The controller assembles other trajectories in their place; a worker that did not start would end the run."""
    journal = PayloadJournal(tmp_path, segment_bytes=1)
    for name in "abc":
        journal.keep(to_batch(rows(name)))
    journal.close()
    _, second, _ = sorted(tmp_path.glob("*.arrow"))
    second.write_bytes(bytes(second.stat().st_size))
    again = PayloadJournal(tmp_path)
    assert names(again) == ["a", "c"]
    [damage] = again.damage
    assert second.name in damage and "is damaged after byte 0" in damage
    with pytest.raises(ValueError, match="first 'b'"):
        again.fetch(["b", "c"])
    assert again.take_lacking() == ["b"]
    again.keep(to_batch(rows("d")))
    assert from_batch(again.fetch(["a", "c", "d"])) == rows("a", "c", "d")
    again.close()
    with pytest.raises(ValueError, match="is damaged"):
        list(Journal(tmp_path).recover())


def test_it_is_read_while_it_is_written(tmp_path: Path) -> None:
    journal = PayloadJournal(tmp_path, segment_bytes=2000)
    wrong: list[str] = []

    def read() -> None:
        for _ in range(50):
            for name in names(journal)[-3:]:
                if from_batch(journal.fetch([name])) != rows(name):
                    wrong.append(name)

    reader = threading.Thread(target=read)
    journal.keep(to_batch(rows("first")))
    reader.start()
    for number in range(50):
        journal.keep(to_batch(rows(f"row {number}")))
    reader.join(60)
    assert not reader.is_alive() and not wrong
    journal.close()
