"""Errors that a user can mend: shown as one clean message, without a traceback."""

from dataclasses import dataclass


class UserError(ValueError):
    """Something the user wrote or asked for cannot be done; the message says what to change."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: which field, why, and where it was written (filled in at load)."""

    path: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.reason) if part)


class ConfigError(UserError):
    """A configuration that cannot be used; ``problems`` lists everything that is wrong with it."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


class CombinationError(ValueError):
    """Fields that are fine alone and impossible together; raised inside the models, turned into ConfigError at load."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{problem.path}: {problem.reason}" for problem in problems))
