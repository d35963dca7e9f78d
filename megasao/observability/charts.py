"""Line and area charts as inline SVG, readable without a script; a script may add a read-out from ``data``.

Invariants:
- a missing value is a gap in its line, never 0 and never bridged;
- every number that reaches the page is finite; text is escaped;
- above ``MAX_POINTS`` the points are means of equal runs of steps, and the chart says so.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

Values = list[float | None]

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24
"""Plot margins, in the units of the SVG's view box."""
MAX_POINTS = 600
SMOOTH_FROM = 50
"""From this many points on, a noisy line is drawn faint with its moving mean on top."""
LOG_FROM = 30.0
"""A positive series whose maximum is this many times its median gets a logarithmic axis."""


@dataclass(frozen=True)
class Series:
    """One line: ``y`` is aligned with the chart's ``x``. ``color`` is 1..7, a class of the page's style."""

    name: str
    y: Values
    color: int
    smooth: bool = True


@dataclass(frozen=True)
class Chart:
    """What to draw. ``percent``: y is a fraction of 1; ``stacked``: areas, summed; ``dots``: mark points."""

    title: str
    note: str
    x_name: str
    x: list[float]
    series: list[Series]
    percent: bool = False
    stacked: bool = False
    dots: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps data to view-box coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low
        share = 0.5 if span == 0 else (value - self.x_low) / span
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high, at = self.y_low, self.y_high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.y_low))
        return HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def render(chart: Chart) -> str:
    """A ``<figure>``: title, legend with the last values, SVG, and the data for the read-out."""
    known = [series for series in chart.series if any(value is not None for value in series.y)]
    title = f"<h3>{html.escape(chart.title)}</h3>"
    if not known or not chart.x:
        note = "no values: not measured, or undefined at every step"
        return f'<figure class="chart empty"><figcaption>{title}<p>{note}</p></figcaption></figure>'
    chart, binned = _thin(replace(chart, series=known))
    scale = _scale(chart)
    note = chart.note + (f"; each point is a mean of {binned} steps" if binned > 1 else "")
    note += "; logarithmic axis" if scale.log else ""
    legend = "".join(_legend(series, chart.percent) for series in chart.series)
    return (
        f'<figure class="chart"><figcaption>{title}<p>{html.escape(note)}</p></figcaption>'
        f'<div class="legend">{legend}</div>'
        f'<div class="plot">{_svg(chart, scale)}</div>'
        f'<script type="application/json" class="chart-data">{_data(chart, scale)}</script></figure>'
    )


