"""Rendered conversations as ids, in which no text can become a control token.

A chat template mixes control tokens, which it writes itself, with text from tasks, tools and users. To tell the two
apart, every occurrence of a control token in that text is broken by a mark before the template sees it. The rendered
text is then split at the control tokens that are left, which are the template's own; the marks are taken out of the
pieces between them, and the pieces are encoded as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer

MARK = "\ue0f1"
"""A private-use character that breaks control tokens apart."""

REPLY = "\ue0f2reply\ue0f2"
"""Stands for a generation in synthetic conversations. No disarmed text holds it."""

_RESERVED = {ord(MARK): "\ufffd", ord(REPLY[0]): "\ufffd"}


class ControlTokens:
    """The control tokens of a tokenizer, found in text, and broken in text that must not hold any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.control_tokens
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(token) for token in longest_first)) if self._ids else None

    def disarm(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages with every control token in any text of theirs broken by a mark.

        The argument stays unchanged. The two characters that rendering needs for itself become U+FFFD.
        """
        return [cast(Message, self._disarm(dict(message))) for message in messages]

    def encode(self, rendered: str) -> list[int]:
        """Ids of rendered text: control tokens as such, everything between them as ordinary text."""
        ids: list[int] = []
        for piece, control_id in self._pieces(rendered):
            if control_id is not None:
                ids.append(control_id)
            elif text := piece.replace(MARK, ""):
                ids.extend(self._tokenizer.encode_text(text))
        return ids

    def first_in(self, rendered: str) -> int | None:
        """The id of the first control token in rendered text."""
        return next((control_id for _, control_id in self._pieces(rendered) if control_id is not None), None)

    def _disarm(self, value: Any) -> Any:
        if isinstance(value, str):
            text = value.translate(_RESERVED)
            return self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text) if self._pattern else text
        if isinstance(value, Mapping):
            return {self._disarm(key): self._disarm(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._disarm(item) for item in value]
        return value

    def _pieces(self, rendered: str) -> Iterator[tuple[str, int | None]]:
        start = 0
        for found in self._pattern.finditer(rendered) if self._pattern else ():
            yield rendered[start : found.start()], None
            yield found[0], self._ids[found[0]]
            start = found.end()
        yield rendered[start:], None
