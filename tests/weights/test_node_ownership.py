"""Whose a node's directory of weights is: real processes own it, are killed, and clear after each other."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from megasao.weights.ownership import Ownership, clear_abandoned

OWN = """
import sys
from pathlib import Path
from megasao.weights.ownership import Ownership

directory = Path(sys.argv[1])
owner = Ownership(directory)
(directory / "7.life").mkdir(parents=True)
(directory / "7.life" / "00000.safetensors").write_bytes(b"weights")
print("there", flush=True)
sys.stdin.read()
owner.release()
"""

COMPETE = """
import os, shutil, signal, sys
from pathlib import Path
from megasao.weights.ownership import Ownership, clear_abandoned

root, directory, mine = Path(sys.argv[1]), Path(sys.argv[1]) / "run-1a2b3c4d" / "engine-0-0", os.getpid()
for turn in range(int(sys.argv[2])):
    clear_abandoned(root)
    owner = Ownership(directory, wait_s=300)
    if directory.exists():  # of one that was killed
        shutil.rmtree(directory)
    directory.mkdir()
    (directory / str(mine)).touch()
    clear_abandoned(root)
    assert [path.name for path in directory.iterdir()] == [str(mine)], "somebody else was here"
    if sys.argv[3] == "killed" and turn == int(sys.argv[2]) - 1:
        os.kill(mine, signal.SIGKILL)
    owner.release()
"""


def started(script: str, *arguments: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def owned(directory: Path):
    """A process that owns ``directory`` and has a version in it."""
    process = started(OWN, directory)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def abandoned(directory: Path) -> Path:
    """A directory whose owner was killed."""
    with owned(directory) as process:
        process.kill()
        process.wait()
    assert (directory / "7.life" / "00000.safetensors").is_file(), "it could not clear after itself"
    return directory


def test_what_a_killed_process_had_is_removed_and_what_a_living_one_has_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "megasao.weights.ownership")
    left, sibling = abandoned(tmp_path / "one-00000001" / "engine-0-0"), tmp_path / "one-00000001" / "engine-0-1"
    other = abandoned(tmp_path / "two-00000002" / "engine-0-0")
    with owned(sibling) as process:
        assert clear_abandoned(tmp_path) == [left, other]
        assert f"removed weights that no process owns any more: {left}, {other}" in caplog.text
        assert not left.exists() and not other.parent.exists() and (sibling / "7.life").is_dir()
        assert clear_abandoned(tmp_path) == []
        with pytest.raises(ValueError, match=r"another process keeps weights in .*engine-0-1; is this role running"):
            Ownership(sibling, wait_s=0)
        process.communicate()  # asked to end
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == [], "and it cleared after itself"


def test_whoever_comes_back_has_his_directory_again(tmp_path: Path) -> None:
    left = abandoned(tmp_path / "run-00000001" / "engine-0-0")
    owner = Ownership(left, wait_s=0)
    assert clear_abandoned(tmp_path) == [] and (left / "7.life").is_dir()
    owner.release()
    assert list(tmp_path.iterdir()) == []


def test_what_an_owner_cannot_remove_is_left_to_the_next_one(tmp_path: Path) -> None:
    directory = tmp_path / "run-00000001" / "engine-0-0"
    owner = Ownership(directory)
    directory.symlink_to(tmp_path)  # which is not removed as a directory
    owner.release()
    directory.unlink()
    directory.mkdir()
    assert clear_abandoned(tmp_path) == [directory] and list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    """No owner's file, one that says something else, or is of another machine: directories that only look alike."""
    root = tmp_path / "shm"
    for name in ("nothing", "empty", "words", "list", "other", "machine", "marked"):
        abandoned(root / f"{name}-00000001" / "engine-0-0")

    def says(name: str) -> Path:
        return root / f"{name}-00000001" / "engine-0-0.owner"

    ours = json.loads(says("marked").read_text())
    says("nothing").unlink()
    says("empty").write_text("")
    says("words").write_text("weights of a megasao run")
    says("list").write_text(json.dumps([ours]))
    says("other").write_text(json.dumps({**ours, "what": "a lock of something else"}))
    says("machine").write_text(json.dumps({**ours, "machine": "another", "host": "another"}))
    (root / "file").write_text("no directory")
    before = {path for path in root.rglob("*") if "marked" not in str(path)}
    assert clear_abandoned(root) == [root / "marked-00000001" / "engine-0-0"]
    assert set(root.rglob("*")) == before
    assert clear_abandoned(tmp_path / "not there") == []


def test_a_machine_that_started_anew_removes_what_it_had(tmp_path: Path) -> None:
    left = abandoned(tmp_path / "run-00000001" / "engine-0-0")
    marker = left.with_name("engine-0-0.owner")
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "machine": "before it started anew"}))
    assert clear_abandoned(tmp_path) == [left]


def test_no_link_is_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "shm", tmp_path / "outside"
    elsewhere = abandoned(outside / "run-00000001" / "engine-0-0")
    root.mkdir()
    (root / "run-00000001").symlink_to(elsewhere.parent)  # the run's own directory
    linked = abandoned(root / "run-00000002" / "engine-0-0")  # the file of the owner
    marker = linked.with_name("engine-0-0.owner")
    marker.rename(outside / "owner")
    marker.symlink_to(outside / "owner")
    moved = abandoned(root / "run-00000003" / "engine-0-0")  # the weights
    moved.rename(outside / "moved")
    moved.symlink_to(outside / "moved")
    inside = abandoned(root / "run-00000004" / "engine-0-0")  # a version of them
    (inside / "8.life").symlink_to(outside)
    assert clear_abandoned(root) == [inside]
    for whole in (elsewhere, linked, outside / "moved"):
        assert (whole / "7.life" / "00000.safetensors").is_file(), whole
    with pytest.raises(OSError, match=r"engine-0-0\.owner"):
        Ownership(linked, wait_s=0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_what_another_user_has_is_left_alone(tmp_path: Path) -> None:
    theirs, owner = (abandoned(tmp_path / f"run-0000000{number}" / "engine-0-0") for number in (1, 2))
    os.chown(theirs.parent, 12345, -1)
    os.chown(owner.with_name("engine-0-0.owner"), 12345, -1)
    assert clear_abandoned(tmp_path) == [] and theirs.is_dir() and owner.is_dir()
    with pytest.raises(PermissionError, match="run-00000001 belongs to another user"):
        Ownership(theirs, wait_s=0)


def test_processes_that_start_and_are_killed_at_once_never_take_what_another_has(tmp_path: Path) -> None:
    for _ in range(3):
        ways = ("killed", "released", "killed", "released")
        processes = [started(COMPETE, tmp_path, 100, way) for way in ways]
        ends = []
        for process in processes:
            process.communicate()
            ends.append(process.returncode)
        assert ends == [-9, 0, -9, 0]
    clear_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
