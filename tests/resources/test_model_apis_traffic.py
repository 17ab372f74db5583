"""Random histories of model API calls: the server never counts more than is allowed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.resources.model_api.model_api import DEFAULT_COMPLETION_TOKENS, IMAGE_TOKENS, estimate_tokens
from agentfly.resources.model_api.usage_window import MAX_TRANSIT_S, RateLimits, UsageWindow
from agentfly.resources.process.procfs import ProcessIdentity

LIMITS = RateLimits(max_concurrency=8, requests=None, tokens=None, window_s=60.0)


def admitted(
    traffic: UsageWindow, call: str, *, now: float = 0.0, gate: str = "g", limits: RateLimits = LIMITS, tokens=10
):
    return traffic.admit(limits, gate, call, tokens, now, now + 1000) is None


# --- calls at a time ------------------------------------------------------------------------------------------------


def test_calls_at_a_time_are_halved_once_a_round_and_grow_by_one_a_round():
    traffic = UsageWindow()
    assert all(admitted(traffic, f"a{number}") for number in range(8))
    assert not admitted(traffic, "one more")
    for number in range(8):  # all of them say the same: it was one round
        traffic.settle(LIMITS, f"a{number}", 1.0 + number, outcome="slow down")
    assert traffic.allowed(LIMITS) == 4
    assert admitted(traffic, "b", now=10.0)
    traffic.settle(LIMITS, "b", 11.0, outcome="slow down")
    assert traffic.allowed(LIMITS) == 1  # one call at a time was too much, so that is the least
    ids = count()
    allowed = []
    for _ in range(1 + 2 + 3 + 4 + 5 + 6 + 7 + 30):
        call = f"c{next(ids)}"
        assert admitted(traffic, call, now=20.0)
        traffic.settle(LIMITS, call, 20.0, outcome="done")
        allowed.append(traffic.allowed(LIMITS))
    assert [allowed.index(most) + 1 for most in range(2, 9)] == [1, 3, 6, 10, 15, 21, 28]
    assert max(allowed) == 8


def test_what_only_fails_changes_nothing_about_the_calls_at_a_time():
    traffic = UsageWindow()
    assert admitted(traffic, "a")
    traffic.settle(LIMITS, "a", 1.0, outcome="failed")
    assert traffic.allowed(LIMITS) == 8


def test_a_pause_is_kept_by_everybody_and_never_shortened():
    traffic = UsageWindow()
    assert admitted(traffic, "a")
    assert admitted(traffic, "b")
    traffic.settle(LIMITS, "a", 1.0, outcome="slow down", pause_s=30.0)
    traffic.settle(LIMITS, "b", 2.0, outcome="slow down", pause_s=1.0)
    wait = traffic.admit(LIMITS, "other", "c", 1, 10.0, 1000.0)
    assert wait is not None
    assert wait.seconds == 21.0
    assert admitted(traffic, "c", now=31.0, gate="other")


# --- turns ----------------------------------------------------------------------------------------------------------


def test_gates_take_turns_whoever_asks_most():
    traffic, one = UsageWindow(), RateLimits(max_concurrency=1)
    assert admitted(traffic, "a1", gate="a", limits=one)
    assert not admitted(traffic, "a2", gate="a", limits=one)
    assert not admitted(traffic, "b1", gate="b", limits=one)
    traffic.settle(one, "a1", 1.0, outcome="done")
    assert not admitted(traffic, "b1", gate="b", limits=one, now=1.0)
    assert admitted(traffic, "a2", gate="a", limits=one, now=1.0)
    assert not admitted(traffic, "a3", gate="a", limits=one, now=1.0)
    traffic.settle(one, "a2", 1.5, outcome="done")
    assert not admitted(traffic, "a3", gate="a", limits=one, now=1.5)
    assert admitted(traffic, "b1", gate="b", limits=one, now=1.5)


def test_the_place_of_a_gate_that_asks_no_more_is_not_kept():
    traffic, one = UsageWindow(), RateLimits(max_concurrency=1)
    assert admitted(traffic, "a1", gate="a", limits=one)
    for gate in ("b", "c"):
        assert not admitted(traffic, "1", gate=gate, limits=one)
    traffic.settle(one, "a1", 0.5, outcome="done")
    traffic.leave("b")
    assert admitted(traffic, "c1", gate="c", limits=one, now=0.6)
    traffic.settle(one, "c1", 0.7, outcome="done")
    assert not admitted(traffic, "1", gate="b", limits=RateLimits(max_concurrency=0), now=0.8)
    assert admitted(traffic, "c2", gate="c", limits=one, now=50.0)  # b has not been heard of for long


def test_what_the_dead_had_under_way_frees_its_place_and_still_counts():
    traffic, limits = UsageWindow(), RateLimits(max_concurrency=1, requests=2, tokens=100)
    assert admitted(traffic, "a", gate="dead", limits=limits, tokens=60)
    traffic.bury(limits, ["dead"], 1.0)
    assert traffic.open == {}
    assert not admitted(traffic, "b", limits=limits, tokens=50, now=2.0)
    assert admitted(traffic, "b", limits=limits, tokens=40, now=2.0)


def test_a_call_nobody_settles_ends_by_itself():
    traffic, one = UsageWindow(), RateLimits(max_concurrency=1)
    assert traffic.admit(one, "a", "1", 1, 0.0, 30.0) is None
    assert not admitted(traffic, "2", now=29.0, limits=one, gate="b")
    assert admitted(traffic, "2", now=30.0, limits=one, gate="b")
    traffic.settle(one, "1", 31.0, outcome="done")  # it comes back after all, and is nobody's loss
    assert set(traffic.open) == {"2"}


# --- requests and tokens --------------------------------------------------------------------------------------------


def test_who_waits_for_a_window_is_told_how_long():
    traffic, limits = UsageWindow(), RateLimits(max_concurrency=8, requests=2, tokens=100, window_s=60.0)
    assert admitted(traffic, "a", limits=limits, tokens=50)
    traffic.settle(limits, "a", 10.0, outcome="done", tokens=50)
    assert admitted(traffic, "b", limits=limits, tokens=20, now=10.0)
    wait = traffic.admit(limits, "g", "c", 1, 10.0, 99.0)
    assert wait is not None
    assert "2 requests of 2" in wait.why
    assert wait.seconds == pytest.approx(MAX_TRANSIT_S + 60.0 - 10.0, abs=1.0)
    traffic.settle(limits, "b", 11.0, outcome="done", tokens=20)
    wait = traffic.admit(limits, "g", "c", 40, 66.0, 99.0)
    assert wait is not None
    assert "70 tokens of 100" in wait.why
    assert wait.seconds == pytest.approx(4.0, abs=1.0)
    assert admitted(traffic, "c", limits=limits, tokens=40, now=66.0 + wait.seconds)


def test_tokens_that_were_not_used_are_given_back():
    traffic, limits = UsageWindow(), RateLimits(max_concurrency=8, tokens=100)
    assert admitted(traffic, "a", limits=limits, tokens=90)
    assert not admitted(traffic, "b", limits=limits, tokens=50)
    traffic.settle(limits, "a", 1.0, outcome="done", tokens=30)
    assert admitted(traffic, "b", limits=limits, tokens=70)


def test_traffic_comes_back_from_json_as_it_was():
    traffic = UsageWindow()
    assert all(admitted(traffic, name) for name in "ab")
    traffic.settle(LIMITS, "a", 1.0, outcome="slow down", pause_s=2.0)
    traffic.admit(LIMITS, "h", "c", 1, 1.5, 2.0)
    assert UsageWindow.from_json(json.loads(json.dumps(traffic.to_json()))) == traffic


GOOD = {
    "open": {"a": ["gate", 1, 0.0, 1.0]},
    "requests": [[1.0, 2]],
    "tokens": [[1.0, 2]],
    "paused_until": 0.0,
    "allowance": 4,
    "lowered_at": 0.0,
    "successes": 0,
    "line": {"gate": 1.0},
    "processes": {"gate": asdict(ProcessIdentity.current())},
}
PARTS = [
    *[("open", bad) for bad in [{"a": ["gate", None, 0.0, 1.0]}, {"a": [1, 1, 0.0, 1.0]}, {"a": 1}, [], None]],
    *[("open", {"a": ["gate", 1, 0.0, end]}) for end in (None, "1", math.nan, math.inf)],
    *[
        (name, bad)
        for name in ("requests", "tokens")
        for bad in [[[None, 1]], [[1.0, "1"]], [[1.0, -1]], [1], {"a": 1}, 1]
    ],
    *[(name, bad) for name in ("paused_until", "lowered_at") for bad in (None, "0", math.nan, [])],  # type: ignore[var-annotated]
    *[("allowance", bad) for bad in (0, -1, "4", 1.5, [])],  # type: ignore[var-annotated]
    *[("successes", bad) for bad in (None, -1, "4")],
    *[("line", bad) for bad in ({"gate": None}, {"gate": "1"}, [], None)],  # type: ignore[var-annotated]
    *[  # type: ignore[var-annotated]
        ("processes", bad)
        for bad in ({"gate": None}, {"gate": {}}, {"gate": {**GOOD["processes"]["gate"], "pid": "1"}}, [])  # type: ignore[index]
    ],
    ("more", 1),
]


def test_traffic_that_is_whole_is_read():
    assert UsageWindow.from_json(GOOD).allowance == 4


@pytest.mark.parametrize(("part", "bad"), PARTS)
def test_traffic_of_which_a_part_is_something_else_is_refused_when_it_is_read(part, bad):
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        UsageWindow.from_json(GOOD | {part: bad})


CALLS = st.lists(
    st.tuples(
        st.floats(0, 20),  # seconds until the next one asks
        st.floats(0, 90),  # seconds that the call takes
        st.floats(0, 1),  # when the far side counts its tokens, as a part of that
        st.floats(0, 1),  # when its request arrives, as a part of the time that it may take for that
        st.integers(1, 60),  # tokens reserved
        st.floats(0, 1),  # the part of them that is used
        st.booleans(),  # whether the usage is reported
    ),
    min_size=5,
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(calls=CALLS)
def test_in_no_window_the_far_side_counts_more_than_is_allowed(calls):
    limits = RateLimits(max_concurrency=3, requests=5, tokens=150, window_s=60.0)
    traffic, now = UsageWindow(), 0.0
    arrivals: list[float] = []
    spendings: list[tuple[float, int]] = []
    under_way: list[tuple[float, str, int | None]] = []
    for number, (pause, takes, counted_at, arrives_at, reserved, part, told) in enumerate(calls):
        now += pause
        while traffic.admit(limits, "g", str(number), reserved, now, now + 1000) is not None:
            now += 0.5
            under_way = settled(traffic, limits, under_way, now)
        assert len(traffic.open) <= limits.max_concurrency
        used = max(1, int(reserved * part))
        arrivals.append(now + arrives_at * min(takes, MAX_TRANSIT_S))
        spendings.append((now + counted_at * takes, used))
        under_way.append((now + takes, str(number), used if told else None))
        under_way = settled(traffic, limits, under_way, now)
    for start in arrivals:
        assert sum(1 for at in arrivals if start <= at < start + limits.window_s) <= limits.requests
    for start, _ in spendings:
        assert sum(used for at, used in spendings if start <= at < start + limits.window_s) <= limits.tokens


def settled(traffic: UsageWindow, limits: RateLimits, under_way: list[tuple[float, str, int | None]], now: float):
    """Settle what has ended; what goes on comes back."""
    for ends, call, used in sorted(under_way):
        if ends <= now:
            traffic.settle(limits, call, ends, outcome="done", tokens=used)
    return [one for one in under_way if one[0] > now]


# --- estimates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 300, "max_tokens": 50}, 150),
        ({"prompt": [1, 2, 3], "max_tokens": 50, "n": 4}, 203),
        ({"prompt": "xyz"}, 1 + DEFAULT_COMPLETION_TOKENS),
        ({"prompt": "é" * 3, "max_completion_tokens": 1}, 3),
        ({"messages": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 10**6}}], "max_tokens": 1}, 1501),
    ],
)
def test_what_a_request_may_take_is_guessed(body, tokens):
    assert IMAGE_TOKENS == 1500
    assert estimate_tokens(body) == tokens
