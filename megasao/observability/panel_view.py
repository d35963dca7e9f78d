"""Drawing of the panel's state: one rich renderable for a live terminal, one line of text for a log."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megasao.observability.formats import MISSING, count, duration, finite, number, share, sparkline
from megasao.observability.jsonl import Row
from megasao.observability.panel_state import PanelState
from megasao.observability.record import version_label

TWO_COLUMNS_FROM = 92
"""Narrower terminals get one column."""
LABEL, VALUE, NOTE = 9, 8, 15
"""Widths of a line's parts, characters; the sparkline gets the rest."""
Line = tuple[str, str, str, Sequence[float]]
"""Label, value, note, series."""


def draw(state: PanelState, width: int) -> RenderableType:
    """The whole panel for a terminal of ``width`` columns."""
    inner = max(40, width - 6)
    body: list[RenderableType] = [_progress(state, inner)]
    if state.trainer or state.evaluations or state.controller:
        body += [Text(), _two_columns(_learning(state), _machine(state), inner)]
    elif state.value:
        body += [Text(), _lines(_value_pretraining(state), inner)]
    elif state.sft:
        body += [Text(), _lines(_fine_tuning(state), inner)]
    return Box(
        Padding(Group(*body), (0, 1)),
        title=Text.assemble((" megasao ", "bold"), (f"{state.config.run.name} ", "cyan")),
        title_align="left",
        subtitle=Text(f" {duration(state.elapsed_seconds)} elapsed ", style="dim"),
        subtitle_align="right",
        border_style="bright_black",
        width=inner + 6,
    )


def step_line(state: PanelState, row: Row) -> str:
    """One training step in one line, for logs."""
    total = state.config.loop.steps
    parts = [
        f"step {row['step'] + 1:>{len(str(total))}}/{total}",
        f"v{row.get('weight_version', MISSING)}",
        f"reward {number(row.get('reward/mean'))}",
        f"lag {number(row.get('data/lag_mean'), 1)}/{count(row.get('data/lag_max'))}",
        f"masked {share(row.get('actor/masked_low'), 2)}/{share(row.get('actor/masked_high'), 2)}",
        f"ev {number(row.get('critic/explained_variance'), 2)}",
        f"len {number(row.get('data/response_tokens'), 1)} cut {share(row.get('data/truncated'))}",
        f"rollout {count(row.get('throughput/rollout_tokens_per_s'))}/s idle {share(row.get('idle/rollout'), 0)}",
        f"trainer {count(row.get('throughput/trainer_tokens_per_s'))}/s idle {share(row.get('idle/trainer'), 0)}",
        f"left {duration(state.remaining_seconds)}",
    ]
    return " | ".join(parts).replace(" %", "%")


def sft_line(state: PanelState, row: Row) -> str:
    """One fine-tuning step in one line."""
    total = state.config.sft.steps if state.config.sft is not None else MISSING
    return f"fine-tuning {row['step'] + 1}/{total} | loss {number(row.get('sft/loss'))}"


def value_line(state: PanelState, row: Row) -> str:
    """One look at the held-out part in value pretraining, in one line."""
    total = state.config.value_pretraining.steps if state.config.value_pretraining is not None else MISSING
    held_out = number(row.get("value/held_out/explained_variance"))
    return (
        f"value pretraining {row['step'] + 1}/{total} | loss {number(row.get('value/loss'))} | held-out ev {held_out}"
    )


def evaluation_line(row: Row) -> str:
    """One finished evaluation in one line."""
    solved = f"{count(row.get('solved'))} of {count(row.get('problems'))}, {count(row.get('failures'))} failed"
    return f"evaluation {row.get('mode')} | {version_label(row)} | success {share(row.get('success'))} ({solved})"


def _progress(state: PanelState, width: int) -> RenderableType:
    """Stage, bar, steps, time left, pace, weight version."""
    style = "green" if state.closed or state.finished >= state.total else "cyan"
    pace, version = state.step_seconds, state.last.get("weight_version")
    grid = Table.grid(padding=(0, 2), expand=True)
    for index in range(6):
        grid.add_column(ratio=1 if index == 1 else None, no_wrap=True)
    grid.add_row(
        Text(state.stage, style=f"bold {style}"),
        ProgressBar(total=max(1, state.total), completed=state.finished, complete_style=style, finished_style="green"),
        Text.assemble((f"{state.finished}", "bold"), f"/{state.total}"),
        _named("left", duration(state.remaining_seconds)),
        _named("step", MISSING if pace is None else f"{pace:.2f} s"),
        _named("weights", MISSING if version is None else f"v{version}"),
    )
    grid.width = width
    return grid


