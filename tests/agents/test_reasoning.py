from __future__ import annotations

import pytest

from agentfly.formats.reasoning import Thinking, is_inside, read_thinking


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("no thinking", []),
        ("a<think>b</think>c", ["<think>b</think>"]),
        ("<think>a</think>b<think>c", ["<think>a</think>", "<think>c"]),
        ("nothing was opened</think>b", []),
        ("[THINK]a[/THINK]b", ["[THINK]a[/THINK]"]),
        ("<think>a<think>b</think>c</think>d", ["<think>a<think>b</think>"]),
    ],
)
def test_thinking_is_what_stands_between_the_markers(text: str, thought: list[str]) -> None:
    assert [text[start:stop] for start, stop in read_thinking(text).spans] == thought


def test_markers_in_skipped_spans_mean_nothing() -> None:
    assert read_thinking("(</think>)<think>a", skip=[(0, 10)]) == Thinking([(10, 18)], [], is_open=True)


def test_a_closing_marker_that_closes_nothing_ends_no_thinking() -> None:
    assert read_thinking("a</think><think>b</think>c[/THINK]") == Thinking([(9, 25)], [(1, 9), (26, 34)])


def test_a_position_is_inside_a_span_from_its_start_to_before_its_end() -> None:
    spans = [(2, 4), (6, 7)]
    assert [position for position in range(9) if is_inside(position, spans)] == [2, 3, 6]
    assert not is_inside(0, [])
