"""Validation of numbers from users: durations, counts, shares and sizes in bytes."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, TypeGuard

from agentfly.core.errors import ConfigError


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number. Booleans and numbers in quotes are not numbers."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def is_duration(value: object) -> TypeGuard[float]:
    """Whether a value is a number of seconds above 0."""
    return is_finite_number(value) and value > 0


def require_durations(of: str, **given: object) -> None:
    """Raise unless settings are finite numbers of seconds above 0.

    Args:
        of: owner of the settings, for the message.
        given: the settings by name.

    Raises:
        ConfigError: a setting is not a duration. ``math.inf`` is not accepted either.
    """
    for name, value in given.items():
        if not is_duration(value):
            raise ConfigError(f"{of}({name}={value!r}): write a finite number of seconds above 0, without quotes.")


def is_whole(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is an integer of at least ``least``. Booleans and numbers in quotes are not integers."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def require_whole(of: str, *, least: int | None = 1, **given: object) -> None:
    """Raise unless settings are integers.

    Args:
        of: owner of the settings, for the message.
        least: minimum value; None for any integer.
        given: the settings by name.

    Raises:
        ConfigError: a setting is not an integer of at least ``least``.
    """
    for name, value in given.items():
        if not is_whole(value, least):
            wanted = "a whole number" if least is None else f"a whole number of at least {least}"
            raise ConfigError(f"{of}({name}={value!r:.100}): it must be {wanted}{_unquoted(value)}.")


def require_number(of: str, *, least: float, most: float | None = None, **given: object) -> None:
    """Raise unless settings are finite numbers within a range. Arguments and errors as in `require_whole`."""
    for name, value in given.items():
        if not is_finite_number(value) or value < least or (most is not None and value > most):
            wanted = f"a finite number of at least {least:g}"
            if most is not None:
                wanted = f"a number from {least:g} to {most:g}"
            raise ConfigError(f"{of}({name}={value!r:.100}): it must be {wanted}{_unquoted(value)}.")


def _unquoted(value: Any) -> str:
    return ", without quotes" if isinstance(value, str) else ""


_UNITS = {
    "": 1,
    "b": 1,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_byte_size(size: int | str) -> int:
    """Return the number of bytes of a size such as ``"512MiB"``, ``"2GB"``, ``"1Gi"`` or ``1024``.

    Raises:
        ConfigError: the text is not a size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    text = str(size).strip().lower()
    number = text.rstrip("bkmgti ")
    unit = text[len(number) :].strip()
    try:
        count = float(number)
        if unit in ("k", "m", "g", "t"):
            raise ConfigError(
                f"{size!r} is not a size in bytes, because a unit of one letter counts by 1024 to some programs, such "
                f"as Docker, and by 1000 to others, such as Kubernetes. Write '{number.strip()}{unit.upper()}iB' or "
                f"'{number.strip()}{unit.upper()}B'."
            )
        if (bytes_ := int(count * _UNITS[unit])) < 0:
            raise ValueError(size)
        return bytes_
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(
            f"{size!r} is not a size in bytes. Write a number and a unit, for instance '512MiB' or '2GB'."
        ) from None