def script_json(value: object) -> str:
    """JSON that is safe inside a script element: no ``<``, ``>`` or ``&`` appears in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def compact(value: float | None, percent: bool = False) -> str:
    """A number for an axis or a legend."""
    if value is None:
        return "-"
    if percent:
        return f"{100 * value:.3g} %"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    if high <= low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def moving_mean(values: Values, window: int) -> Values:
    """Centred mean of the known values within ``window`` points; None where the point itself is None."""
    half = window // 2
    result: Values = []
    for index, value in enumerate(values):
        near = [v for v in values[max(0, index - half) : index + half + 1] if v is not None]
        result.append(None if value is None else sum(near) / len(near))
    return result


def _thin(chart: Chart) -> tuple[Chart, int]:
    """At most ``MAX_POINTS`` points; also the number of steps each one is a mean of."""
    size = math.ceil(len(chart.x) / MAX_POINTS)
    if size <= 1:
        return chart, 1
    starts = range(0, len(chart.x), size)
    series = [replace(s, y=[_mean(s.y[start : start + size]) for start in starts]) for s in chart.series]
    return replace(chart, x=[chart.x[min(start + size, len(chart.x)) - 1] for start in starts], series=series), size


def _mean(values: Values) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _known(series: Sequence[Series]) -> list[float]:
    return [value for one in series for value in one.y if value is not None]


def _scale(chart: Chart) -> Scale:
    values = _known(chart.series)
    if chart.stacked:
        values = [0.0, *_stack_tops(chart)[-1]]
    low, high = min(values), max(values)
    log = not chart.stacked and not chart.percent and low > 0 and high > LOG_FROM * sorted(values)[len(values) // 2]
    if log:
        high = max(high, low * 1.1)
    else:
        from_zero = chart.from_zero or chart.stacked
        low = min(low, 0.0) if from_zero else low
        pad = 0.06 * (high - low) or abs(high) * 0.1 or 0.5
        share = chart.percent and low >= 0 and high <= 1
        low, high = (low if from_zero and low >= 0 else low - pad), high + pad
        low, high = (max(low, 0.0), min(high, 1.0)) if share else (low, high)
    return Scale(min(chart.x), max(chart.x), low, high, log)


def _stack_tops(chart: Chart) -> list[list[float]]:
    """Upper edge of each area, from the lowest."""
    tops: list[list[float]] = []
    below = [0.0] * len(chart.x)
    for series in chart.series:
        below = [base + (value or 0.0) for base, value in zip(below, series.y, strict=True)]
        tops.append(below)
    return tops


def _svg(chart: Chart, scale: Scale) -> str:
    marks = _areas(chart, scale) if chart.stacked else [_line(chart, series, scale) for series in chart.series]
    label = html.escape(f"{chart.title}: {', '.join(series.name for series in chart.series)} by {chart.x_name}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'{_axes(chart, scale)}{"".join(marks)}<g class="cursor"></g></svg>'
    )


def _axes(chart: Chart, scale: Scale) -> str:
    parts = []
    for value in _y_ticks(scale):
        y = f"{scale.y(value):.1f}"
        parts.append(f'<line class="gridline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        text = compact(value, chart.percent)
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y}" dy=".32em" text-anchor="end">{text}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    for value in ticks(scale.x_low, scale.x_high, 6):
        if value == int(value):
            x = f"{scale.x(value):.1f}"
            parts.append(f'<text class="tick" x="{x}" y="{base + 15}" text-anchor="middle">{value:,.0f}</text>')
    return "".join(parts)


def _y_ticks(scale: Scale) -> list[float]:
    if not scale.log:
        return ticks(scale.y_low, scale.y_high)
    powers = range(math.floor(math.log10(scale.y_low)), math.ceil(math.log10(scale.y_high)) + 1)
    inside = [10.0**power for power in powers if scale.y_low <= 10.0**power <= scale.y_high]
    return inside if len(inside) >= 2 else ticks(scale.y_low, scale.y_high, 3)


def _line(chart: Chart, series: Series, scale: Scale) -> str:
    noisy = series.smooth and not chart.dots and len(chart.x) >= SMOOTH_FROM
    parts = [_path(chart.x, series.y, scale, f"line s{series.color}" + (" raw" if noisy else ""))]
    if noisy:
        smooth = moving_mean(series.y, max(3, len(chart.x) // 20))
        parts.append(_path(chart.x, smooth, scale, f"line s{series.color}"))
    if chart.dots:
        points = [(x, y) for x, y in zip(chart.x, series.y, strict=True) if y is not None]
        parts += [
            f'<circle class="dot s{series.color}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="2.6"/>'
            for x, y in points
        ]
    return "".join(parts)


def _path(x: list[float], y: Values, scale: Scale, css: str) -> str:
    """A path with a new sub-path after each gap; a lone point becomes a short dash."""
    commands, pen_down = [], False
    for at, value in zip(x, y, strict=True):
        if value is not None:
            point = f"{scale.x(at):.1f},{scale.y(value):.1f}"
            commands.append(f"L{point}" if pen_down else f"M{point}h.1")
        pen_down = value is not None
    return f'<path class="{css}" d="{"".join(commands)}"/>'


def _areas(chart: Chart, scale: Scale) -> list[str]:
    tops = _stack_tops(chart)
    below = [0.0] * len(chart.x)
    areas = []
    for series, top in zip(chart.series, tops, strict=True):
        there = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(chart.x, top, strict=True)]
        back = [f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in zip(chart.x, below, strict=True)][::-1]
        areas.append(f'<path class="area s{series.color}" d="M{"L".join(there + back)}Z"/>')
        below = top
    return areas


def _legend(series: Series, percent: bool) -> str:
    last = next((value for value in reversed(series.y) if value is not None), None)
    name = html.escape(series.name)
    return f'<span><i class="key s{series.color}"></i>{name} <b>{compact(last, percent)}</b></span>'


def _data(chart: Chart, scale: Scale) -> str:
    """What the read-out needs: x positions in the view box, and values as the text that is shown."""
    positions = [round(scale.x(x), 1) for x in chart.x]
    series = []
    for one in chart.series:
        heights = [None if chart.stacked or y is None else round(scale.y(y), 1) for y in one.y]
        texts = [compact(y, chart.percent) for y in one.y]
        series.append({"name": one.name, "color": one.color, "y": heights, "text": texts})
    head = {"xName": chart.x_name, "x": positions, "xText": [f"{x:,.0f}" for x in chart.x]}
    return script_json({**head, "series": series, "top": TOP, "bottom": HEIGHT - BOTTOM})
