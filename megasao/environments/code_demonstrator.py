"""The demonstrator of the code agent: looks at the files, edits what differs from the solution, hands in.

Its two bad habits are mistakes that hidden tests find: handing in what was only looked at, and writing the names that
the task has where it was first seen instead of those of this repository.

Invariants:
- without habits every demonstration mends the repository;
- what it is shown is what the environment shows to the same turns.
"""

import random
from dataclasses import dataclass

from megasao.environments.base import DemonstrationTurn
from megasao.environments.code_tasks import CodeTask
from megasao.environments.sandbox.run import Outcome
from megasao.environments.sandbox.shown import shown

HANDS_IN = "It is mended."
DONE = "done"
MARK = "=======\n"


@dataclass(frozen=True)
class Habits:
    """Probabilities; see ``CodeAgentOptions``."""

    gives_up: float
    remembers: float


def demonstrate(
    task: CodeTask, first_seen: CodeTask, habits: Habits, generator: random.Random, *, end: str, output: int
) -> list[DemonstrationTurn]:
    """The turns after the prompt of ``task``, which is ``first_seen`` under other names, or the same.

    ``end`` closes each turn; ``output``: characters of a command's output that are shown.
    """
    gives_up, remembers = generator.random() < habits.gives_up, generator.random() < habits.remembers
    names = sorted(task.files)
    turns = _turn(f"```bash\ncat {' '.join(names)}\n```{end}", _printed([task.files[name] for name in names], output))
    if not gives_up:
        written = dict(zip(task.solution, (first_seen if remembers else task).solution.values(), strict=True))
        for name, text in written.items():
            turns += _turn(f"```{edit(name, task.files.get(name), text)}```{end}", DONE)
    return [*turns, DemonstrationTurn(f"{HANDS_IN}{end}", True)]


def edit(name: str, old: str | None, new: str) -> str:
    """The inside of the block that makes ``new`` of ``old``: the lines that differ, or the whole file."""
    if old is not None:
        before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
        head = _same(before, after)
        tail = _same(before[head:][::-1], after[head:][::-1])
        lines, written = "".join(before[head : len(before) - tail]), "".join(after[head : len(after) - tail])
        if lines.endswith("\n") and old.count(lines) == 1 and MARK not in lines:
            return f"replace {name}\n{lines}{MARK}{written}"
    return f"write {name}\n{new}"


def _same(left: list[str], right: list[str]) -> int:
    """How many lines are the same from the beginning on."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _turn(said: str, shown_then: str) -> list[DemonstrationTurn]:
    return [DemonstrationTurn(said, True), DemonstrationTurn(f"\n{shown_then}\n", False)]


def _printed(texts: list[str], characters: int) -> str:
    """What the environment shows of a command that printed these."""
    return shown(Outcome(0, None, "".join(texts), False, b"", 0.0), characters)
