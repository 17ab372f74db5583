"""Disarming: text of tasks, tools and users with every part of a control token in it broken by a mark.

A chat template puts texts between control tokens that it writes itself. What it writes is told apart from the texts by
the marks: no control token in rendered text is of a text's making. A text can hold a whole token. It can also hold a
part, which a template completes by what it writes beside it: a template that writes ``<parameter=`` before the name of
an argument and ``>`` behind it makes the token ``</think>`` of an argument named ``x</think``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

from agentfly.messages import Message

MARK = "\ufdd0"
"""Breaks control tokens apart. Unicode keeps this character for a program's own use, so no text has any use for it."""

PLACE = "\ufdd1"
"""Begins and ends what stands for an assistant's words in synthetic conversations; another such character."""

_RESERVED = {ord(MARK): "\ufffd", ord(PLACE): "\ufffd"}

_WORDS_OF_TEMPLATES = frozenset({"role", "type"})
"""Fields whose values templates compare with words of theirs."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Fields of a JSON schema that hold names of somebody's choice; all other names in one are words of JSON schemas."""

_BETWEEN = "\n"
_SHORT, _REMEMBERED = 64, 4096  # names and ids come again and again

Value = TypeVar("Value")


class Disarmer:
    """Breaks control tokens, and parts of them at the ends of texts, by marks.

    Args:
        tokens: the control tokens that no text may hold or complete.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._pattern = pattern_of(tokens)
        self._beginnings = frozenset(token[:length] for token in tokens for length in range(1, len(token)))
        self._ends = frozenset(token[-length:] for token in tokens for length in range(1, len(token)))
        self._all = _BETWEEN.join(tokens)
        self._longest = max(map(len, tokens), default=0)
        self._short = lru_cache(_REMEMBERED)(self._with_marks)

    def text(self, text: str) -> str:
        """A text with marks; the same object where nothing is to be broken.

        The two characters that rendering needs for itself become U+FFFD.
        """
        if len(text) > _SHORT:
            return self._with_marks(text)
        found = self._short(text)
        return text if found == text else found

    def _with_marks(self, text: str) -> str:
        if MARK in text or PLACE in text:
            text = text.translate(_RESERVED)
        if self._pattern.search(text) is not None:
            text = self._pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        return self._with_broken_ends(text)

    def values(self, value: Any) -> Any:
        """Any value of JSON, the keys of mappings included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.values(key): self.values(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.values(item) for item in value]
        return value

    def described(self, value: Value, *, names: bool = False) -> Value:
        """What describes tools or holds a message: its texts, and those keys that are names of somebody's choice.

        Args:
            value: any value of JSON.
            names: whether the keys are such names.
        """
        if isinstance(value, str):
            return cast(Value, self.text(value))
        if isinstance(value, Mapping):
            return cast(Value, {self._key(key, names): self._field(key, item, names) for key, item in value.items()})
        if isinstance(value, (list, tuple)):
            return cast(Value, [self.described(item) for item in value])
        return value

    def calls(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The calls of an assistant's turn: all that the model has chosen in them is text."""
        return [
            {
                name: {part: self.values(own) for part, own in value.items()}
                if name == "function" and isinstance(value, Mapping)
                else self._field(name, value, False)
                for name, value in call.items()
            }
            for call in calls
        ]

    def _key(self, key: Any, named: bool) -> Any:
        if named or not isinstance(key, str):
            return self.values(key)
        return self._broken(key)

    def _field(self, key: Any, value: Any, named: bool) -> Any:
        if not named and key in _WORDS_OF_TEMPLATES:
            return self._broken(value) if isinstance(value, str) else value
        return self.described(value, names=not named and key in _NAMED)

    def _broken(self, word: str) -> str:
        """A word that templates know, where it is not a control token."""
        return self.text(word) if self._pattern.search(word) is not None or MARK in word or PLACE in word else word

    def _with_broken_ends(self, text: str) -> str:
        """Marks at the ends of a text, inside of white space there, where template and text could make a token."""
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
        return "".join((text[:at], MARK if begins else "", inner, MARK if ends else "", text[at + len(inner) :]))


def pattern_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Finds any of the tokens, the longest where several begin at one place.

    What tokens have in common at their beginnings is looked at once: some vocabularies have hundreds.
    """
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternatives(tree) if tree else r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    """The expression of what follows in a tree of characters, in which an empty one is an end."""
    parts = [re.escape(character) + _alternatives(below) for character, below in node.items() if character]
    if not parts:
        return ""
    whole = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
    return f"{whole}?" if "" in node else whole


def disarmed(messages: Sequence[Message], of_others: Disarmer, of_replies: Disarmer) -> list[Message]:
    """Messages with marks. The argument stays unchanged, and a message without anything to break stays as it is.

    Args:
        messages: the messages.
        of_others: breaks what others than assistants say, and the calls of assistants.
        of_replies: breaks what assistants say.
    """
    return [_disarmed(message, of_others, of_replies) for message in messages]


def _disarmed(message: Message, of_others: Disarmer, of_replies: Disarmer) -> Message:
    changed: dict[str, Any] = {}
    own = message["role"] == "assistant"
    for name, value in message.items():
        if name == "role":
            continue
        disarmer = of_replies if own and name in ("content", "reasoning_content") else of_others
        if isinstance(value, str):
            new: Any = disarmer.text(value)
        elif name == "tool_calls":
            new = disarmer.calls(cast(Sequence[Mapping[str, Any]], value))
        else:
            new = disarmer.described(value)
        if new is not value:
            changed[name] = new
    return cast(Message, {**message, **changed}) if changed else message
