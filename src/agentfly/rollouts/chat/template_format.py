"""TemplateChatFormat: a chat format derived from a model's own chat template, and proved when it is made."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.errors import ChatFormatError
from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.rendered import ControlTokens

_REPLY = "\ue0f2reply\ue0f2"
"""Stands for a generation in the synthetic conversations that the continuation is derived from."""


class TemplateChatFormat:
    """Renders the first prompt and the continuations with the template of the policy's tokenizer.

    A continuation is what the template writes after an assistant's reply: the synthetic conversation
    ``[user, assistant: REPLY, *messages]`` is rendered, and everything after REPLY is encoded. What was sampled stays
    as it is, also where the template would drop a reply's thoughts later on.

    Raises:
        ChatFormatError: the template is not prefix-stable: it would write something else before a reply once there is
            more after it, so that the ids of a later turn would not start with those of the earlier ones. Also when
            it writes no control token after a reply, so that a turn would have no end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self._base: list[Message] = [{"role": "user", "content": "question"}]
        after_reply = self._render_after_reply([], add_generation_prompt=False)
        end_of_turn = self._control.first_in(after_reply)
        if end_of_turn is None:
            raise ChatFormatError(
                "The model's chat template writes no control token at the end of an assistant's turn, so a turn has no "
                "end to sample. Use a model whose template ends turns, for instance with <|im_end|>."
            )
        self._end_of_turn = end_of_turn
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys(stop for stop in (end_of_turn, tokenizer.eos_id) if stop is not None)
        )
        self._prove()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation's start, with the header of the assistant's first turn."""
        rendered = self._tokenizer.render(self._control.disarm(messages), add_generation_prompt=True)
        return self._control.encode(rendered)

    def continuation(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Ids that follow a generation; see `ChatFormat.continuation`."""
        rendered = self._render_after_reply(self._control.disarm(messages), add_generation_prompt=True)
        ids = self._control.encode(rendered)
        return ids[ids.index(self._end_of_turn) + 1 :] if ended else ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of a generation, without the stop id at its end."""
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        return self._tokenizer.decode(ids)

    def _render_after_reply(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        conversation: list[Message] = [*self._base, {"role": "assistant", "content": _REPLY}, *messages]
        rendered = self._tokenizer.render(conversation, add_generation_prompt=add_generation_prompt)
        _, found, after = rendered.rpartition(_REPLY)
        if not found:
            raise ChatFormatError(
                "The model's chat template leaves out an assistant's reply once other messages follow it, so a "
                "conversation cannot be continued turn by turn. Use a model with a template that keeps replies."
            )
        return after

    def _prove(self) -> None:
        """Compare the template's render of a conversation with that of the same conversation one turn earlier."""
        reply: Message = {"role": "assistant", "content": _REPLY}
        answers: list[list[Message]] = [
            [{"role": "user", "content": "observation"}],
            [{"role": "tool", "content": "observation"}],
        ]
        opening = self._tokenizer.render(self._base, add_generation_prompt=True)
        for answer in answers:
            try:
                two_turns = self._tokenizer.render(
                    [*self._base, reply, *answer, reply, *answer], add_generation_prompt=True
                )
            except ChatFormatError:
                continue  # a template may refuse a role; a tool-call format that needs it fails when it is used
            grown = opening
            for _ in range(2):
                grown += _REPLY + self._render_after_reply(answer, add_generation_prompt=True)
            if two_turns != grown:
                at = next((i for i, (a, b) in enumerate(zip(two_turns, grown, strict=False)) if a != b), len(grown))
                raise ChatFormatError(
                    "The model's chat template is not prefix-stable: rendered as a whole, a conversation with a "
                    f"{answer[0]['role']} message differs from the same conversation rendered turn by turn. "
                    f"As a whole: …{two_turns[max(0, at - 30) : at + 30]!r}; "
                    f"turn by turn: …{grown[max(0, at - 30) : at + 30]!r}. "
                    "Use a template that keeps earlier turns as they are."
                )
