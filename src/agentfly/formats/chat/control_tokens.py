"""Control tokens: rendering of conversations such that no text from tasks, tools or users becomes a control token.

A chat template mixes its own control tokens with text. Before rendering, a mark is inserted into every control token,
or part of one, in the text. A part matters because the template may complete it. For example, a template may write
``<parameter=`` before an argument's name and ``>`` after it. An argument named ``x</think`` would then make the token
``</think>``.

The rendered text is split at the remaining control tokens, which are the template's own. The marks are removed from the
pieces between them, and the pieces are encoded as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

from agentfly.core.messages import Message
from agentfly.policies.policy import Tokenizer

ESCAPE_MARK = "\ufdd0"
"""Breaks control tokens apart. Unicode keeps this character for a program's own use, so no text has any use for it."""

SLOT_MARK = "\ufdd1"
"""Begins and ends what stands for an assistant's words in synthetic conversations; another such character."""

_RESERVED = {ord(ESCAPE_MARK): "\ufffd", ord(SLOT_MARK): "\ufffd"}

_WORDS_OF_TEMPLATES = frozenset({"role", "type"})
"""Fields whose values templates compare with words of theirs."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Fields of a JSON schema that hold names of somebody's choice; all other names in one are words of JSON schemas."""

_BETWEEN = "\n"
_SHORT, _REMEMBERED = 64, 4096  # names and ids come again and again

Value = TypeVar("Value")


class ControlTokenEscaper:
    """Inserts marks into control tokens in texts, and into parts of them at the ends of texts.

    Args:
        tokens: the control tokens that no text may contain or complete.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._pattern = pattern_of(tokens)
        self._beginnings = frozenset(token[:length] for token in tokens for length in range(1, len(token)))
        self._ends = frozenset(token[-length:] for token in tokens for length in range(1, len(token)))
        self._all = _BETWEEN.join(tokens)
        self._longest = max(map(len, tokens), default=0)
        self._short = lru_cache(_REMEMBERED)(self._with_marks)

    def escape_text(self, text: str) -> str:
        """Return a text with marks in its control tokens; the same object if there is nothing to escape.

        The two characters that rendering uses as marks become U+FFFD.
        """
        if len(text) > _SHORT:
            return self._with_marks(text)
        found = self._short(text)
        return text if found == text else found

    def _with_marks(self, text: str) -> str:
        if ESCAPE_MARK in text or SLOT_MARK in text:
            text = text.translate(_RESERVED)
        if self._pattern.search(text) is not None:
            text = self._pattern.sub(lambda found: found[0][0] + ESCAPE_MARK + found[0][1:], text)
        return self._with_broken_ends(text)

    def escape_json(self, value: Any) -> Any:
        """Escape all texts of a JSON value, including the keys of mappings."""
        if isinstance(value, str):
            return self.escape_text(value)
        if isinstance(value, Mapping):
            return {self.escape_json(key): self.escape_json(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape_json(item) for item in value]
        return value

    def escape_definition(self, value: Value, *, names: bool = False) -> Value:
        """Escape a tool description or message: its texts, and the keys that a user chose.

        Args:
            value: any JSON value.
            names: whether a user chose the keys.
        """
        if isinstance(value, str):
            return cast(Value, self.escape_text(value))
        if isinstance(value, Mapping):
            return cast(Value, {self._key(key, names): self._field(key, item, names) for key, item in value.items()})
        if isinstance(value, (list, tuple)):
            return cast(Value, [self.escape_definition(item) for item in value])
        return value

    def escape_calls(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Escape the calls of an assistant's turn: everything that the model chose in them."""
        return [
            {
                name: {part: self.escape_json(own) for part, own in value.items()}
                if name == "function" and isinstance(value, Mapping)
                else self._field(name, value, False)
                for name, value in call.items()
            }
            for call in calls
        ]

    def _key(self, key: Any, named: bool) -> Any:
        if named or not isinstance(key, str):
            return self.escape_json(key)
        return self._broken(key)

    def _field(self, key: Any, value: Any, named: bool) -> Any:
        if not named and key in _WORDS_OF_TEMPLATES:
            return self._broken(value) if isinstance(value, str) else value
        return self.escape_definition(value, names=not named and key in _NAMED)

    def _broken(self, word: str) -> str:
        """Escape a word of the message format, unless it is one without a control token."""
        return (
            self.escape_text(word)
            if self._pattern.search(word) is not None or ESCAPE_MARK in word or SLOT_MARK in word
            else word
        )

    def _with_broken_ends(self, text: str) -> str:
        """Insert marks at the ends of a text, inside its white space, if the template could complete a token."""
        inner = text.strip()
        if not inner:
            return text
        longest = min(len(inner), self._longest - 1)
        begins = len(inner) < self._longest and inner in self._all
        begins = begins or any(inner[:length] in self._ends for length in range(1, longest + 1))
        ends = any(inner[-length:] in self._beginnings for length in range(1, longest + 1))
        if not begins and not ends:
            return text
        at = text.index(inner)
        return "".join(
            (text[:at], ESCAPE_MARK if begins else "", inner, ESCAPE_MARK if ends else "", text[at + len(inner) :])
        )


