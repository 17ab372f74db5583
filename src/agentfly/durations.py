"""Durations that users give: finite numbers of seconds."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeGuard

from agentfly.errors import ConfigError


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number. A bool is none, nor is a number in quotes."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def is_duration(value: object) -> TypeGuard[float]:
    """Whether a value is a number of seconds above 0."""
    return is_number(value) and value > 0


def require_durations(of: str, **given: object) -> None:
    """See that settings are numbers of seconds above 0.

    Args:
        of: what has them, for the message.
        given: the settings by name.

    Raises:
        ConfigError: one is not. ``math.inf`` is none either: a limit that never comes is no limit.
    """
    for name, value in given.items():
        if not is_duration(value):
            raise ConfigError(f"{of}({name}={value!r}): write a finite number of seconds above 0, without quotes.")
