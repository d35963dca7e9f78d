"""Variants of a task: the same bug in a repository that calls its things by other names.

Invariants:
- a variant is a function of the task and the seed alone;
- a name is replaced wherever it is a whole word of code: in files, their names, tests and solution, and in the
  statement within backticks, before ``(`` and before ``.py``; nothing else changes;
- new names are distinct, and none of them occurs in the task.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import replace

from megasao.environments.code_tasks import CodeTask

WORDS = re.findall(
    "[a-z]+",
    """
amber aspen basil birch breeze brook cedar clover coral crane delta dune ember fern fjord flint ginger grove hazel heron
iris jade juniper kelp kite lark lotus maple meadow moss nectar noble olive opal otter pearl poppy quartz quill raven
reed sage slate sparrow thorn tulip umber violet willow yarrow zephyr
""",
)
"""The names that variants take."""

_QUOTED = re.compile(r"`[^`]*`|\w+(?=\()|\w+(?=\.py\b)")


def variant(task: CodeTask, seed: int) -> CodeTask:
    """The task with other ``names``. ValueError if it has none, or more than there are free words."""
    taken = _words(task)
    free = [word for word in WORDS if word not in taken and word.capitalize() not in taken]
    if not 0 < len(task.names) <= len(free):
        raise ValueError(f"task {task.name}: names: expected 1 to {len(free)} of them, got {len(task.names)}")
    chosen = random.Random(seed).sample(free, len(task.names))
    names = {old: new.capitalize() if old[0].isupper() else new for old, new in zip(task.names, chosen, strict=True)}
    return replace(
        task,
        statement=_QUOTED.sub(lambda quoted: _rename(quoted[0], names), task.statement),
        files=_rename_files(task.files, names),
        tests=_rename_files(task.tests, names),
        solution=_rename_files(task.solution, names),
        names=tuple(names.values()),
    )


def _rename(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), text)


def _rename_files(files: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {_rename(name, names): _rename(text, names) for name, text in files.items()}


def _words(task: CodeTask) -> set[str]:
    texts = [task.statement]
    for files in (task.files, task.tests, task.solution):
        texts += [*files, *files.values()]
    return {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}
