"""What a simulation says, as text, JSON and picture."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megasao.config.rundir import write_atomically
from megasao.simulation.calibrate import Timing
from megasao.simulation.outcome import Outcome
from megasao.simulation.rates import Source
from megasao.simulation.scale import MODES

_COLUMNS = {
    "GPUs": lambda one: f"{one.gpus}",
    "batch": lambda one: f"{one.batch_size}",
    "mode": lambda one: one.mode,
    "step s": lambda one: f"{one.step_seconds:.1f}",
    "trainer": lambda one: f"{one.trainer_utilisation:.0%}",
    "engines": lambda one: f"{one.engine_utilisation:.0%}",
    "running": lambda one: f"{one.running:.1f}",
    "tokens/s": lambda one: f"{one.tokens_per_s:,.0f}",
    "trajectories/s": lambda one: f"{one.trajectories_per_s:.3g}",
    "staleness": lambda one: f"{one.staleness_mean:.2f}",
    "max": lambda one: f"{one.staleness_max}",
    "dropped": lambda one: f"{one.dropped:.1%}",
    "speed-up": lambda one: "",
}
_LEGEND = (
    "trainer: share of the time in which it does not wait; engines: in which they compute; running: requests that\n"
    "decode on an engine; tokens and trajectories: trained on; staleness: versions at consumption; dropped: of what\n"
    "was finished; speed-up: trajectories a second over those of sync on as many GPUs"
)


def describe(outcomes: Sequence[Outcome], sources: Sequence[Source], notes: Sequence[str]) -> str:
    """Rates with their sources, the table, and what to be careful about."""
    lines = [*describe_sources(sources), "", *_table(outcomes), "", _LEGEND, *(f"note: {note}" for note in notes)]
    return "\n".join(lines)


def describe_sources(sources: Sequence[Source]) -> Iterator[str]:
    """A line for each rate."""
    width = max(len(source.name) for source in sources)
    for source in sources:
        number = f"{source.value:.4g} {source.unit}".rstrip()
        yield f"{source.name:<{width}}  {number:>12}  {source.source}"


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    rows = [list(_COLUMNS)]
    for one in outcomes:
        cells = [cell(one) for cell in _COLUMNS.values()]
        cells[-1] = f"{speed_up(one, outcomes):.2f}"
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    yield from ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def speed_up(one: Outcome, outcomes: Sequence[Outcome]) -> float:
    """Trajectories a second over those of sync on as many GPUs."""
    [sync] = [each for each in outcomes if each.gpus == one.gpus and each.mode == "sync"]
    return one.trajectories_per_s / sync.trajectories_per_s


def write_json(path: Path, outcomes: Sequence[Outcome], sources: Sequence[Source], notes: Sequence[str]) -> None:
    """Everything that ``describe`` shows, for machines."""
    data = {
        "rates": [asdict(source) for source in sources],
        "outcomes": [asdict(one) for one in outcomes],
        "notes": list(notes),
    }
    write_atomically(path, json.dumps(data, indent=2) + "\n")


def describe_prediction(predicted: Timing, found: Timing, sources: Sequence[Source], calibrated_on: str) -> str:
    """A run's wall time, predicted and measured."""
    error = predicted.seconds / found.seconds - 1
    return "\n".join(
        [
            *describe_sources(sources),
            "",
            f"rates of {calibrated_on}; steps 2 to {found.steps}, from the end of the first to the end of the last",
            f"trainer waits: predicted {predicted.waited:.1%}, measured {found.waited:.1%}",
            f"mean staleness: predicted {predicted.staleness:.2f}, measured {found.staleness:.2f}",
            f"wall time: predicted {predicted.seconds:.1f} s, measured {found.seconds:.1f} s: {error:+.1%}",
        ]
    )


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Speed, utilisation, staleness and drops over the GPUs, a line for each mode; a PNG file."""
    from megasao.studies.figures import COLOURS, figure

    panels = {
        "trajectories trained on, a second": lambda one: one.trajectories_per_s,
        "trainer: share of time not waiting": lambda one: one.trainer_utilisation,
        "engines: share of time computing": lambda one: one.engine_utilisation,
        "mean staleness, versions": lambda one: one.staleness_mean,
        "share of finished trajectories dropped": lambda one: one.dropped,
        "seconds of a training step": lambda one: one.step_seconds,
    }
    with figure(path, 2, 3) as axes:
        for number, (one, (title, value)) in enumerate(zip(axes, panels.items(), strict=True)):
            for mode, colour in zip(MODES, COLOURS, strict=False):
                mine = [each for each in outcomes if each.mode == mode]
                places = [each.gpus for each in mine]
                one.plot(places, [value(each) for each in mine], color=colour, label=mode, marker="o", markersize=3.5)
            one.set_title(title, fontsize=10)
            one.set_xscale("log", base=2)
            one.set_xticks(places, [str(place) for place in places], fontsize=8)
            one.set_xlabel("GPUs", fontsize=8)
            if number == 0:
                one.set_yscale("log")
                one.legend(fontsize=8, frameon=False)
            else:
                one.set_ylim(bottom=0)
