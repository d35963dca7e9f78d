"""The journal: synced rows survive anything, a torn tail costs only what was never acknowledged."""

import os
import signal
import subprocess
import sys

import pyarrow as pa
import pytest
from trajectory_samples import sample

from megasao.trajectories import journal as journal_module
from megasao.trajectories.journal import Journal
from megasao.trajectories.schema import from_batch, to_batch
from megasao.trajectories.store import JournalStore


def names_on_disk(directory, **options) -> list[str]:
    journal = Journal(directory, **options)
    return [row.trajectory_id for batch, _ in journal.recover() for row in from_batch(batch)]


def write(directory, names, **options) -> Journal:
    """One batch of two rows a name, one sync each; the journal stays open, as after a kill."""
    journal = Journal(directory, **options)
    list(journal.recover())
    for name in names:
        journal.append(to_batch([sample(name), sample(f"{name}'", rollout_logprobs=None)]))
        journal.sync()
    return journal


def test_rows_come_back_in_order_across_restarts_and_segments(tmp_path):
    write(tmp_path, ["a", "b"]).close()
    write(tmp_path, ["c"], segment_bytes=1).close()
    write(tmp_path, ["d", "e"], segment_bytes=1)
    assert names_on_disk(tmp_path) == ["a", "a'", "b", "b'", "c", "c'", "d", "d'", "e", "e'"]
    assert len(Journal(tmp_path).segments()) == 4


def test_a_segment_holds_no_more_rows_than_it_may(tmp_path):
    """Small rows would else fill an index in memory for hours before their segment could be deleted."""
    write(tmp_path, ["a", "b", "c", "d", "e"], segment_rows=4).close()
    assert len(Journal(tmp_path).segments()) == 3
    assert len(names_on_disk(tmp_path)) == 10


def test_segments_are_plain_arrow_streams(tmp_path):
    write(tmp_path, ["a", "b"]).close()
    with pa.ipc.open_stream(str(tmp_path / "segment-000001.arrow")) as reader:
        assert reader.read_all().column("trajectory_id").to_pylist() == ["a", "a'", "b", "b'"]


def test_every_torn_tail_keeps_what_was_synced_before(tmp_path):
    path = tmp_path / "segment-000001.arrow"
    write(tmp_path, ["a"])
    synced = path.stat().st_size
    write_more = Journal(tmp_path / "other")
    for name in ("a", "b"):
        write_more.append(to_batch([sample(name), sample(f"{name}'", rollout_logprobs=None)]))
        write_more.sync()
    whole = (tmp_path / "other" / "segment-000001.arrow").read_bytes()
    assert whole[:synced] == path.read_bytes()
    cuts = {0, 1, 8, synced - 1, synced, synced + 1, len(whole) - 1, len(whole), *range(0, len(whole), 173)}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        expected = 0 if cut < synced else 2 if cut < len(whole) else 4
        assert len(names_on_disk(tmp_path)) == expected, cut
        # Again: the tail is gone, and what is left is sound.
        assert len(names_on_disk(tmp_path)) == expected, cut
    assert any(tmp_path.glob("*.torn"))


def test_a_tail_of_zeros_or_damaged_values_is_cut_off_by_the_checksum(tmp_path):
    write(tmp_path, ["a", "b"])
    path = tmp_path / "segment-000001.arrow"
    whole = bytearray(path.read_bytes())
    position = whole.rindex(b"\x05\0\0\0\x06\0\0\0\x07\0\0\0\x08\0\0\0")
    whole[position : position + 16] = bytes(16)
    path.write_bytes(whole)
    journal = Journal(tmp_path)
    assert sum(batch.num_rows for batch, _ in journal.recover()) == 2
    assert journal.discarded_bytes > 0


def test_negative_control_without_the_checksum_the_damage_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_checksum", lambda batch: b"0")
    write(tmp_path, ["a"])
    path = tmp_path / "segment-000001.arrow"
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\x06\0\0\0", bytes(8)))
    assert len(names_on_disk(tmp_path)) == 2


def test_damage_in_an_older_segment_is_an_error_not_a_loss(tmp_path):
    write(tmp_path, ["a"])
    write(tmp_path, ["b"])
    path = tmp_path / "segment-000001.arrow"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"segment-000001\.arrow is damaged after byte"):
        names_on_disk(tmp_path)


