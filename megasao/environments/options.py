"""Strict reading of an environment's options into its dataclass.

Invariants: an unknown option is refused by name with the nearest known one; a value of the wrong kind is refused
(an int is a float, a bool is neither an int nor a float).
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, get_origin, get_type_hints

from megasao.environments.base import Environment

Options = TypeVar("Options")


def nearest(word: str, known: list[str]) -> str:
    """`` (did you mean 'x'?)`` for the known word nearest to ``word``, or an empty string when none is near."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f" (did you mean {found[0]!r}?)" if found else ""


def read_options(kind: type[Options], values: Mapping[str, Any], *, owner: str) -> Options:
    """Build ``kind`` (a dataclass of int, float, bool, str and dict fields with defaults) from ``values``.

    Raises ValueError naming ``owner``, the option, what was expected and what was given.
    """
    types = get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in types:
            raise ValueError(
                f"environment.options.{name}: environment {owner!r} has no such option{nearest(name, known)}; "
                f"it has {', '.join(sorted(known))}"
            )
        if not _fits(value, types[name]):
            raise ValueError(
                f"environment.options.{name}: expected {types[name].__name__}, got {type(value).__name__} {value!r}"
            )
    return kind(**values)


class OptionsEnvironment(Environment, Generic[Options]):
    """An environment that its options alone describe; ``options_type`` is their class."""

    options_type: ClassVar[type[Any]]

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """The environment with these ``environment.options``; ValueError names a bad one."""
        return cls(read_options(cls.options_type, options, owner=cls.name))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The option ``stop``, or nothing: then the model's own end of turn."""
        stop: str = getattr(self.options, "stop", "")
        return (stop,) if stop else ()


def require_positive(options: object, *names: str) -> None:
    """ValueError naming the first of these options that is not above 0."""
    for name in names:
        if getattr(options, name) <= 0:
            raise ValueError(f"environment.options.{name}: expected more than 0, got {getattr(options, name)}")


def _fits(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)
