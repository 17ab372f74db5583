"""TemplateChatFormat: a chat format derived from a model's own chat template, and verified when it is created."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.core.errors import ChatFormatError
from agentfly.core.messages import Message
from agentfly.formats.chat.chat_format import (
    History,
    ParsedReply,
    RenderedTokens,
    ToolDefinitions,
    expand_image_placeholders,
)
from agentfly.formats.chat.prefix_stability import (
    ANSWER_EXCHANGE,
    ProbeExchange,
    check_prefix_stable,
    keeps_reasoning,
    require_renderable,
    with_long_answers,
    with_user_text,
)
from agentfly.formats.chat.template_renderer import TemplateRenderer, first_slot, strip_end_of_turn
from agentfly.policies.policy import Tokenizer

MIN_CHECKED_EXCHANGES = 32
MAX_CHECKED_EXCHANGES = 500
"""At least and at most so many exchanges has the conversation by which a template is proved."""


class TemplateChatFormat:
    """Renders the first prompt and the continuations with the chat template of the policy's tokenizer.

    Under ``history="keep"``, a continuation is rendered in a short synthetic conversation: a question, a reply with
    placeholders for its text, and the real messages that answer it. The template's text after the reply is the
    continuation, so the cost does not depend on the length of the real conversation. Sampled tokens stay, even if the
    template would later drop their reasoning. The constructor verifies that the template writes the same text in the
    whole conversation, with the agent's tools and answers.

    Under ``history="rewrite"``, the whole conversation is rendered at every turn. As long as the template writes the
    past as it was sent, the new part is appended. Otherwise a new sequence begins with the template's rendering. Two
    things are compared: the template's own text around each turn, and whether the turn's reasoning and text are still
    present. The text itself stays as sampled, even if the template would write its white space or JSON differently.

    Args:
        tokenizer: the policy's tokenizer.
        exchanges: the kinds of turns and answers in the agent's conversations.
        tools: the agent's tools, if the template describes them.
        system: the agent's system message, if it has one.
        history: what to do if the template renders the past differently once the conversation has continued.
        longest: the expected maximum number of turns. Conversations of this length are verified, up to
            `MAX_CHECKED_EXCHANGES`.

    Raises:
        ChatFormatError: the template rejects such a conversation, drops a part of it, or writes no control token after
            a reply, so that a turn would have no end. Under ``history="keep"`` also if it changes anything but
            reasoning once the conversation continues; the message shows the difference.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        exchanges: Sequence[ProbeExchange],
        *,
        tools: ToolDefinitions = (),
        system: Message | None = None,
        history: History = "keep",
        longest: int = 0,
    ) -> None:
        self.history = history
        self._tokenizer = tokenizer
        self._turns = turns = TemplateRenderer(tokenizer)
        self.stop_ids = turns.endings.stop_ids
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        proved = min(max(longest, MIN_CHECKED_EXCHANGES), MAX_CHECKED_EXCHANGES)
        possible = [exchange for exchange in exchanges if turns.shape.allows(exchange.turn)]
        mixed = [*possible, *map(with_long_answers, possible[-1:])]
        words = [
            *mixed,
            *(with_user_text(each) for each in possible if each.answers[-1]["role"] == "tool"),
            ANSWER_EXCHANGE,
        ]
        if history == "keep":
            for kinds in [*([each] for each in possible), mixed] if possible else ():
                check_prefix_stable(turns, kinds, tools, system, count=proved)
        require_renderable(turns, exchanges, tools, system)
        self._continues_with_user_text = self._grows(words, tools, system, proved)
        self.keeps_thoughts = all(keeps_reasoning(turns, each, tools, system, count=proved) for each in possible)

    def render_prompt(self, messages: Sequence[Message], tools: ToolDefinitions = ()) -> RenderedTokens:
        """Render a whole conversation, ending with the header of the assistant's turn."""
        ids = self._turns.control.encode(self._turns.render(messages, tools))
        return expand_image_placeholders(ids, messages, self._tokenizer)

    def render_continuation(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[int],
        conversation: Sequence[Message],
        tools: ToolDefinitions = (),
    ) -> RenderedTokens | None:
        """Render the text after a generation; see `ChatFormat.render_continuation`."""
        last = len(conversation) - len(messages) - 1
        if last >= 0 and not self._turns.shape.allows(conversation[last]):
            return None
        if self.history == "rewrite":
            text = self._following_unless_rewritten(conversation, last, tools)
        elif not self._continues_with_user_text and any(message["role"] != "tool" for message in messages):
            text = None
        else:
            text = self._turns.render_continuation(messages, tools)
        if text is None:
            return None
        ids = self._turns.control.encode(text)
        ended = len(self._said(after[-1:])) == 0 and (
            ids[0] == after[-1] or not self._turns.endings.ends_by_next_header
        )
        return expand_image_placeholders(ids[1:] if ended else ids, messages, self._tokenizer)

    def parse_reply(self, ids: Sequence[int]) -> ParsedReply:
        """Parse a generation."""
        text = self._tokenizer.decode(self._said(ids))
        thoughts = self._turns.shape.reasoning
        reasoning, content = thoughts.split(text)
        return ParsedReply(text, content, reasoning, opened=thoughts.opener if thoughts.opened else "")

    def encode_turn(
        self,
        text: str,
        *,
        reasoning: str | None = None,
        answers: Sequence[Message] = (),
        tools: ToolDefinitions = (),
    ) -> list[int]:
        """Return the ids of an assistant's turn with this text, including its end: the inverse of `parse_reply`.

        Control tokens around reasoning and calls stay control tokens; all others become ordinary text.

        Args:
            text: the text of the turn.
            reasoning: the reasoning, if it is not in the text.
            answers: the messages that answer the turn. If there are several end-of-turn tokens, they determine the one.
            tools: the same as for the prompt.
        """
        turns = self._turns
        if reasoning is not None:
            thoughts = turns.shape.reasoning
            joined = thoughts.join(reasoning, text)
            text = joined.removeprefix(f"{thoughts.opener}\n") if thoughts.opened else joined
        (disarmed,) = turns.control.escape([{"role": "assistant", "content": text}])
        following = turns.control.encode(turns.render_continuation(answers, tools)) if answers else []
        stop = following[0] if following and following[0] in self.stop_ids else self.stop_ids[0]
        return [*turns.control.encode(str(disarmed["content"])), stop]

    def _said(self, ids: Sequence[int]) -> Sequence[int]:
        return strip_end_of_turn(ids, self.stop_ids, self._control_ids)

    def _grows(
        self, exchanges: Sequence[ProbeExchange], tools: ToolDefinitions, system: Message | None, count: int
    ) -> bool:
        try:
            check_prefix_stable(self._turns, exchanges, tools, system, count=count)
        except ChatFormatError:
            return False
        return True

    def _following_unless_rewritten(
        self, conversation: Sequence[Message], last: int, tools: ToolDefinitions
    ) -> str | None:
        """Return the template text after the turn at position ``last``; None if the template rewrites that turn."""
        turns = self._turns
        try:
            sent, now = (
                turns.render_with_slots(conversation[:last], tools),
                turns.render_with_slots(conversation, tools),
            )
        except ChatFormatError:
            return None  # it now rejects the conversation, so nothing can follow
        slots = turns.slots(conversation, last)
        if not slots or not all(slot in now for slot in slots):
            return None
        before = now[: first_slot(now, last)]
        if not before.startswith(sent) and (not sent.startswith(before) or sent[len(before) :].strip()):
            return None
        try:
            return now[turns.end_of_turn(now, last) :]
        except ChatFormatError:
            return None  # the end of the turn is not known, so neither is the text after it
