"""Turns: what a chat template writes for a conversation, and what it writes after a turn of the assistant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.errors import ChatFormatError
from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.chat_format import Definitions
from agentfly.rollouts.chat.endings import CALL, endings_of
from agentfly.rollouts.chat.rendered import ControlTokens
from agentfly.rollouts.chat.shape import QUESTION, STAND_IN, UNKNOWN, shape_wanted_by
from agentfly.rollouts.chat.skeleton import behind_last_place, places_of, reply, skeleton

_STAND_INS = (STAND_IN,)

_REMEMBERED = 4
"""Sets of tools whose descriptions are kept: those of a few agents, or programs, and the stand-in."""


@dataclass(frozen=True, slots=True)
class _Described:
    """Tools as the template is given them."""

    tools: Definitions | None
    written: str
    described: list[Any]


class Turns:
    """One tokenizer's chat template, with what had to be found out about it.

    Raises:
        ChatFormatError: it has none, or one that ends turns by no control token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The tools described last, newest first; replaced as a whole, because threads may share them.
        self._described: tuple[_Described, ...] = ()
        self.control = ControlTokens(tokenizer)
        self.shape = shape_wanted_by(tokenizer)
        self.endings = endings_of(tokenizer, self.control, self.shape)
        self.control.allow_in_replies(self._inner_tokens())

    def whole(self, messages: Sequence[Message], tools: Definitions = (), *, opens: bool = True) -> str:
        """A conversation as the template writes it; ``opens`` says whether the assistant's next turn begins."""
        return self._render(self.control.disarm(messages), tools, opens=opens)

    def bare(self, messages: Sequence[Message], tools: Definitions = (), *, opens: bool = True) -> str:
        """The same with places for what the assistants say, each numbered by the position of its message."""
        canonical = self.shape.split(self.control.disarm(messages))
        return self._render(skeleton(canonical), tools, opens=opens)

    def places(self, messages: Sequence[Message], number: int) -> list[str]:
        """The places that `bare` has for the message at a position, if the template leaves none of them out."""
        return places_of(self.shape.split([messages[number]])[0], number)

    def following(self, messages: Sequence[Message], tools: Definitions = ()) -> str:
        """What the template writes from the end of a turn on, if ``messages`` answer it.

        It is what it writes after a reply in a short synthetic conversation.
        """
        answers = self.control.disarm(messages)
        calls = [_call_of(answer) for answer in answers if answer["role"] == "tool"] if tools else []
        turn = reply(0, calls=calls[:1] if self.shape.one_call else calls)
        rendered = self._render([QUESTION, turn, *answers], _STAND_INS if tools else (), opens=True)
        return rendered[self.end_of(rendered, 0) :]

    def end_of(self, rendered: str, number: int) -> int:
        """Where a turn ends: where its end-of-turn token stands.

        Raises:
            ChatFormatError: the template has written nothing of the turn, or has not ended it.
        """
        return self.end_behind(rendered, behind_last_place(rendered, number))

    def end_behind(self, rendered: str, begin: int) -> int:
        """Where a turn ends whose words end at ``begin``.

        Raises:
            ChatFormatError: the template has not ended it.
        """
        found = self.control.first_in(rendered, self.endings.ends, start=begin)
        if found is None:
            raise ChatFormatError(
                "The model's chat template does not end every turn of an assistant by the same control token, so what "
                f"follows a turn cannot be told: {rendered[begin : begin + 80]!r}. Use another template."
            )
        return found[0]

    def _render(self, disarmed: Sequence[Message], tools: Definitions, *, opens: bool) -> str:
        described = self._described_tools(tools) if tools else []
        return self._tokenizer.render(self.shape.fit(disarmed), tools=described, add_generation_prompt=opens)

    def _described_tools(self, tools: Definitions) -> list[Any]:
        for known in self._described:
            if known.tools is tools:
                return known.described
        written = repr(tools)  # unlike equality it tells orders of keys apart, and True from 1
        found = next((known for known in self._described if known.written == written), None)
        if found is None:
            # A list may be changed by its owner, so it is known by what it holds alone.
            kept = tools if isinstance(tools, tuple) else None
            found = _Described(kept, written, self.control.disarm_tools(tools))
            self._described = (found, *self._described[: _REMEMBERED - 1])
        return found.described

    def _inner_tokens(self) -> set[str]:
        """The control tokens that a turn may hold: those around thoughts and calls."""
        inner = {self.shape.thoughts.opener, self.shape.thoughts.closer}
        opening = self._render([QUESTION], (), opens=True)
        for turn in (reply(0, thinks=True), reply(0, calls=[CALL], thinks=True), reply(0, calls=[CALL])):
            try:
                rendered = self._render([QUESTION, turn, QUESTION], (), opens=False)
                stop = self.end_of(rendered, 0)
            except ChatFormatError:
                continue
            own = rendered[len(opening) : stop] if rendered.startswith(opening) else ""
            if self._writes(own):
                inner.update(self.control.in_text(own))
        ends = self.endings.ends | set(self.endings.stop_ids)
        return {token for token in inner if self._tokenizer.control_tokens.get(token) not in ends}

    def _writes(self, text: str) -> bool:
        """Whether the template takes a text for what an assistant has said; some refuse their own marks in it."""
        try:
            self._render([QUESTION, {"role": "assistant", "content": text}, QUESTION], (), opens=False)
        except ChatFormatError:
            return False
        return True


def _call_of(answer: Message) -> dict[str, Any]:
    name = answer.get("name", UNKNOWN)
    call_id = answer.get("tool_call_id", CALL["id"])
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}
