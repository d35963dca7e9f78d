"""Rows in the format in which SWE-bench and SWE-bench Verified are published.

Columns: instance_id, repo (OWNER/NAME), base_commit, patch (the solution), test_patch (the hidden tests),
problem_statement, FAIL_TO_PASS and PASS_TO_PASS (lists of names of tests, as a list or as JSON text), version; others
are not needed.

Invariants: a row that lacks something is refused by file and row; ids are unique in a data set.
"""

import json
import re
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from megasao.environments.rows import Row, load_rows

_ID = re.compile(r"[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_TEXTS = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement", "version")


@dataclass(frozen=True)
class Instance:
    """One issue of one repository. ``patch`` and ``test_patch`` are unified diffs on ``base_commit``."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    version: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]

    def image(self, template: str) -> str:
        """``template`` with ``{instance}`` in it: the id as the published images have it."""
        return template.replace("{instance}", self.instance_id.lower().replace("__", "_1776_"))


def load_instances(path: str | Path) -> list[Instance]:
    """All instances of a file or directory. ValueError says which file and row, and what was expected."""
    return load_rows(path, lambda row, where, _: to_instance(row, where), attrgetter("instance_id"))


def to_instance(row: Row, where: str) -> Instance:
    """The instance of one row. ValueError names ``where`` and the column."""
    texts = {name: _text(row, name, where) for name in _TEXTS}
    for name, form in (("instance_id", _ID), ("repo", _REPO), ("base_commit", _COMMIT)):
        if not form.fullmatch(texts[name]):
            raise ValueError(f"{where}: {name}: expected a text like {form.pattern}, got {texts[name]!r}")
    fail_to_pass = _names(row, "FAIL_TO_PASS", where)
    if not fail_to_pass:
        raise ValueError(f"{where}: FAIL_TO_PASS: expected at least one test")
    return Instance(**texts, fail_to_pass=fail_to_pass, pass_to_pass=_names(row, "PASS_TO_PASS", where))


def _text(row: Row, name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {name}: expected text, got {value!r}; the row has {', '.join(map(str, row))}")
    return value


def _names(row: Row, name: str, where: str) -> tuple[str, ...]:
    value: Any = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{where}: {name}: expected a list of names of tests, or JSON of one, got {row.get(name)!r}")
    return tuple(value)
