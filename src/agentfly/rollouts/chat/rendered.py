"""Rendered conversations as ids, in which no text can become a control token.

A chat template mixes control tokens, which it writes itself, with text from tasks, tools and users. To tell the two
apart, every occurrence of a control token in that text is broken by a mark before the template sees it. The rendered
text is then split at the control tokens that are left, which are the template's own; the marks are taken out of the
pieces between them, and the pieces are encoded as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.disarming import MARK, Disarmer, Value, disarmed, pattern_of

MOST_KNOWN_CHARS = 40
"""The longest piece of rendered text whose ids are kept."""

MOST_KNOWN = 1000
"""Of how many pieces of rendered text the ids are kept."""


class ControlTokens:
    """The control tokens of a tokenizer, found in text, and broken in text that must not hold any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.control_tokens
        self._greedy = tokenizer.greedy_tokens
        self._pattern: re.Pattern[str] = pattern_of(self._ids)
        self._of_others = self._of_replies = Disarmer(self._ids)
        self._known: dict[str, list[int]] = {}  # ids of the template's own pieces, which come again at every turn

    def allow_in_replies(self, tokens: Collection[str]) -> None:
        """Have `disarm` leave these tokens in what assistants say: those around thoughts and calls."""
        self._of_replies = Disarmer([token for token in self._ids if token not in tokens])

    def disarm(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages with marks in all their texts wherever these hold control tokens, or parts of some.

        The argument stays unchanged. A message in which there is nothing to be broken is returned as it is. The two
        characters that rendering needs for itself become U+FFFD.
        """
        return disarmed(messages, self._of_others, self._of_replies)

    def disarm_tools(self, tools: Sequence[Value]) -> list[Value]:
        """The same for the descriptions of tools."""
        return [self._of_others.described(tool) for tool in tools]

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
