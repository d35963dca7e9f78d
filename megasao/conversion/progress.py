"""What a conversion shows while it works: how far, how fast, and for how long still."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text


class Speed(ProgressColumn):
    """GB/s read."""

    def render(self, task: Task) -> Text:
        """Two digits; nothing before the first bytes."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed / 1e9:.2f} GB/s")


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; what is yielded takes a number of bytes that were done, from any thread."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        Speed(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda count: progress.advance(task, count)
