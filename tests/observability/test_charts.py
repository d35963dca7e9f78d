"""Charts: gaps stay gaps, ticks are round, everything is finite and inside the plot."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasao.observability.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Series,
    compact,
    moving_mean,
    render,
    ticks,
)

finite = st.floats(-1e9, 1e9, allow_nan=False)
values = st.lists(st.none() | finite, min_size=1, max_size=80)


def chart(y: list[float | None], **options: bool) -> Chart:
    return Chart("T", "n", "step", [float(x) for x in range(len(y))], [Series("s", y, 1)], **options)  # type: ignore[arg-type]


@given(values, st.booleans(), st.booleans())
def test_everything_drawn_is_inside_the_plot(y: list[float | None], dots: bool, from_zero: bool) -> None:
    svg = render(chart(y, dots=dots, from_zero=from_zero))
    assert "nan" not in svg and "inf" not in svg
    points = [tuple(map(float, point)) for point in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", svg)]
    assert (len(points) > 0) == any(value is not None for value in y)
    for x, at in points:
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1 and TOP - 0.1 <= at <= HEIGHT - BOTTOM + 0.1


def test_a_missing_value_is_a_gap_not_a_zero_and_not_a_bridge() -> None:
    (path,) = re.findall(r'd="([^"]*)"', render(chart([1.0, 2.0, None, 4.0, 5.0])))
    assert path.count("M") == 2 and path.count("L") == 2
    (whole,) = re.findall(r'd="([^"]*)"', render(chart([1.0, 2.0, 3.0, 4.0, 5.0])))
    assert whole.count("M") == 1 and whole.count("L") == 4  # negative control
    assert moving_mean([1.0, None, 3.0], 3) == [1.0, None, 3.0]


def test_a_higher_value_is_drawn_higher() -> None:
    (path,) = re.findall(r'd="([^"]*)"', render(chart([1.0, 2.0, 3.0])))
    heights = [float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", path)]
    assert heights[0] > heights[1] > heights[2]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)


def test_a_series_over_decades_gets_a_logarithmic_axis() -> None:
    assert "logarithmic" in render(chart([1000.0, *[1.0] * 20]))
    assert "logarithmic" not in render(chart([2.0, *[1.0] * 20]))
    assert "logarithmic" not in render(chart([1000.0, 0.0, *[1.0] * 20]))


@given(finite, st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    high = low + span
    found = ticks(low, high)
    assert len(found) <= 9
    assert all(low - 1e-6 * span - 1e-9 * abs(low) <= t <= high + 1e-6 * span + 1e-9 * abs(high) for t in found)


def test_ticks_are_round() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.52, 0.93) == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert ticks(3, 3) == [3]


@pytest.mark.parametrize("y", [0.0, 1.0, 0.5])
def test_a_share_has_no_axis_outside_0_to_1(y: float) -> None:
    labels = re.findall(r'text-anchor="end">([^<]*)<', render(chart([y, y], percent=True)))
    assert len(labels) >= 2 and all(0 <= float(label.removesuffix(" %")) <= 100 for label in labels)
    assert any(label.startswith("-") for label in re.findall(r'text-anchor="end">([^<]*)<', render(chart([0.0, 0.0]))))


def test_long_series_are_means_of_equal_runs() -> None:
    y: list[float | None] = [float(i % 2) for i in range(2 * MAX_POINTS)]
    drawn = render(chart(y))
    assert "each point is a mean of 2 steps" in drawn and ">0.5<" in drawn
    assert "each point" not in render(chart(y[:MAX_POINTS]))


def test_stacked_areas_add_up() -> None:
    both = Chart("T", "n", "step", [0.0, 1.0], [Series("a", [1.0, 1.0], 1), Series("b", [3.0, None], 2)], stacked=True)
    first, second = re.findall(r'class="area[^"]*" d="M([^"]*)Z"', render(both))
    heights = [[HEIGHT - BOTTOM - float(p.split(",")[1]) for p in area.split("L")] for area in (first, second)]
    assert heights[1][0] == pytest.approx(4 * heights[0][0], rel=0.02)
    assert heights[1][1] == pytest.approx(heights[0][1], rel=0.02)


def test_compact_numbers() -> None:
    assert [compact(v) for v in (None, 0.0, 0.00042, 0.5, 12345.6, 3.2e7)] == [
        "-",
        "0",
        "4.2e-4",
        "0.5",
        "12,346",
        "3.2e7",
    ]
    assert compact(0.1234, percent=True) == "12.3 %"
