"""Which rollouts belong together: several of one prompt, when ``loop.group_size`` is above 1. Pure.

A training index counts rollouts: those of group n are n * size to n * size + size - 1.

Invariants:
- a group is trained on whole: as many trajectories as it has rollouts that are not lost;
- a group dies once, by ``drop`` when it loses its first rollout, by ``shrink`` when fewer than 2 are left.
"""

from typing import Literal

LEAST_MEMBERS = 2
"""A smaller group has no baseline to compare with."""


class GroupBook:
    """Groups that lost rollouts; all others are whole. Groups of 1 have nothing to lose."""

    def __init__(self, size: int, partial: Literal["drop", "shrink"]) -> None:
        self.size = size
        self._least = size if partial == "drop" else LEAST_MEMBERS
        self._lost: dict[str, int] = {}
        self._dead: set[str] = set()

    def name(self, index: int) -> str:
        """The group of a rollout."""
        return f"group-{index // self.size:06d}"

    def prompt_index(self, index: int) -> int:
        """Which of the environment's problems a rollout is of."""
        return index // self.size

    def members(self, group: str) -> range:
        """The rollouts of a group."""
        first = int(group.removeprefix("group-")) * self.size
        return range(first, first + self.size)

    def expected(self, group: str) -> int:
        """How many trajectories make the group complete."""
        return self.size - self._lost.get(group, 0)

    def lose(self, group: str) -> bool:
        """One of its rollouts will never be trained on; whether the group dies of it."""
        if self.size == 1 or group in self._dead:
            return False
        self._lost[group] = self._lost.get(group, 0) + 1
        if self.expected(group) >= self._least:
            return False
        self._dead.add(group)
        return True

    @property
    def dead(self) -> list[str]:
        """All groups that died."""
        return sorted(self._dead)
