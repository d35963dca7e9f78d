"""Small repositories with a bug each, and the tests that a mended one passes: one YAML file a task.

``statement`` says what is wrong; ``files`` is the repository, ``tests`` the hidden tests (unittest), ``solution`` the
mended files: by relative name, each with its text. ``names``, which may be left out, are the names in the code that a
variant of the task (variants.py) may change.

Invariant: a task is refused by file and key if it is not of this form.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from megasao.environments.sandbox.workspace import is_inside

SHIPPED = Path(__file__).parent

_KEYS = ("statement", "files", "tests", "solution")
WORD = re.compile(r"[A-Za-z_]\w*")
"""A name in code."""


@dataclass(frozen=True)
class CodeTask:
    """One repository to be mended; texts by relative name."""

    name: str
    statement: str
    files: Mapping[str, str]
    tests: Mapping[str, str]
    solution: Mapping[str, str]
    names: tuple[str, ...] = ()

    @cached_property
    def words(self) -> frozenset[str]:
        """Every word in the task's texts and file names."""
        texts = [self.statement]
        for files in (self.files, self.tests, self.solution):
            texts += [*files, *files.values()]
        return frozenset(word for text in texts for word in WORD.findall(text))


def load_tasks(directory: Path) -> list[CodeTask]:
    """The tasks of a directory, in order of name. ValueError names file and key."""
    files = sorted(directory.glob("*.yaml"))
    if not files:
        raise ValueError(f"{directory}: no task (*.yaml)")
    return [_load(file) for file in files]


def _load(file: Path) -> CodeTask:
    try:
        found: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(found, dict) or set(found) - {"names"} != set(_KEYS):
        raise ValueError(f"{file}: expected exactly the keys {', '.join(_KEYS)}, and names if wanted")
    if not isinstance(found["statement"], str) or not found["statement"].strip():
        raise ValueError(f"{file}: statement: expected text")
    for key in _KEYS[1:]:
        _check_files(found[key], f"{file}: {key}")
    names = found.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and WORD.fullmatch(name) for name in names):
        raise ValueError(f"{file}: names: expected a list of names in the code, got {names!r}")
    texts = {key: found[key] for key in _KEYS[1:]}
    return CodeTask(file.stem, found["statement"].strip(), **texts, names=tuple(names))


def _check_files(files: Any, where: str) -> None:
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{where}: expected at least one file name with its text")
    for name, text in files.items():
        if not isinstance(name, str) or not is_inside(name) or not isinstance(text, str):
            raise ValueError(f"{where}: expected relative names with text, got {name!r}")
