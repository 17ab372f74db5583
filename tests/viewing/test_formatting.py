from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentfly.viewing.formatting import bar_chart, sparkline

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(values, st.integers(1, 80))
def test_a_sparkline_has_one_row_and_keeps_its_width(numbers, width):
    line = sparkline(numbers, width)
    assert len(line) == min(width, len(numbers))
    assert set(line) <= set("▁▂▃▄▅▆▇█")


@given(values, st.integers(1, 80), st.integers(2, 12))
def test_a_chart_keeps_its_size_whatever_the_values(numbers, width, height):
    lines = bar_chart(numbers, width=width, height=height).splitlines()
    assert len(lines) == height + 2
    bars = [line.split("┤", 1)[1] for line in lines[:height]]
    assert all(len(bar) <= width for bar in bars)


def test_a_rising_curve_rises_in_the_chart():
    lines = bar_chart([0.0, 0.25, 0.5, 0.75, 1.0], width=5, height=4).splitlines()
    assert lines[0] == "  1.00 ┤    █"
    assert lines[3] == "  0.00 ┤ ████"
    assert lines[5].split() == ["1", "5"]


def test_missing_values_are_described_in_words():
    assert sparkline([]) == ""
    assert "no values" in bar_chart([])
