"""Virtual time: actions in the order of their times, those of one time in the order in which they were planned."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], None]


@dataclass(slots=True)
class Event:
    """A planned action; ``cancel`` takes it back."""

    time: float
    action: Action | None

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Clock:
    """Seconds from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Event]] = []
        self._count = 0

    def after(self, seconds: float, action: Action) -> Event:
        """Plan ``action`` for ``seconds`` from now."""
        assert seconds >= 0, seconds
        event = Event(self.now + seconds, action)
        self._count += 1
        heapq.heappush(self._planned, (event.time, self._count, event))
        return event

    def step(self) -> bool:
        """Do the next thing that is planned; False if there is none."""
        while self._planned:
            self.now, _, event = heapq.heappop(self._planned)
            if event.action is not None:
                event.action()
                return True
        return False
