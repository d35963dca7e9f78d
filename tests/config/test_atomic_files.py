"""Files that are replaced whole: what a reader sees, and what a crash of the machine leaves."""

import os
from pathlib import Path

import pytest

from megasao.config.rundir import write_atomically


def test_the_rename_is_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pointer to a checkpoint must not go back to an older one, which has been removed since."""
    done: list[str] = []
    replace, fsync = os.replace, os.fsync

    def note_sync(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    write_atomically(tmp_path / "latest", "step_000050")
    temporary, *rest = done
    assert Path(temporary).parent == tmp_path and temporary != str(tmp_path)
    assert rest == ["rename", str(tmp_path)]
    assert (tmp_path / "latest").read_text() == "step_000050"


def test_a_write_that_failed_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "latest", "old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "latest", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_text() == "old"
