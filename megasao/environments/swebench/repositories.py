"""Repositories on this machine: the files of a commit, without the history.

``DIRECTORY/OWNER__NAME`` is a git repository, ``DIRECTORY/OWNER__NAME.bundle`` a git bundle.

Invariant: what leaves here are the files of one commit, all of them and nothing else.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from megasao.environments.base import EnvironmentFailure
from megasao.environments.swebench.rows import Instance

GIT_TIMEOUT_S = 600.0


def find_repository(directory: Path, instance: Instance) -> Path:
    """ValueError says what was looked for."""
    if shutil.which("git") is None:
        raise ValueError("git is not installed, and reads the repositories; install it")
    name = instance.repo.replace("/", "__")
    for path in (directory / f"{name}.bundle", directory / name):
        if path.exists():
            return path
    raise ValueError(f"{instance.instance_id}: neither {directory / name}.bundle nor {directory / name} exists")


def files_at(repository: Path, commit: str) -> bytes:
    """The files of a commit as a tar archive. EnvironmentFailure if git cannot give them."""
    with tempfile.TemporaryDirectory() as directory:
        bare = Path(directory) / "bare"
        _git("clone", "--quiet", "--bare", str(repository), str(bare))
        # An archive leaves out and fills in what a repository's own attributes say; these come before them.
        (bare / "info").mkdir(exist_ok=True)
        (bare / "info" / "attributes").write_text("* -export-ignore -export-subst\n")
        return _git("-C", str(bare), "archive", "--format=tar", commit)


def _git(*words: str) -> bytes:
    safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    try:
        return subprocess.run(
            ["git", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=GIT_TIMEOUT_S,
            env={**os.environ, **safe},
        ).stdout
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise EnvironmentFailure(f"git {' '.join(words)}: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFailure(f"git {' '.join(words)}: {error}") from error
