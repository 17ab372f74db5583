"""Rendered conversations as ids, in which no text can become a control token.

A chat template mixes control tokens, which it writes itself, with text from tasks, tools and users. To tell the two
apart, every occurrence of a control token in that text is broken by a mark before the template sees it. The rendered
text is then split at the control tokens that are left, which are the template's own; the marks are taken out of the
pieces between them, and the pieces are encoded as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer

MARK = "\ufdd0"
"""Breaks control tokens apart. Unicode keeps this character for a program's own use, so no text has any use for it."""

PLACE = "\ufdd1"
"""Begins and ends what stands for an assistant's words in synthetic conversations; another such character."""

MOST_KNOWN_CHARS = 40
"""The longest piece of rendered text whose ids are kept."""

MOST_KNOWN = 1000
"""Of how many pieces of rendered text the ids are kept."""

_RESERVED = {ord(MARK): "\ufffd", ord(PLACE): "\ufffd"}

Value = TypeVar("Value")


class ControlTokens:
    """The control tokens of a tokenizer, found in text, and broken in text that must not hold any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.control_tokens
        self._greedy = tokenizer.greedy_tokens
        self._pattern = _pattern(self._ids)
        self._in_replies = self._pattern
        self._known: dict[str, list[int]] = {}  # ids of the template's own pieces, which come again at every turn

    def allow_in_replies(self, tokens: Collection[str]) -> None:
        """Have `disarm` leave these tokens in what assistants say: those around thoughts and calls."""
        self._in_replies = _pattern([token for token in self._ids if token not in tokens])

    def disarm(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages with every control token in any text of theirs broken by a mark.

        The argument stays unchanged. A message in which there is nothing to be broken is returned as it is. The two
        characters that rendering needs for itself become U+FFFD.
        """
        return [self._disarm_message(message) for message in messages]

    def disarm_values(self, value: Value) -> Value:
        """The same for any value of JSON, its keys included."""
        return cast(Value, _broken(value, self._pattern))

    def encode(self, rendered: str) -> list[int]:
        """Ids of rendered text: control tokens as such, everything between them as ordinary text."""
        ids: list[int] = []
        takes_space = False
        for piece, control_id in self.pieces(rendered):
            if control_id is not None:
                ids.append(control_id)
                takes_space = piece in self._greedy and self._greedy[piece][1]
            elif text := (piece.lstrip() if takes_space else piece).replace(MARK, ""):
                ids.extend(self._known.get(text) or self._encoded(text))
        return ids

    def _encoded(self, text: str) -> list[int]:
        ids = self._tokenizer.encode_text(text)
        if len(text) <= MOST_KNOWN_CHARS and len(self._known) < MOST_KNOWN:
            self._known[text] = ids
        return ids

    def pieces(self, rendered: str) -> Iterator[tuple[str, int | None]]:
        """The control tokens in rendered text with their ids, and the text between them with None."""
        start = 0
        for found in self._pattern.finditer(rendered):
            token, text = found[0], rendered[start : found.start()]
            yield text.rstrip() if token in self._greedy and self._greedy[token][0] else text, None
            yield token, self._ids[token]
            start = found.end()
        yield rendered[start:], None

    def first_in(
        self, rendered: str, among: Collection[int] | None = None, *, start: int = 0
    ) -> tuple[int, int] | None:
        """Where the first control token (of ``among``) from ``start`` on stands in rendered text, and its id."""
        for found in self._pattern.finditer(rendered, start):
            control_id = self._ids[found[0]]
            if among is None or control_id in among:
                return found.start(), control_id
        return None

    def in_text(self, rendered: str) -> list[str]:
        """All control tokens in rendered text, in order."""
        return self._pattern.findall(rendered)

    def _disarm_message(self, message: Message) -> Message:
        if self._is_harmless(message):
            return message
        if message["role"] != "assistant":
            return self.disarm_values(message)
        own = ("content", "reasoning_content")
        return cast(
            Message,
            {
                field: _broken(value, self._in_replies if field in own else self._pattern)
                for field, value in message.items()
            },
        )

    def _is_harmless(self, message: Message) -> bool:
        """Whether all that a message holds is texts, and nothing in them is to be broken."""
        values = cast(Iterable[str], message.values())
        try:
            texts = "".join([*message, *values])
        except TypeError:
            return False
        return MARK not in texts and PLACE not in texts and self._pattern.search(texts) is None


def _pattern(tokens: Collection[str]) -> re.Pattern[str]:
    """Finds any of the tokens, the longest where several begin at one place."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _broken(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        text = value.translate(_RESERVED) if MARK in value or PLACE in value else value
        return pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
    if isinstance(value, Mapping):
        return {_broken(key, pattern): _broken(item, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_broken(item, pattern) for item in value]
    return value
