"""Truncation of long text to its head and tail, with a note about the omitted part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

MAX_ECHO_CHARS = 800
"""Maximum number of characters of the model's text that an error repeats."""

CHARS_PER_TOKEN = 4
"""Assumed characters per token without a tokenizer."""

_LONG_TOKEN_CHARS = 16  # few tokens are longer: this much text is encoded for each token that may stay

_PART = "\ufffd"  # what a part of a character is decoded to

Truncate = Callable[[str, int], str]
"""Cuts a text that has more than so many tokens down to its head and tail."""


class TokenCodec(Protocol):
    """Counts tokens: a policy's tokenizer."""

    def encode_text(self, text: str) -> Sequence[int]:
        """Ids of ordinary text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        ...


def truncate_middle(text: str, max_chars: int) -> str:
    """Return ``text`` if it has at most ``max_chars`` characters, else its head and tail and the omitted length.

    The note between the two parts comes on top of ``max_chars``.
    """
    if len(text) <= max_chars:
        return text
    tail = max_chars // 2
    return _without_middle(text, max_chars - tail, tail)


def truncate_by_characters(text: str, max_tokens: int) -> str:
    """Truncate a text without a tokenizer: four characters count as one token."""
    return truncate_middle(text, max_tokens * CHARS_PER_TOKEN)


class TokenTruncator:
    """Truncates texts by the tokens of one tokenizer. The note between head and tail does not count.

    Only the ends of a long text are encoded, so that megabytes of tool output cost no more than what the
    model will see of it.

    Args:
        coder: the tokenizer.
    """

    def __init__(self, coder: TokenCodec) -> None:
        self._coder = coder

    def __call__(self, text: str, max_tokens: int) -> str:
        """Return ``text`` if it has at most ``max_tokens`` tokens, else a head and a tail with that many together."""
        if self._fits(text, max_tokens):
            return text
        tail = max_tokens // 2
        return _without_middle(text, self._head(text, max_tokens - tail), self._tail(text, tail))

    def _fits(self, text: str, max_tokens: int) -> bool:
        if len(text.encode()) < max_tokens:
            return True  # no token is less than a byte
        begin = text[: max_tokens * _LONG_TOKEN_CHARS]
        if self._count(begin) > max_tokens:
            return False
        return len(begin) == len(text) or self._count(text) <= max_tokens

    def _count(self, text: str) -> int:
        return len(self._coder.encode_text(text))

    def _head(self, text: str, tokens: int) -> int:
        """Return the number of characters at the start that make this many tokens."""
        window = text[: tokens * _LONG_TOKEN_CHARS]
        ids = self._coder.encode_text(window)
        kept = self._coder.decode(ids[:tokens])
        while not window.startswith(kept) and kept.endswith(_PART):
            kept = kept[:-1]
        length = len(kept) if window.startswith(kept) else len(window) * tokens // len(ids)
        while length and self._count(text[:length]) > tokens:  # two parts may have more tokens than the whole
            length -= 1 + length // 16
        return length

    def _tail(self, text: str, tokens: int) -> int:
        """Return the number of characters at the end that make this many tokens."""
        if not tokens:
            return 0
        window = text[-tokens * _LONG_TOKEN_CHARS :]
        ids = self._coder.encode_text(window)
        kept = self._coder.decode(ids[-tokens:])
        while not window.endswith(kept) and kept.startswith(_PART):
            kept = kept[1:]
        length = len(kept) if window.endswith(kept) else len(window) * tokens // len(ids)
        while length and self._count(text[len(text) - length :]) > tokens:
            length -= 1 + length // 16
        return length


def _without_middle(text: str, head: int, tail: int) -> str:
    excluded = len(text) - head - tail
    return f"{text[:head]}\n[... {excluded} characters left out ...]\n{text[len(text) - tail :]}"
