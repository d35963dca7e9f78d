"""A workspace between two commands: a tar archive in memory, never unpacked on the host.

Invariants: reading it gives regular files only, under relative names inside the workspace; links and devices are left
out, so nothing that a sandboxed program made can point at the host.
"""

import io
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath


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
    """The regular files of a workspace. ValueError if it is no archive."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(workspace), mode="r:") as archive:
            for entry in archive:
                name = str(PurePosixPath(entry.name))
                if entry.isreg() and is_inside(name):
                    content = archive.extractfile(entry)
                    assert content is not None
                    found[name] = content.read()
    except tarfile.TarError as error:
        raise ValueError(f"workspace: not an archive: {error}") from error
    return found


def is_inside(name: str) -> bool:
    """Whether a name stays inside the workspace."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts
