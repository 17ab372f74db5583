"""Terminal output reads as a terminal shows it, for any bytes and at bounded cost."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentfly.resources.containers import terminal_output
from agentfly.resources.containers.terminal_output import COLUMNS, ROWS, render_terminal_output
from tests.support.scale import scaled


def progress(steps: int) -> str:
    bar = (f"\r\x1b[32m{i / steps:4.0%}\x1b[0m |{'█' * (40 * i // steps):40}| {i}/{steps}" for i in range(steps + 1))
    return "".join(bar) + "\n"


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        ("plain\n\ttext  \n", "plain\n\ttext  \n"),
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("100 %\rok", "ok0 %"),
        ("50 %\r\x1b[K100 %\n", "100 %\n"),
        ("\x1b[1;31merror\x1b[0m: \x1b[38;2;1;2;3mno\x1b[m", "error: no"),
        ("\x1b]0;a title\x07\x1b]8;;http://a.b\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("ab\b\bc", "cb"),
        ("m\bmo\bo", "mo"),
        ("\x1b[?25lhidden cursor\x1b[?25h\x1b(B\x1b[m\x07\x00", "hidden cursor"),
        ("one\ntwo\n\x1b[2A\x1b[2Kdone one\n\x1b[Kdone two\n", "done one\ndone two\n"),
        ("layer 1\nlayer 2\n\x1b[1F\x1b[9Cready", "layer 1\nlayer 2  ready\n"),
        ("before\n\x1b[H\x1b[2J\x1b[3Jafter", "after"),
        ("first\x1b[3;2Hthird", "first\n\n third"),
        ("shell\n\x1b[?1049hfull screen\x1b[?1049lshell again", "shell\nshell again"),
        ("shell\n\x1b[?1049hfull screen", "shell\n\nfull screen"),
        ("abcdef\x1b[3D\x1b[2P", "abcf"),
        ("abcdef\x1b[3D\x1b[2@", "abc  def"),
        ("abcdef\x1b[3D\x1b[2X", "abc  f"),
        ("one\ntwo\x1b[A\x1b[L", "\none\ntwo"),
        ("one\ntwo\nthree\x1b[A\x1b[M", "one\nthree"),
        ("cut off \x1b[38;5", "cut off "),
        ("cut off \x1b", "cut off "),
        ("\x1b]no end of this title\nmore", "]no end of this title\nmore"),
        ("\x1bPq#0;2;0;0;0#0~~@@\x1b\\picture", "picture"),
        ("\x9b31mred\x9bm", "red"),
        ("\x1b7there\x1b8here", "heree"),
    ],
)
def test_controls_are_applied_as_a_terminal_applies_them(printed: str, seen: str) -> None:
    assert render_terminal_output(printed) == seen


def test_a_progress_bar_is_what_was_drawn_last() -> None:
    assert len(progress(400)) > 20_000
    assert render_terminal_output(f"start\n{progress(400)}end") == f"start\n100% |{'█' * 40}| 400/400\nend"


def test_the_cursor_goes_no_further_than_the_screen() -> None:
    assert render_terminal_output("a\x1b[999999999999Cb") == f"a{' ' * (COLUMNS - 1)}b"
    assert render_terminal_output("a\x1b[999999999999Bb") == "a" + "\n" * (ROWS - 1) + " b"
    lines = [f"line {number}" for number in range(3 * ROWS)]
    assert (
        render_terminal_output("\n".join(lines) + "\x1b[999A\rX").split("\n")[2 * ROWS][:2] == "Xi"
    )  # what has scrolled away stays


HOSTILE = [
    "\x1b[m", "\x1b]", "\x1b[999999999Cx", "\x1b[1000@", "\x1b[100L\x1b[100B", "\x1b[A\x1b[K", "a\r", "\x1b[J\x1b[100B",
    "\x1b[2J\x1b[100Bx", "\x1b[?1049h\x1b[?1049l", "\x1b7\x1b8", "\x1b[3;3Hx", "\x1b[1000X", "\x1b[1K",
    "\x1b[" + "1;" * 50,
]  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE, ids=repr)
@pytest.mark.parametrize("before", ["", "x" * 65_536, "x" * 65_536 + "\r"], ids=["", "long line", "its begin"])
def test_no_text_becomes_longer_than_the_screen_allows(before: str, unit: str) -> None:
    text = before + unit * (65_536 // len(unit))
    seen = render_terminal_output(text)
    assert len(seen) <= len(text) + ROWS * (COLUMNS + 1)


@pytest.mark.parametrize("bound", ["MOST_CHARACTERS", "MOST_CELLS"])
def test_beyond_the_bounds_the_last_thing_written_in_each_line_is_kept(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_output, bound, 100)
    text = f"start\n{progress(50)}\x1b[1m{'wide ' * 40}\x1b[1K\r\x1b[Kend\r\n"
    assert render_terminal_output(text) == f"start\n100% |{'█' * 40}| 50/50\nend\n"


fragments = st.sampled_from(
    ["\x1b[", "\x1b]", "\x9b", "\x1bP", "\x07", "\x1b\\", ";", "2", "K", "J", "H", "\r", "\n", "\b", "a"]
)


@settings(max_examples=scaled(100, 10_000))
@given(st.lists(fragments | st.text(max_size=3), max_size=40).map("".join))
@example("\x1b[J" * 3 + "\n" * 200 + "\x1b[2J\x1b[1J\x1b[999B\x1b[M")
@example("\x1b[?1049h\n\x1b7\x1b[?1049l\x1b8\x1b[L")
def test_whatever_was_printed_there_is_a_text_without_controls_which_reads_as_itself(printed: str) -> None:
    seen = render_terminal_output(printed)
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", seen) is None
    assert render_terminal_output(seen) == seen
