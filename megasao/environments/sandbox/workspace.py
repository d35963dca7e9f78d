"""A workspace between two commands: a tar archive in memory, never unpacked on the host.

Invariants:
- reading it gives regular files only, under relative names inside the workspace; links and devices are left out, so
  nothing that a sandboxed program made can point at the host;
- files that are put into one are there, whatever was in it before.
"""

import contextlib
import io
import tarfile
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

_LONGEST_NAME, _LONGEST_PATH = 255, 4000
"""Bytes of one part of a name, and of all of it, that the kernel takes (4096 with the directory before it)."""


def pack(files: Mapping[str, bytes]) -> bytes:
    """A workspace with these files. ValueError for a name that is absolute or leads out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            if not is_inside(name):
                raise ValueError(f"workspace file {name!r}: expected a relative name inside the workspace")
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpack(workspace: bytes) -> dict[str, bytes]:
    """The regular files of a workspace, up to where it is damaged. ValueError if it is no archive."""
    if not is_workspace(workspace):
        raise ValueError("workspace: not an archive")
    found: dict[str, bytes] = {}
    # What a command left running may have ended the program that packs it.
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(workspace), mode="r:") as archive:
        for entry in archive:
            name = str(PurePosixPath(entry.name))
            if entry.isreg() and is_inside(name):
                content = archive.extractfile(entry)
                assert content is not None
                found[name] = content.read()
    return found


def with_files(files: Mapping[str, bytes], own: Mapping[str, bytes]) -> dict[str, bytes]:
    """``files`` with ``own`` put in, which come first; what is in their way, as a file or a directory, is left out."""
    names = {str(PurePosixPath(name)) for name in own}
    return {**own, **{name: content for name, content in files.items() if not in_the_way(name, names)}}


def in_the_way(name: str, names: Collection[str]) -> bool:
    """Whether a file ``name`` cannot be beside files of these names: one of them, or a directory to either."""
    above = {str(parent) for parent in PurePosixPath(name).parents}
    return name in names or bool(above.intersection(names)) or any(other.startswith(f"{name}/") for other in names)


def is_workspace(workspace: bytes) -> bool:
    """Whether it begins as an archive does, and is not compressed."""
    try:
        with tarfile.open(fileobj=io.BytesIO(workspace), mode="r:"):
            return True
    except tarfile.TarError:
        return False


def is_inside(name: str) -> bool:
    """Whether a name can be that of a file inside the workspace."""
    path = PurePosixPath(name)
    parts = [len(part.encode(errors="replace")) for part in path.parts]
    fits = bool(parts) and max(parts) <= _LONGEST_NAME and sum(parts) + len(parts) <= _LONGEST_PATH
    return fits and "\0" not in name and not path.is_absolute() and ".." not in path.parts