def pattern_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of the tokens, the longest if several begin at a position.

    Some vocabularies have hundreds of control tokens, so a beginning that several tokens share is compared only once.
    """
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternatives(tree) if tree else r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    """Return the pattern for the rest of the tokens below a node of their prefix tree. An empty node is an end."""
    parts = [re.escape(character) + _alternatives(below) for character, below in node.items() if character]
    if not parts:
        return ""
    whole = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
    return f"{whole}?" if "" in node else whole


def escape_messages(
    messages: Sequence[Message], of_others: ControlTokenEscaper, of_replies: ControlTokenEscaper
) -> list[Message]:
    """Return messages with marks. The argument is not changed. A message without anything to escape is returned as is.

    Args:
        messages: the messages.
        of_others: escapes everything except the text of assistants, whose calls it also escapes.
        of_replies: escapes the text of assistants.
    """
    return [_disarmed(message, of_others, of_replies) for message in messages]


def _disarmed(message: Message, of_others: ControlTokenEscaper, of_replies: ControlTokenEscaper) -> Message:
    changed: dict[str, Any] = {}
    own = message["role"] == "assistant"
    for name, value in message.items():
        if name == "role":
            continue
        disarmer = of_replies if own and name in ("content", "reasoning_content") else of_others
        if isinstance(value, str):
            new: Any = disarmer.escape_text(value)
        elif name == "tool_calls":
            new = disarmer.escape_calls(cast(Sequence[Mapping[str, Any]], value))
        else:
            new = disarmer.escape_definition(value)
        if new is not value:
            changed[name] = new
    return cast(Message, {**message, **changed}) if changed else message


MAX_CACHED_PIECE_CHARS = 40
"""The longest piece of rendered text whose ids are kept."""

MAX_CACHED_PIECES = 1000
"""Of how many pieces of rendered text the ids are kept."""


class ControlTokens:
    """The control tokens of a tokenizer: finds them in rendered text, and escapes them in other text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.control_tokens
        self._greedy = tokenizer.stripping_tokens
        self._pattern: re.Pattern[str] = pattern_of(self._ids)
        self._of_others = self._of_replies = ControlTokenEscaper(self._ids)
        self._known: dict[str, list[int]] = {}  # ids of the template's own pieces, which come again at every turn

    def allow_in_replies(self, tokens: Collection[str]) -> None:
        """Do not escape these tokens in the text of assistants: those around reasoning and calls."""
        self._of_replies = ControlTokenEscaper([token for token in self._ids if token not in tokens])

    def escape(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with marks in all control tokens, and parts of them, in their texts.

        The argument is not changed. A message without anything to escape is returned as it is. The two characters that
        rendering uses as marks become U+FFFD.
        """
        return escape_messages(messages, self._of_others, self._of_replies)

    def escape_tools(self, tools: Sequence[Value]) -> list[Value]:
        """Return definitions of tools with marks in their texts; see `escape`."""
        return [self._of_others.escape_definition(tool) for tool in tools]

    def encode(self, rendered: str) -> list[int]:
        """Encode rendered text: control tokens by their ids, and everything between them as ordinary text."""
        ids: list[int] = []
        takes_space = False
        for piece, control_id in self.pieces(rendered):
            if control_id is not None:
                ids.append(control_id)
                takes_space = piece in self._greedy and self._greedy[piece][1]
            elif text := (piece.lstrip() if takes_space else piece).replace(ESCAPE_MARK, ""):
                ids.extend(self._known.get(text) or self._encoded(text))
        return ids

    def _encoded(self, text: str) -> list[int]:
        ids = self._tokenizer.encode_text(text)
        if len(text) <= MAX_CACHED_PIECE_CHARS and len(self._known) < MAX_CACHED_PIECES:
            self._known[text] = ids
        return ids

    def pieces(self, rendered: str) -> Iterator[tuple[str, int | None]]:
        """Yield the control tokens in rendered text with their ids, and the texts between them with None."""
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
        """Return the position and id of the first control token (of ``among``) in rendered text, from ``start`` on."""
        for found in self._pattern.finditer(rendered, start):
            control_id = self._ids[found[0]]
            if among is None or control_id in among:
                return found.start(), control_id
        return None

    def in_text(self, rendered: str) -> list[str]:
        """Return all control tokens in rendered text, in order."""
        return self._pattern.findall(rendered)
