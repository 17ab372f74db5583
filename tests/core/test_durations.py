"""Durations: every setting in seconds must be a finite number."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import agentfly as af
from agentfly.core.errors import UsageError
from agentfly.core.numbers import is_duration
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.resources.model_api.client import ModelClient

NONE = (math.nan, math.inf, -1, "5", True, 10**400, None)


def a_tool(**settings: Any) -> object:
    @af.tool(**settings)
    def nothing() -> str:
        """Do nothing."""
        return ""

    return nothing


def a_reward(**settings: Any) -> object:
    @af.reward(**settings)
    def nothing() -> float:
        return 0.0

    return nothing


def test_what_counts_as_seconds() -> None:
    assert all(map(is_duration, (1, 0.5, np.float32(2), np.int64(3), Fraction(1, 3))))
    assert not any(map(is_duration, (*NONE, 0)))


@pytest.mark.parametrize("value", [value for value in NONE if value is not None], ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda value: a_tool(timeout_s=value),
        lambda value: a_reward(timeout_s=value),
        lambda value: af.Agent(model="tiny", max_wall_seconds=value),
        lambda value: af.ScriptedPolicy(["a"], seconds=value),
        lambda value: ModelClient("http://localhost:1/v1", read_timeout_s=value),
        lambda value: ContainerSpec(start_timeout_s=value),
        lambda value: EnvironmentSpec(factory=dict, call_timeout_s=value),
    ],
    ids=["tool", "reward", "agent", "scripted policy", "client", "container", "environment"],
)
def test_settings_that_are_no_durations_are_refused_by_name(make: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(UsageError, match=r"seconds|timeout_s"):
        make(value)
