"""Directories of weights on a node, each of one process: what one that was killed has left, the next one clears.

    NODE_DIRECTORY/RUN-3f9a1c77/engine-0-0          the weights
    NODE_DIRECTORY/RUN-3f9a1c77/engine-0-0.owner    its owner holds a lock on it (flock), which ends with the process

Invariants, asserted by the tests:
- what a living process owns is never removed, and no other process gets it;
- what nobody owns any more is removed by whoever starts next on that machine, of whatever run;
- nothing else is ever removed: what does not say that it is ours and of this machine, what another user has, and what
  only a link leads to.
"""

import fcntl
import json
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long whoever starts waits for an owner that is about to end, or for another one that is clearing."""
_SUFFIX = ".owner"
_WHAT = "weights of a megasao run"
_MOST_BYTES = 4096
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Ownership:
    """A directory that is this process's own until it is released, or the process ends."""

    def __init__(self, directory: Path, *, wait_s: float = WAIT_S) -> None:
        """What is around ``directory`` is made, not the directory itself. OSError if that cannot be, or if another user
        has it; ValueError if another process owns it for longer than ``wait_s``."""
        self._directory = directory
        deadline = time.monotonic() + wait_s
        while (lock := self._lock()) is None:
            if time.monotonic() >= deadline:
                raise ValueError(f"another process keeps weights in {directory}; is this role running twice?")
            time.sleep(0.05)
        self._fd = lock
        content = json.dumps({"what": _WHAT, "machine": this_machine(), "host": socket.gethostname()}).encode()
        os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, len(content))

    def _lock(self) -> int | None:
        """The locked descriptor of what says whose it is; None while somebody else has it."""
        around, name = self._directory.parent, self._directory.name + _SUFFIX
        around.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            around.mkdir()
        try:
            with _opened(around) as place:
                fd = os.open(name, _FLAGS | os.O_CREAT, 0o600, dir_fd=place)
                if _locked(fd, name, place):
                    return fd
        except FileNotFoundError:  # whoever cleared the last of it has removed what was around it, too
            return None
        os.close(fd)
        return None

    def release(self) -> None:
        """Remove the directory, and what is around it once that is empty."""
        shutil.rmtree(self._directory, ignore_errors=True)
        if not os.path.lexists(self._directory):  # else somebody still writes there: the next one removes it
            self._directory.with_name(self._directory.name + _SUFFIX).unlink(missing_ok=True)
        os.close(self._fd)
        with suppress(OSError):
            self._directory.parent.rmdir()


def clear_abandoned(root: Path) -> list[Path]:
    """Remove the directories below ``root`` that no process owns any more; which they were."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    cleared: list[Path] = []
    for name in names:
        with suppress(OSError), _opened(root / name) as place:  # no directory, another user's, or gone by now
            owners = [owner for owner in sorted(os.listdir(place)) if owner.endswith(_SUFFIX)]
            found = [owner.removesuffix(_SUFFIX) for owner in owners if _clear(place, owner, root / name)]
            cleared += [root / name / one for one in found]
            if found:
                os.rmdir(root / name)  # an error where others are left in it
    if cleared:
        logger.info("removed weights that no process owns any more: %s", ", ".join(map(str, cleared)))
    return cleared


def _clear(place: int, owner: str, directory: Path) -> bool:
    """Remove what ``owner`` stands for, if that is ours and nobody's any more."""
    try:
        fd = os.open(owner, _FLAGS, dir_fd=place)
    except OSError:  # a link, or gone by now
        return False
    try:
        if not _locked(fd, owner, place) or not _is_of_this_machine(fd):
            return False
        with suppress(FileNotFoundError):
            shutil.rmtree(owner.removesuffix(_SUFFIX), dir_fd=place)
        os.unlink(owner, dir_fd=place)  # last: if this is interrupted, the next one goes on
    except OSError as error:
        logger.warning("%s: what no process owns any more cannot be removed: %s", directory / owner, error)
        return False
    finally:
        os.close(fd)
    return True


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of a directory that is no link; PermissionError if another user has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(f"{directory} belongs to another user")
        yield fd
    finally:
        os.close(fd)


def _locked(fd: int, name: str, place: int) -> bool:
    """Lock ``fd``; False if another process has it, or if it is not ``name`` any more: that was removed meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=place, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False


def _is_of_this_machine(fd: int) -> bool:
    """Whether a file says that weights are beside it, which a process of this user wrote on this machine.

    Where a directory is shared by machines, locks may not be.
    """
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        return False
    try:
        content = json.loads(os.pread(fd, _MOST_BYTES, 0))
    except ValueError:
        return False
    if not isinstance(content, dict) or content.get("what") != _WHAT:
        return False
    same_host = content.get("host") == socket.gethostname()  # it may have restarted
    return same_host or content.get("machine") == this_machine()


@cache
def this_machine() -> str:
    """A name that no other machine has, nor this one after it starts anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
