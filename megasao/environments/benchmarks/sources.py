"""Where the rows of a benchmark lie: a local file, or a file of a Hugging Face data set at a pinned revision.

Invariant: a data set that could change under its name is refused.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from megasao.environments.rows import SUFFIXES, data_files

_HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)@(?P<revision>[^:@]+):(?P<file>.+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def locate(name: str, directory: str, sources: Mapping[str, str]) -> Path:
    """The file or directory of benchmark ``name``. ValueError says what was looked for."""
    given = sources.get(name)
    if given is not None and given.startswith("hf:"):
        return _from_hub(name, given)
    if given is not None:
        candidates = [Path(given)]
    else:
        candidates = [Path(directory) / f"{name}{suffix}" for suffix in SUFFIXES] + [Path(directory) / name]
    for path in candidates:
        if path.exists():
            return path
    raise ValueError(
        f"benchmark {name}: {' or '.join(map(str, candidates))} does not exist; put its published file there, or name "
        f"it in benchmarks.sources.{name}: a path, or hf:OWNER/NAME@COMMIT:FILE"
    )


def _from_hub(name: str, source: str) -> Path:
    match = _HUB.fullmatch(source)
    if match is None or not _COMMIT.fullmatch(match["revision"]):
        raise ValueError(
            f"benchmarks.sources.{name}: expected hf:OWNER/NAME@COMMIT:FILE with a commit of 40 hex digits, got "
            f"{source!r}; a branch or tag could change what is measured"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(match["repo"], match["file"], repo_type="dataset", revision=match["revision"]))
    except (OSError, ValueError) as error:  # the hub's errors derive from these
        raise ValueError(f"benchmarks.sources.{name}: {source} could not be had: {error}") from error


def fingerprint(path: Path) -> str:
    """SHA-256 over the files of a data set, in order."""
    digest = sha256()
    for file in data_files(path):
        digest.update(file.read_bytes())
    return digest.hexdigest()
