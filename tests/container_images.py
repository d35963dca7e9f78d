"""Images for tests, made of this machine's own programs: nothing is fetched."""

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

PROGRAMS = """bash cat dash dirname env git git-upload-pack grep head id ls mkdir mktemp mv python3 readlink rm sed seq
setsid sleep tail tar timeout touch tr true wc"""
TIMEOUT_S = 240


def root_archive(path: Path) -> Path:
    """A tar archive of a root directory with the PROGRAMS, their libraries, and Python's modules."""
    with tarfile.open(path, "w") as archive:
        for name in ("tmp", "proc", "sys", "dev", "etc", "testbed", "root"):
            _directory(archive, name, 0o1777 if name == "tmp" else 0o755)
        for name, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64"), ("usr/bin/sh", "dash")):
            _link(archive, name, target)
        version, there = Path(os.path.realpath("/usr/bin/python3")).name, set[str]()
        programs = [Path(shutil.which(program, path="/usr/bin:/bin") or program) for program in PROGRAMS.split()]
        modules = Path(f"/usr/lib/{version}/lib-dynload").glob("*.so")
        for file in [*programs, *(library for one in [*programs, *modules] for library in _libraries(one))]:
            _add(archive, file, there)
        archive.add(f"/usr/lib/{version}", f"usr/lib/{version}", filter=_modules)
    return path


def add_repository(archive: Path, repository: Path, target: Path) -> Path:
    """The archive with ``repository`` at /testbed."""
    shutil.copy(archive, target)
    with tarfile.open(target, "a") as longer:
        for file in repository.iterdir():
            longer.add(file, f"testbed/{file.name}", filter=_owned_by_root)
    return target


def import_image(runtime: str, archive: Path, name: str) -> None:
    """The archive as an image of podman or docker. Skips where the runtime cannot run it."""
    done = _call(runtime, "import", str(archive), name)
    if done.returncode == 0:
        limits = ("--network=none", "--ulimit=nofile=4096", "--ulimit=nproc=4096")
        done = _call(runtime, "run", "--rm", *limits, name, "true")
    if done.returncode != 0:
        pytest.skip(f"{runtime} is here, but runs no container: {done.stderr.strip()[-300:]}")


def remove_image(runtime: str, name: str) -> None:
    _call(runtime, "rmi", "--force", name)


def containers(runtime: str) -> list[str]:
    """Names of all containers of this project, running or not."""
    names = _call(runtime, "ps", "--all", "--format", "{{.Names}}").stdout.split()
    return [name for name in names if name.startswith("megasao-")]


def _call(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)


def _libraries(program: Path) -> list[Path]:
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout.split()
    return [Path(word) for word in listed if word.startswith("/") and not word.endswith(":")]


def _add(archive: tarfile.TarFile, file: Path, there: set[str]) -> None:
    name = str(file).lstrip("/")
    name = name if name.startswith("usr/") else f"usr/{name}"
    if name not in there:
        there.add(name)
        archive.add(os.path.realpath(file), name, filter=_owned_by_root)


def _modules(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    unwanted = ("__pycache__", "/test", "/idlelib", "/tkinter", "/dist-packages", "/config-", "/ensurepip", "/lib2to3")
    return None if any(word in entry.name for word in unwanted) else _owned_by_root(entry)


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _directory(archive: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    archive.addfile(entry, io.BytesIO())


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    archive.addfile(entry, io.BytesIO())
