"""Numbers with their nouns, as they are read out: one step, two steps."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number and the noun, which takes an s unless there is one of it."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