def _learning(state: PanelState) -> list[Line]:
    """What is learnt."""
    row = state.last
    variance = state.series("critic/explained_variance")
    return [
        ("reward", number(state.recent("reward/mean")), "mean, 10 steps", state.series("reward/mean")),
        _evaluation_line(state, "greedy"),
        _evaluation_line(state, "sampled"),
        ("expl. var", number(row.get("critic/explained_variance"), 2), "of the critic", variance),
        ("length", number(row.get("data/response_tokens"), 1), "action tokens", state.series("data/response_tokens")),
        ("truncated", share(row.get("data/truncated")), "of the batch", state.series("data/truncated")),
    ]


def _machine(state: PanelState) -> list[Line]:
    """How it runs."""
    row, bound, gauges = state.last, state.config.loop.max_lag, state.controller[-1] if state.controller else {}
    lag_max, high = count(row.get("data/lag_max")), share(row.get("actor/masked_high"), 2).replace(" ", "")
    restarts = sum(state.restarts.values())
    who = ", ".join(f"{role} {times}" for role, times in state.restarts.items() if times)
    waiting = [value for value in (finite(row.get("buffer")) for row in state.controller) if value is not None]
    lines: list[Line] = [
        _speed_line(state, "rollout"),
        _speed_line(state, "trainer"),
        ("lag mean", number(row.get("data/lag_mean"), 2), f"max {lag_max} of {bound}", state.series("data/lag_mean")),
        ("masked", share(row.get("actor/masked_low"), 2), f"low, {high} high", state.series("actor/masked_low")),
        ("buffer", count(gauges.get("buffer")), f"{count(gauges.get('leases'))} on lease", waiting),
        ("restarts", str(restarts), who, ()),
    ]
    if state.failures:
        most = max(state.failures, key=lambda name: state.failures[name])
        lines.append(("failed", count(state.failures[most]), most.rpartition("/")[2], ()))
    return lines


def _fine_tuning(state: PanelState) -> list[Line]:
    losses = [row["sft/loss"] for row in state.sft if isinstance(row.get("sft/loss"), int | float)]
    speeds = [row["sft/tokens_per_s"] for row in state.sft if isinstance(row.get("sft/tokens_per_s"), int | float)]
    return [
        ("loss", number(losses[-1] if losses else None), "", losses),
        ("speed", count(speeds[-1] if speeds else None), "tokens/s", speeds),
    ]


def _value_pretraining(state: PanelState) -> list[Line]:
    losses = [row["value/loss"] for row in state.value if isinstance(row.get("value/loss"), int | float)]
    name = "value/held_out/explained_variance"
    looks = [row[name] for row in state.value if isinstance(row.get(name), int | float)]
    return [
        ("loss", number(losses[-1] if losses else None), "", losses),
        ("expl. var", number(looks[-1] if looks else None, 2), "held out", looks),
    ]


def _evaluation_line(state: PanelState, mode: str) -> Line:
    rows = state.evaluated(mode)
    last = rows[-1] if rows else {}
    note = f"at {version_label(last)}" if last else "not measured"
    return mode, share(last.get("success")), note, [row["success"] for row in rows]


def _speed_line(state: PanelState, role: str) -> Line:
    name, row = f"throughput/{role}_tokens_per_s", state.last
    return (
        role,
        count(row.get(name)),
        f"tok/s idle {share(row.get(f'idle/{role}'), 0).replace(' ', '')}",
        state.series(name),
    )


def _named(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), value)


def _two_columns(left: list[Line], right: list[Line], width: int) -> RenderableType:
    if width < TWO_COLUMNS_FROM:
        return Group(_lines(left, width), _lines(right, width))
    half = (width - 3) // 2
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_row(_lines(left, half), _lines(right, half))
    return grid


def _lines(lines: list[Line], width: int) -> Table:
    """A grid of lines, each with its sparkline."""
    bars = max(4, width - LABEL - VALUE - NOTE - 4)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=LABEL, style="dim", no_wrap=True)
    grid.add_column(width=VALUE, style="bold", justify="right", no_wrap=True)
    grid.add_column(width=NOTE, style="dim", no_wrap=True)
    grid.add_column(width=bars, style="cyan", no_wrap=True)
    for label, value, note, series in lines:
        grid.add_row(label, value, note, sparkline(list(series), bars))
    return grid
