"""Anchor: the state in which a turn is taken, as a short name that equal states share."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentfly.images import Image
from agentfly.messages import Message, images_of, text_of
from agentfly.trajectory import ToolRecord, Trajectory, Turn

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def anchor_of(state: Any) -> str:
    """A hash of a state: the same in every process, for every order of the keys in it.

    Numbers count by their value (``1`` is ``1.0``), tuples as lists.
    """
    return _hash(_CANONICAL.encode(_plain(state)))


class Situation:
    """What the environment of one conversation has returned, as far as it says in which state the next turn is taken.

    That is the state that a tool gave last (`agentfly.agents.tool.ToolResult.state`), with the observations that came
    since. Without one it is the last turn's observations and, before the first, the conversation's opening.

    Args:
        opening: the messages before the first turn. What the system is told is no part of it.
    """

    def __init__(self, opening: Sequence[Message]) -> None:
        asked = [message for message in opening if message["role"] != "system"]
        self._states: list[Any] = []
        self._seen: list[Any] = [  # nothing but texts
            [one["role"], text_of(one["content"]), _names(images_of(one["content"]))] for one in asked
        ]
        self._anchor: str | None = None

    @property
    def anchor(self) -> str:
        """The anchor of a turn that is taken now."""
        if self._anchor is None:
            self._anchor = _hash(self.text)
        return self._anchor

    @property
    def text(self) -> str:
        """What the anchor is a hash of: the state as JSON, images by their own hashes."""
        return _CANONICAL.encode([_plain(self._states), self._seen])

    def changed(self, results: Sequence[ToolRecord]) -> None:
        """A turn's calls were answered."""
        states = [result.state for result in results if result.state is not None]
        if states:
            self._states, self._seen = states, []
        else:
            self._seen = [[result.observation, _names(result.images)] for result in results]
        self._anchor = None


def states_of(trajectory: Trajectory) -> list[str]:
    """For each turn, the state in which it was taken as text, of which its anchor is the hash.

    It is worked out from the trajectory. Empty where a turn has no anchor.
    """
    situations: dict[str, Situation] = {}
    states = []
    for turn in trajectory.turns:
        if turn.conversation not in situations:
            situations[turn.conversation] = Situation(_opening(trajectory, turn))
        situation = situations[turn.conversation]
        states.append(situation.text if turn.anchor else "")
        if turn.results:
            situation.changed(turn.results)
    return states


def _opening(trajectory: Trajectory, first: Turn) -> Sequence[Message]:
    if not first.conversation:
        return trajectory.task.messages
    messages = trajectory.subagents.get(first.conversation, [])
    return list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))


def _names(images: Iterable[Image]) -> list[str]:
    return [_hash(image.url) for image in images]


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
