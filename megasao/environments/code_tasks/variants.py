"""Variants of a task: the same bug in a repository that calls its things by other names.

Invariants:
- a variant is a function of the task and its names, and those are one of the seed;
- a name is replaced wherever it is a whole word of code: in files, their names, tests and solution, and in the
  statement within backticks, before ``(`` and before ``.py``; nothing else changes;
- new names are distinct, and none of them occurs in the task.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megasao.environments.code_tasks import WORD, CodeTask

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


def other_names(task: CodeTask, seed: int) -> tuple[str, ...]:
    """Names for those of the task, in their order. ValueError if it has none, or more than there are free words."""
    free = [word for word in WORDS if word not in task.words and word.capitalize() not in task.words]
    if not 0 < len(task.names) <= len(free):
        raise ValueError(f"task {task.name}: names: expected 1 to {len(free)} of them, got {len(task.names)}")
    chosen = random.Random(seed).sample(free, len(task.names))
    return tuple(new.capitalize() if old[0].isupper() else new for old, new in zip(task.names, chosen, strict=True))


def variant(task: CodeTask, names: Sequence[str]) -> CodeTask:
    """The task with these names instead of its own ``names``."""
    renamed = dict(zip(task.names, names, strict=True))
    return replace(
        task,
        statement=_QUOTED.sub(lambda quoted: _rename(quoted[0], renamed), task.statement),
        files=_rename_files(task.files, renamed),
        tests=_rename_files(task.tests, renamed),
        solution=_rename_files(task.solution, renamed),
        names=tuple(names),
    )


def _rename(text: str, names: Mapping[str, str]) -> str:
    return WORD.sub(lambda word: names.get(word[0], word[0]), text)


def _rename_files(files: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {_rename(name, names): _rename(text, names) for name, text in files.items()}
