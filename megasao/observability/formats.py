"""How numbers look, in the panel, the summary and the report. A missing number is ``-``, never 0."""

import itertools
import math

MISSING = "-"
BARS = "▁▂▃▄▅▆▇█"


def finite(value: object) -> float | None:
    """``value`` as a float, or None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: float | None, digits: int = 3) -> str:
    """Fixed point; scientific where fixed point would show nothing or too much."""
    if value is None:
        return MISSING
    if value != 0 and not 10**-digits <= abs(value) < 1e6:
        return f"{value:.{max(0, digits - 1)}e}"
    return f"{value:,.{digits}f}"


def share(value: float | None, digits: int = 1) -> str:
    """A fraction of 1 as a percentage."""
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def count(value: float | None) -> str:
    """A whole number with thousands separators."""
    return MISSING if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """``42 s``, ``3:05``, ``1:02:03``."""
    if seconds is None:
        return MISSING
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: list[float], width: int) -> str:
    """Bars of the last values, averaged into at most ``width`` cells, scaled to their own minimum and maximum."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    cells = min(width, len(finite))
    edges = [round(index * len(finite) / cells) for index in range(cells + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[3] * cells
    return "".join(BARS[min(7, int(8 * (value - low) / (high - low)))] for value in means)