@pytest.mark.parametrize("where", ["values", "start"])
def test_damage_before_a_whole_batch_is_an_error_not_a_torn_tail(tmp_path, where):
    write(tmp_path, ["a", "b"])
    path = tmp_path / "segment-000001.arrow"
    ends = path.stat().st_size
    write(tmp_path / "more", ["a", "b", "c"])
    whole = bytearray((tmp_path / "more" / "segment-000001.arrow").read_bytes())
    assert whole[:ends] == path.read_bytes()
    write(tmp_path / "one", ["a"])
    second = (tmp_path / "one" / "segment-000001.arrow").stat().st_size
    first = whole.index(b"\x05\0\0\0\x06\0\0\0", second) if where == "values" else second
    whole[first : first + 16] = bytes(16)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="not the end of the journal"):
        names_on_disk(tmp_path)
    path.write_bytes(whole[:ends])
    assert names_on_disk(tmp_path) == ["a", "a'"], "the same damage at the end is a torn tail"


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from trajectory_samples import sample
from megasao.trajectories.journal import Journal
from megasao.trajectories.schema import to_batch
journal = Journal(Path(sys.argv[1]), segment_bytes=20_000)
known = sum(batch.num_rows for batch, _ in journal.recover())
for number in range(known, 10**9):
    journal.append(to_batch([sample(f"t{number}", metrics={"x" * 50: 1.0})]))
    journal.sync()
    print(number, flush=True)
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path, request):
    acknowledged = -1
    for round_ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(request.path.parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(8 + 5 * round_):
                acknowledged = int(process.stdout.readline())
            os.kill(process.pid, signal.SIGKILL)
            rest = process.stdout.read().split()
        acknowledged = max([acknowledged, *map(int, rest)])
        names = names_on_disk(tmp_path)
        assert names == [f"t{number}" for number in range(len(names))]
        assert acknowledged < len(names) <= acknowledged + 2


def test_one_sync_covers_many_appends(tmp_path, monkeypatch):
    calls = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(descriptor), real(descriptor)))
    journal = Journal(tmp_path)
    for name in "abcdef":
        journal.append(to_batch([sample(name)]))
    before = len(calls)
    journal.sync()
    assert len(calls) == before + 1
    assert names_on_disk(tmp_path) == list("abcdef")


# the store


def _stored(directory, names, **options):
    journal = Journal(directory, **options)
    store = JournalStore(journal)
    for name in names:
        batch = to_batch([sample(name), sample(f"{name}'", temperature=0.5)])
        store.add(batch, journal.append(batch))
        journal.sync()
    return journal, store


@pytest.mark.parametrize("segment_bytes", [1, 4000, 10**6])
def test_fetch_gives_rows_in_the_order_asked_for(tmp_path, segment_bytes):
    _, store = _stored(tmp_path, ["a", "b", "c"], segment_bytes=segment_bytes)
    asked = ["c'", "a", "b", "b'", "a", "c"]
    rows = from_batch(store.fetch(asked))
    assert [row.trajectory_id for row in rows] == asked
    assert rows[0] == sample("c'", temperature=0.5)
    assert from_batch(store.fetch([])) == []


def test_fetch_names_what_is_not_there(tmp_path):
    _, store = _stored(tmp_path, ["a"])
    with pytest.raises(ValueError, match="1 trajectories are not in the journal, first 'x'"):
        store.fetch(["a", "x"])


def test_only_closed_segments_with_nothing_needed_are_deleted(tmp_path):
    journal, store = _stored(tmp_path, ["a", "b", "c"], segment_bytes=1)
    open_batch = to_batch([sample("d")])
    journal._segment_bytes = 10**9
    store.add(open_batch, journal.append(open_batch))
    journal.sync()
    needed = {"b'"}
    gone = store.forget(lambda name: name not in needed)
    assert gone == ["a", "a'", "c", "c'"]
    assert len(journal.segments()) == 2
    assert [row.trajectory_id for row in from_batch(store.fetch(["d", "b"]))] == ["d", "b"]
    with pytest.raises(ValueError, match="not in the journal"):
        store.fetch(["a"])
    journal.close()
    assert names_on_disk(tmp_path) == ["b", "b'", "d"]
