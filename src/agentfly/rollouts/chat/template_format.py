"""TemplateChatFormat: a chat format derived from a model's own chat template, and proved when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentfly.errors import ChatFormatError
from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.chat_format import Definitions, Rendered, Reply
from agentfly.rollouts.chat.rendered import REPLY, ControlTokens

_OBSERVATION = "observation"


class TemplateChatFormat:
    """Renders the first prompt and the continuations with the template of the policy's tokenizer.

    A continuation is what the template writes after an assistant's reply: the synthetic conversation
    ``[user, assistant: REPLY, *messages]`` is rendered, and everything after REPLY is encoded. What was sampled stays
    as it is, also where the template would drop a reply's thoughts later on.

    Args:
        tokenizer: the policy's.
        answer: makes the message that answers a generation from its text, as the agent's tool-call format does. The
            format is proved with it: a template that leaves such a message out, or refuses it, is of no use.

    Raises:
        ChatFormatError: the template is not prefix-stable: once more follows an answer, it would write something else
            for it, so that the ids of a later turn would not start with those of the earlier ones. Also when it
            writes no control token after a reply, so that a turn would have no end, or leaves the answer out.
    """

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[str], Message]) -> None:
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
        self._prove(answer(_OBSERVATION))

    def prompt(self, messages: Sequence[Message], tools: Definitions = ()) -> Rendered:
        """A whole conversation, with the header of the assistant's turn at its end."""
        rendered = self._tokenizer.render(self._control.disarm(messages), add_generation_prompt=True, tools=tools)
        return Rendered(self._control.encode(rendered))

    def continuation(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[int],
        conversation: Sequence[Message],
        tools: Definitions = (),
    ) -> Rendered:
        """What follows a generation; see `ChatFormat.continuation`."""
        rendered = self._render_after_reply(self._control.disarm(messages), add_generation_prompt=True)
        ids = self._control.encode(rendered)
        ended = after[-1] in self.stop_ids
        return Rendered(ids[ids.index(self._end_of_turn) + 1 :] if ended else ids)

    def reply(self, ids: Sequence[int]) -> Reply:
        """What a generation says."""
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids)
        return Reply(text, text)

    def _render_after_reply(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        conversation: list[Message] = [*self._base, {"role": "assistant", "content": REPLY}, *messages]
        rendered = self._tokenizer.render(conversation, add_generation_prompt=add_generation_prompt)
        _, found, after = rendered.partition(REPLY)
        if not found:
            raise ChatFormatError(
                "The model's chat template leaves out an assistant's reply once other messages follow it, so a "
                "conversation cannot be continued turn by turn. Use a model with a template that keeps replies."
            )
        return after

    def _prove(self, answer: Message) -> None:
        """Compare what follows each reply in a conversation of two turns with what follows the reply of one turn.

        Only the header of the assistant's turn may be longer at the end, where it opens a turn to be sampled.
        """
        reply: Message = {"role": "assistant", "content": REPLY}
        alone = self._render_after_reply([answer], add_generation_prompt=True)
        if _OBSERVATION not in alone:
            raise ChatFormatError(
                f"The model's chat template leaves out messages of the role {answer['role']!r}, so the model would "
                "never see what its tools answer. Use a tool-call format whose results are user messages, for "
                "instance 'action', or a model whose template knows the role."
            )
        opening = self._tokenizer.render(self._base, add_generation_prompt=True)
        conversation = [*self._base, reply, answer, reply, answer]
        rendered = self._tokenizer.render(conversation, add_generation_prompt=True)
        before, first, second = rendered.split(REPLY)
        for whole, turn_by_turn, stable in (
            (before, opening, opening.startswith(before)),
            (first, alone, alone.startswith(first)),
            (second, alone, alone == second),
        ):
            if not stable:
                raise ChatFormatError(
                    "The model's chat template is not prefix-stable: it writes something else once the conversation "
                    f"goes on. As part of the whole: {_around_difference(whole, turn_by_turn)}; turn by turn: "
                    f"{_around_difference(turn_by_turn, whole)}. Use a template that keeps earlier turns as they are."
                )


def _around_difference(text: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return repr(text[max(0, at - 30) : at + 30])
