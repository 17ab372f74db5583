"""JSON values as programs may send and get them: of bounded depth, with finite numbers and whole characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic_core

from agentfly.gateway.limits import MAX_DEPTH


class UnfitValue(ValueError):
    """A JSON value that cannot be taken; the message says why."""


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        UnfitValue: it is no JSON, or a value that cannot be taken.
    """
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise UnfitValue(f"is no JSON ({error})") from None
    chars_in(value)
    return value


def chars_in(value: Any) -> int:
    """How many characters the texts in a value have, the keys of objects included.

    Raises:
        UnfitValue: it lies too deep, or holds a number that is not finite or a text that is none.
    """
    count = 0
    ahead: list[tuple[Any, int]] = [(value, 1)]
    while ahead:
        one, depth = ahead.pop()
        if isinstance(one, str):
            count += len(one)
            if not one.isascii():
                _require_text(one)
        elif isinstance(one, Mapping | list | tuple):
            if depth > MAX_DEPTH:
                raise UnfitValue(f"has values more than {MAX_DEPTH} deep in one another")
            if isinstance(one, Mapping):
                ahead.extend((key, depth + 1) for key in one)
            ahead.extend((part, depth + 1) for part in (one.values() if isinstance(one, Mapping) else one))
        elif isinstance(one, float) and one - one != 0:
            raise UnfitValue(f"holds the number {one}, which JSON does not have")
        elif isinstance(one, int) and one.bit_length() > 4_096:
            raise UnfitValue("holds a whole number of more than a thousand digits")
    return count


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnfitValue(f"holds half a character ({error.reason})") from None
