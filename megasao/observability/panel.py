"""The run in the terminal while it goes on: a live panel, or one line a step.

Invariants:
- ``update`` reads only what was appended since the last call, and never waits;
- what a run had written before the panel was made (a resumed run) is known to it but not printed again in ``lines``;
- files that do not exist yet, or end in a torn line, are no error;
- a terminal that is gone, or whoever read the lines, ends the panel and not the run.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from megasao.config import Config
from megasao.config.rundir import RunDirectory
from megasao.observability.formats import count
from megasao.observability.jsonl import Tail
from megasao.observability.panel_state import PanelState
from megasao.observability.panel_view import draw, evaluation_line, sft_line, step_line, value_line

SFT_LINES = 10
"""Fine-tuning prints about this many lines in ``lines`` mode."""


class Panel:
    """Shows a run; ``update`` is called about twice a second. ``mode`` is the resolved ``observability.panel``.

    ``restarts`` counts restarts by role; the launcher passes it to ``update``.
    """

    def __init__(self, run: RunDirectory, config: Config, *, console: Console | None = None) -> None:
        self.console = console or _Console()
        self.mode = _resolve(config.observability.panel, self.console)
        self.state = PanelState(config)
        self._trainer = Tail(run.metrics / "trainer.jsonl")
        self._sft = Tail(run.metrics / "sft.jsonl")
        self._value = Tail(run.metrics / "value.jsonl")
        self._controller = Tail(run.metrics / "controller.jsonl")
        self._evaluations = Tail(run.evaluations)
        self._logs, self._told = run.logs, set[str]()
        self._live: Live | None = None
        if self.mode != "off":
            self._read(show=False)

    def update(self, restarts: dict[str, int] | None = None) -> None:
        """Show what is new. ``restarts``: restarts of each role so far."""
        if self.mode == "off":
            return
        try:
            self._note_restarts(restarts or {})
            self._read(show=self.mode == "lines")
            if self.mode == "live":
                self._refresh()
        except _Gone:
            self.mode = "off"
            self._end_live()

    def close(self) -> None:
        """Show the last state and give the terminal back; may be called twice."""
        if self.state.closed:
            return
        self.update()
        self.state.closed = True
        if self._live is not None:
            with suppress(_Gone):
                self._refresh()
            self._end_live()

    def _end_live(self) -> None:
        """Standard output is no more the panel's."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(_Gone), _terminal():
                live.stop()

    def _read(self, *, show: bool) -> None:
        every = max(1, self.state.config.sft.steps // SFT_LINES) if self.state.config.sft is not None else 1
        for row in self._sft.read():
            if self.state.feed_sft(row) and show and (row["step"] + 1) % every == 0:
                self._print(sft_line(self.state, row))
        for row in self._value.read():
            if self.state.feed_value(row) and show and "value/held_out/tokens" in row:
                self._print(value_line(self.state, row))
        self.state.controller.extend(self._controller.read())
        self._note_failures(show=show)
        for row in self._trainer.read():
            if self.state.feed_trainer(row) and show:
                self._print(step_line(self.state, row))
        for row in self._evaluations.read():
            self.state.feed_evaluation(row)
            if show:
                self._print(evaluation_line(row))

    def _note_restarts(self, restarts: dict[str, int]) -> None:
        for role, times in restarts.items():
            if times != self.state.restarts.get(role, 0):
                self.state.restarts[role] = times
                if self.mode == "lines":
                    self._print(f"restarted {role} ({times} so far)")

    def _note_failures(self, *, show: bool) -> None:
        """Each kind is told once: a run in which everything fails would say nothing until it gives up."""
        for name, times in self.state.failures.items():
            if name not in self._told and show:
                self._print(f"{name}: {count(times)} so far, not trained on; see {self._logs}/rollout-*.log")
            self._told.add(name)

    def _refresh(self) -> None:
        with _terminal():
            picture = draw(self.state, self.console.width)
            if self._live is None:
                self._live = Live(picture, console=self.console, auto_refresh=False)
                self._live.start(refresh=True)
            else:
                self._live.update(picture, refresh=True)

    def _print(self, line: str) -> None:
        with _terminal():
            self.console.print(escape(line), highlight=False, soft_wrap=True)


class _Console(Console):
    """Where nobody reads what is printed, rich would end the process."""

    def on_broken_pipe(self) -> None:
        """An OSError as any other."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads what is printed")


class _Gone(Exception):
    """Nobody sees what is printed."""


@contextmanager
def _terminal() -> Iterator[None]:
    """What is written inside goes to the terminal; _Gone where there is none any more."""
    try:
        yield
    except OSError as error:
        raise _Gone from error


def _resolve(mode: str, console: Console) -> str:
    """``auto`` is live on a terminal, one line a step elsewhere."""
    return mode if mode != "auto" else "live" if console.is_terminal else "lines"
