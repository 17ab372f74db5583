"""The failure budget: when infrastructure failures stop a run."""

from __future__ import annotations

import pytest

from agentfly.core.errors import Boundary, ConfigError
from agentfly.core.task import Task
from agentfly.core.trajectory import Failure, Trajectory
from agentfly.rollouts.failure_budget import SMALLEST_WINDOW, FailureBudget


def rollout(*, spoiled):
    failure = Failure(Boundary.RESOURCE, "ResourceStartError", "no disk space", by_policy=False) if spoiled else None
    return Trajectory("r", "g", Task("go"), failure=failure)


def stopped_after(health, fates, rollouts):
    """How many rollouts have ended when the run is stopped, and what is said; None if it never is."""
    for number, spoiled in enumerate(fates, start=1):
        if error := health.record(rollout(spoiled=spoiled), rollouts=rollouts):
            return number, str(error)
    return None


def test_a_batch_that_has_lost_more_than_its_share_stops_and_says_why():
    number, said = stopped_after(FailureBudget(0.25, lambda: 8), [True] * 8, 16)
    assert number == 5
    assert "5 of 5 rollouts failed" in said
    assert "ResourceStartError (5 times), for instance: no disk space" in said


@pytest.mark.slow
def test_a_long_run_stops_soon_after_everything_begins_to_fail_however_much_was_sound_before():
    sound, health = 100_000, FailureBudget(0.5, lambda: 256)
    number, said = stopped_after(health, [False] * sound + [True] * 1000, 1_000_000)
    assert number == sound + 257
    assert "257 of the last 512 rollouts failed" in said


def test_a_run_of_unknown_length_is_stopped_too():
    assert stopped_after(FailureBudget(0.5, lambda: 8), [True] * 100, None)[0] == SMALLEST_WINDOW // 2 + 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_failures_that_are_quick_do_not_stop_a_run_with_fewer_than_its_share_of_them(share):
    """Of 256 at a time, the failing end at once and make room for others before the first sound one has ended."""
    at_a_time, begun, fates = 256, 0, []  # type: ignore[var-annotated]
    while begun - len(fates) < at_a_time:
        begun += 1
        if int(begun * share * 0.95) > int((begun - 1) * share * 0.95):
            fates.append(True)
    assert stopped_after(FailureBudget(share, lambda: at_a_time), fates, 1_000_000) is None


def test_a_share_of_one_never_stops_before_the_end():
    health = FailureBudget(1.0, lambda: 8)
    assert stopped_after(health, [True] * 1000, 1000) is None
    assert "1000 of 1000" in str(health.error_if_all_failed())
    health.record(rollout(spoiled=False), rollouts=1001)
    assert health.error_if_all_failed() is None


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        FailureBudget(share, lambda: 8)
