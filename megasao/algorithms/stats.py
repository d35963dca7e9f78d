"""Statistics that add up over micro-batches and ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megasao.ops.reference import Stats


def combine(parts: Iterable[Stats]) -> Stats:
    """Sum of every key over ``parts``; maximum for keys that end in ``_max``. All parts have the same keys.

    Over ranks the same rule holds: reduce by MAX the keys for which ``is_maximum``, the others by SUM.
    """
    total: Stats = {}
    for part in parts:
        if total and total.keys() != part.keys():
            raise ValueError(f"stats: expected keys {sorted(total)}, got {sorted(part)}")
        total = {name: _merge(name, total.get(name), value) for name, value in part.items()}
    return total


def is_maximum(name: str) -> bool:
    """Whether the statistic combines by maximum rather than by sum."""
    return name.endswith("_max")


def _merge(name: str, left: Tensor | None, right: Tensor) -> Tensor:
    if left is None:
        return right
    return torch.maximum(left, right) if is_maximum(name) else left + right
