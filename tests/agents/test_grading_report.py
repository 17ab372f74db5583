"""The report of hidden tests: only signed, complete records count, and forged ones raise nothing."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.agents.grading.pytest_harness import signed_record_writer
from agentfly.agents.grading.test_report import TestReport, read_report

KEY = "the key"
NAMES = ["tests/test_a.py::test_one", "tests/test_a.py::test_two"]
CANARY = "tests/test_a_again.py::test_one_again"


def phases(test: str, *outcomes: str) -> list[dict[str, object]]:
    whens = ["setup", *["call"] * (len(outcomes) - 2), "teardown"]
    return [
        {"kind": "phase", "id": test, "when": when, "outcome": how} for when, how in zip(whens, outcomes, strict=True)
    ]


GOOD = ("passed", "passed", "passed")
FAILED = ("passed", "failed", "passed")
END = {"kind": "end", "code": 1, "changed": []}
SOUND = [*phases(NAMES[0], *GOOD), *phases(NAMES[1], *GOOD), *phases(CANARY, *FAILED), END]


def signed(records: list[dict[str, object]], key: str = KEY) -> bytes:
    heard, spoken = os.pipe()
    say = signed_record_writer(spoken, key.encode())
    for record in records:
        say(record)
    os.close(spoken)
    with os.fdopen(heard, "rb") as pipe:
        return pipe.read()


def read(report: bytes, *, timed_out: bool = False) -> TestReport:
    found = {"report": report.decode("latin-1"), "output": "printed", "timed_out": timed_out, "seconds": 1.5}
    return read_report(found, NAMES, [CANARY], KEY)


def test_what_is_signed_to_its_end_counts():
    report = read(signed(SOUND))
    assert (report.passed, report.failed, report.problem, report.seconds) == (tuple(NAMES), (), "", 1.5)


@pytest.mark.parametrize(
    ("outcomes", "passes"),
    [
        (GOOD, True),
        (("passed", "passed", "passed", "passed"), True),
        (("passed", "passed", "failed", "passed"), False),
        (FAILED, False),
        (("passed", "skipped", "passed"), False),
        (("passed", "xfailed", "passed"), False),
        (("passed", "passed", "failed"), False),
        (("failed", "passed"), False),
    ],
)
def test_a_test_passes_if_all_its_phases_do(outcomes, passes):
    report = read(signed([*phases(NAMES[0], *outcomes), *phases(CANARY, *FAILED), END]))
    assert (NAMES[0] in report.passed) is passes
    assert NAMES[1] in report.failed


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (SOUND[:-1], "ended before all tests had"),
        ([], "ended before all tests had"),
        ([*SOUND[:-1], {**END, "changed": ["_pytest.python.Function.runtest"]}], "changed pytest: _pytest.python"),
        ([*SOUND[:6], *phases(CANARY, *GOOD), END], "A test passed that cannot pass"),
        ([*SOUND[:6], END], "did not run"),
        ([*SOUND, SOUND[0]], "something stands behind its end"),
        ([*SOUND, END], "something stands behind its end"),
        ([{"id": "no kind"}, *SOUND], "tampered"),
        ([{"kind": "phase"}, *SOUND], "tampered"),
        ([*SOUND[:-1], {"kind": "end"}], "tampered"),
        ([*SOUND[:-1], {**END, "changed": 5}], "tampered"),
        ([{**SOUND[0], "id": ["a list"]}, *SOUND], "tampered"),
    ],
)
def test_where_anything_is_odd_nothing_counts(records, problem):
    report = read(signed(records))
    assert report.passed == ()
    assert problem in report.problem


def test_tests_that_were_killed_for_the_time_are_told_apart_and_their_last_record_may_be_cut():
    report = read(signed(SOUND)[:-50], timed_out=True)
    assert (report.passed, "time was up" in report.problem) == ((), True)


WHOLE = signed(SOUND)


@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_no_byte_can_be_changed_added_or_taken_away(place, put, taken):
    forged = WHOLE[:place] + put + WHOLE[place + taken :]
    if forged != WHOLE:
        assert read(forged).passed == ()


@given(st.binary(max_size=200) | st.lists(st.sampled_from([*WHOLE.splitlines(keepends=True), b"\n"])).map(b"".join))
def test_whatever_else_is_said_counts_nothing_and_raises_nothing(said):
    assert read(said).passed == () or said == WHOLE
    assert read(signed(SOUND, "another key") + said).passed == ()
