"""Signs of life of a process for its launcher: the modification time of a file.

Invariant: a process that does its work beats from the loop that does it, never from a thread beside it.
"""

import time
from pathlib import Path


class LifeSign:
    """Touches ``path``, at most once in ``interval_s`` seconds."""

    def __init__(self, path: Path, *, interval_s: float = 1.0) -> None:
        self.path = path
        self._interval_s = interval_s
        self._last = float("-inf")
        path.parent.mkdir(parents=True, exist_ok=True)

    def beat(self) -> None:
        """Say that the work goes on."""
        now = time.monotonic()
        if now - self._last >= self._interval_s:
            self._last = now
            self.path.touch()
