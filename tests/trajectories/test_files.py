"""Reading trajectories at hand: which files, in which order, and every way in which they can be wrong."""

import math
from pathlib import Path

import pyarrow as pa
import pytest

from megasao.trajectories.columns import SCHEMA
from megasao.trajectories.files import read_trajectories, trajectory_files
from megasao.trajectories.ipc import to_ipc
from megasao.trajectories.journal import Journal
from megasao.trajectories.schema import to_batch
from tests.trajectories.trajectory_samples import sample


def write_stream(path: Path, *names: str, **changes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_ipc(to_batch([sample(name, prompt_id=f"prompt-{name}", **changes) for name in names])))
    return path


def write_journal(directory: Path, *names: str) -> Path:
    journal = Journal(directory, segment_bytes=1)
    for name in names:
        journal.append(to_batch([sample(name, prompt_id=f"prompt-{name}")]))
        journal.sync()
    journal.close()
    return directory


def test_a_run_a_journal_streams_and_files_are_read_in_order(tmp_path):
    write_journal(tmp_path / "run" / "journal", "a", "b")
    write_stream(tmp_path / "more" / "2.arrow", "d")
    write_stream(tmp_path / "more" / "1.arrow", "c")
    with pa.ipc.new_file(tmp_path / "random-access.data", SCHEMA) as writer:
        writer.write_batch(to_batch([sample("e", prompt_id="prompt-e"), sample("f", prompt_id="prompt-f")]))
        writer.write_batch(to_batch([sample("a", prompt_id="prompt-a")]))
    paths = [tmp_path / "run", tmp_path / "more", tmp_path / "random-access.data"]
    assert [path.name for path in trajectory_files(paths)] == [
        "segment-000001.arrow",
        "segment-000002.arrow",
        "1.arrow",
        "2.arrow",
        "random-access.data",
    ]
    stored = read_trajectories(paths)
    assert stored.prompt_ids == [f"prompt-{name}" for name in "abcdefa"] and len(stored) == 7
    rows = stored.fetch([6, 0, 4])
    assert [row.prompt_id for row in rows] == ["prompt-a", "prompt-a", "prompt-e"]
    assert [row.trajectory_id for row in rows] == ["row-6", "row-0", "row-4"], "the same name twice stays two rows"
    assert rows[0].tokens == sample().tokens and stored.largest_token == max(sample().tokens)


def test_payload_that_rollout_workers_keep_is_the_runs_too(tmp_path):
    write_journal(tmp_path / "journal", "a")
    for worker, name in enumerate("bc"):
        write_journal(tmp_path / "payload" / f"rollout-{worker}", name)
    assert read_trajectories([tmp_path]).prompt_ids == [f"prompt-{name}" for name in "abc"]


def test_the_journal_of_a_run_that_goes_on_is_read_and_left_alone(tmp_path):
    journal = Journal(tmp_path)
    journal.append(to_batch([sample("a"), sample("b")]))
    journal.sync()
    [path] = trajectory_files([tmp_path])
    before = path.read_bytes()
    assert len(read_trajectories([tmp_path])) == 2
    assert path.read_bytes() == before
    journal.close()


def test_paths_that_hold_nothing_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read_trajectories([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"holds no Arrow files \(\*\.arrow\)"):
        read_trajectories([tmp_path])
    empty = tmp_path / "empty.arrow"
    empty.write_bytes(to_ipc(to_batch([])))
    with pytest.raises(ValueError, match=r"there is no trajectory in .*empty\.arrow"):
        read_trajectories([empty])


def test_an_invalid_row_is_named_with_its_file(tmp_path):
    good = write_stream(tmp_path / "good.arrow", "a")
    bad = write_stream(tmp_path / "bad.arrow", "a", "b", rewards=[0.0, math.nan, 0.0, 1.0])
    with pytest.raises(ValueError, match=r"bad\.arrow, row 0: rewards: not finite \(position 1: nan\)"):
        read_trajectories([good, bad])


def test_another_schema_is_named(tmp_path):
    for change, message in [
        (lambda batch: batch.drop_columns(["rewards"]), "column rewards: missing"),
        (lambda batch: batch.set_column(4, "tokens", pa.array([["x"]])), "column tokens: expected list"),
        (lambda batch: batch.replace_schema_metadata({}), "trajectory schema version: expected 1, got none"),
    ]:
        path = tmp_path / "other.arrow"
        path.write_bytes(to_ipc(change(to_batch([sample()]))))
        with pytest.raises(ValueError, match=f"other.arrow: {message}"):
            read_trajectories([path])


@pytest.mark.parametrize("kind", ["text", "nothing", "cut", "cut file"])
def test_a_damaged_file_is_an_error_and_never_a_part(tmp_path, kind):
    path = write_stream(tmp_path / "x.arrow", "a", "b")
    whole = path.read_bytes()
    if kind == "cut file":
        with pa.ipc.new_file(path, SCHEMA) as writer:
            writer.write_batch(to_batch([sample()]))
        whole = path.read_bytes()
    path.write_bytes({"text": b"no arrow at all", "nothing": b""}.get(kind, whole[: len(whole) // 2]))
    with pytest.raises(ValueError, match=r"x\.arrow is no Arrow file, or is cut off or damaged"):
        read_trajectories([path])
