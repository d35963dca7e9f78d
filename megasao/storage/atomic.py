"""Directories that appear at once, and survive a crash."""

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(temporary: Path, final: Path) -> None:
    """Put ``temporary`` in ``final``'s place; a crash leaves the old one (perhaps as ``.old``) or the new one."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)
