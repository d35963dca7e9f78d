"""Directories that appear at once, and what survives a crash."""

import os
import shutil
from pathlib import Path
from typing import BinaryIO


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_durably(file: BinaryIO, data: bytes) -> None:
    """Write all of ``data`` to an unbuffered file, which may take it in parts, and fsync it. OSError."""
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def replace_directory(temporary: Path, final: Path) -> None:
    """Put ``temporary`` in ``final``'s place; a crash leaves the old one (perhaps as ``.old``) or the new one."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)
