"""Excerpts: long text cut down to its head and tail, saying what was left out."""

from __future__ import annotations

ECHO_CHARS = 800
"""How much of what the model wrote an error repeats to it, in characters."""


def excerpt(text: str, max_chars: int) -> str:
    """``text`` if it has at most ``max_chars`` characters, else its head and tail, with what was left out counted.

    The note between the two parts comes on top of ``max_chars``.
    """
    if len(text) <= max_chars:
        return text
    tail = max_chars // 2
    head = max_chars - tail
    left_out = len(text) - max_chars
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[len(text) - tail :]}"
