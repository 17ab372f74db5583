"""Check that a chat template renders a conversation turn by turn exactly as it renders it as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Self, cast

from agentfly.core.errors import ChatFormatError
from agentfly.core.messages import Message, ToolCall, text_of
from agentfly.formats.chat.chat_format import ChatFormat, ToolDefinitions
from agentfly.formats.chat.template_capabilities import PROBE_QUESTION
from agentfly.formats.chat.template_renderer import SlotKind, TemplateRenderer, first_slot, spans_of
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat, call_id, message_with_calls
from agentfly.policies.policy import Tokenizer

_AROUND = 8


def drift_from_whole(
    chat: ChatFormat,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    conversation: Sequence[Message],
    tools: ToolDefinitions = (),
) -> str | None:
    """Describe where ids differ from a rendering of the whole conversation; None if they do not.

    In real rollouts a difference is normal, because the encoding of a sampled text often differs from the sampled ids.
    The function is for conversations whose turns were encoded from text. It renders the whole conversation, so it costs
    more than a turn.

    Args:
        chat: the format that rendered the ids.
        tokenizer: the policy's tokenizer.
        ids: all ids sent and sampled, including the header of the assistant's next turn.
        conversation: the conversation as messages.
        tools: the same as for the prompt.
    """
    whole = list(chat.render_prompt(conversation, tools).ids)
    sent = list(ids)
    if whole == sent:
        return None
    at = first_difference(whole, sent)
    around = slice(max(0, at - _AROUND), at + _AROUND)
    return (
        f"The ids differ from token {at} on ({len(sent)} sent, {len(whole)} in the whole). Sent: "
        f"{tokenizer.decode(sent[around])!r} {sent[around]}; in the whole: {tokenizer.decode(whole[around])!r} "
        f"{whole[around]}."
    )


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first position at which two sequences differ; the length of the shorter one if it is a prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class ProbeExchange:
    """An example of one kind of exchange: an assistant's turn and the messages that answer it."""

    turn: Message
    answers: tuple[Message, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "answers", tuple(self.answers))

    @classmethod
    def calling(cls, tool: str, count: int, calls: ToolCallFormat) -> ProbeExchange:
        """Return a turn with this many tool calls and their results, written by a tool-call format."""
        made = [ToolCall(call_id(number), tool) for number in range(count)]
        plain: Message = {"role": "assistant", "content": "calls"}
        answers = (calls.result_message(call, f"observation {number}") for number, call in enumerate(made))
        return cls(message_with_calls("", made) if calls.uses_chat_template else plain, tuple(answers))


_SEEN = 30
"""So many characters of an answer must be written. What a template leaves out of long ones is its own affair."""

_LENGTHY = "and many more lines of the same kind " * 120

ANSWER_EXCHANGE = ProbeExchange(
    {"role": "assistant", "content": "answer"}, ({"role": "user", "content": "the next question"},)
)
"""A turn without calls, and what a user says to it."""


def without_own_text(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation without the assistant's own text. Only text of agent, task and tools is left."""
    return [
        ANSWER_EXCHANGE.turn
        if message["role"] == "assistant"
        else cast(Message, {name: value for name, value in message.items() if name != "name"})
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def with_long_answers(exchange: ProbeExchange) -> ProbeExchange:
    """Return the exchange with answers of several thousand characters, which some templates shorten later."""
    answers = [{**answer, "content": f"{text_of(answer['content'])} {_LENGTHY}"} for answer in exchange.answers]
    return ProbeExchange(exchange.turn, tuple(cast(list[Message], answers)))


def with_user_text(exchange: ProbeExchange) -> ProbeExchange:
    """Return the exchange with a user message after the answers, as memory adds it."""
    return ProbeExchange(exchange.turn, (*exchange.answers, *ANSWER_EXCHANGE.answers))


def degenerate_exchanges(exchanges: Sequence[ProbeExchange]) -> list[ProbeExchange]:
    """Return these exchanges, and variants that can occur in a rollout.

    The variants are: unparsable calls, which stay as text before their results; user text after the results, as memory
    adds it; and a turn with or without text before a user message.
    """
    reply, question = ANSWER_EXCHANGE.turn, ANSWER_EXCHANGE.answers[0]
    kinds = [ANSWER_EXCHANGE, ProbeExchange({**reply, "content": ""}, (question,))]
    for exchange in exchanges:
        kinds += [exchange, ProbeExchange(reply, exchange.answers)]
        if exchange.answers[-1]["role"] == "tool":
            kinds.append(with_user_text(exchange))
    return kinds


def require_renderable(
    turns: TemplateRenderer, exchanges: Sequence[ProbeExchange], tools: ToolDefinitions, system: Message | None = None
) -> None:
    """Check that the template can render conversations of these exchanges and of their `degenerate_exchanges`.

    Raises:
        ChatFormatError: the template rejects one, or leaves an answer out.
    """
    for kind in degenerate_exchanges(exchanges):
        require_answers_rendered(turns.render(_conversation([kind, kind], system)[1], tools), kind)


def check_prefix_stable(
    turns: TemplateRenderer,
    exchanges: Sequence[ProbeExchange],
    tools: ToolDefinitions,
    system: Message | None,
    *,
    count: int,
) -> None:
    """Check that a conversation renders turn by turn as it renders as a whole. The kinds of exchanges take turns in it.

    The two may differ at the beginning of a turn. The header at the end of a conversation may open the reasoning. A
    past turn may begin with text that the model itself writes when the turn is the last.

    Args:
        turns: the template.
        exchanges: the kinds of exchanges.
        tools: the tools, if the template describes them.
        system: the system message, if there is one.
        count: number of exchanges of the conversation. Some templates leave out or shorten old ones.

    Raises:
        ChatFormatError: the renderings differ in more than reasoning, or something is left out.
    """
    kinds = [_ProbedExchange.of(turns, exchange, tools, system) for exchange in exchanges]
    opening, conversation, numbers = _conversation(list(islice(cycle(exchanges), count)), system)
    whole = turns.render_with_slots(conversation, tools)
    spans, end, by_turn = spans_of(whole), 0, turns.render(opening, tools)
    for number, kind in zip(numbers, cycle(kinds), strict=False):
        span = spans.get(number)
        if span is None or not kind.kinds <= span.kinds:
            raise _left_out(conversation, number)
        if not _agree(turns, whole[end : span.start], by_turn, kind.beginning):
            raise _difference(whole[end : span.start], by_turn)
        end, by_turn = turns.end_of_turn_after(whole, span.stop), kind.answered
    if whole[end:] != by_turn:
        raise _difference(whole[end:], by_turn)


@dataclass(frozen=True)
class _ProbedExchange:
    """A kind of exchange, and how a template renders it at the end of a short conversation.

    Attributes:
        beginning: the start of its turn after the header, when the turn is the last.
        answered: the text after its turn.
        kinds: the parts of its turn that are rendered.
    """

    beginning: str
    answered: str
    kinds: frozenset[SlotKind]

    @classmethod
    def of(
        cls, turns: TemplateRenderer, exchange: ProbeExchange, tools: ToolDefinitions, system: Message | None
    ) -> Self:
        opening, conversation, [number] = _conversation([exchange], system)
        start = turns.render(opening, tools)
        first_slot(
            written := turns.render_with_slots(conversation, tools), number
        )  # raises where it leaves the turn out
        own = _own_beginning(turns, conversation[: number + 1], start, tools)
        answered = turns.render_continuation(exchange.answers, tools)
        require_answers_rendered(answered, exchange)
        return cls(own, answered, spans_of(written)[number].kinds)


def keeps_reasoning(
    turns: TemplateRenderer, exchange: ProbeExchange, tools: ToolDefinitions, system: Message | None, *, count: int
) -> bool:
    """Return whether the template still renders a turn's reasoning after the conversation has continued."""
    thinking = ProbeExchange({**exchange.turn, "reasoning_content": "thought"}, exchange.answers)
    opening, conversation, _ = _conversation([thinking] * count, system)
    asked = turns.slots(conversation, len(opening))
    written = spans_of(turns.render_with_slots(conversation, tools)).get(len(opening))
    return not any("reasoning" in each for each in asked) or (written is not None and "reasoning" in written.kinds)


def require_answers_rendered(rendered: str, exchange: ProbeExchange) -> None:
    """Check that a rendered text contains the answers.

    Raises:
        ChatFormatError: an answer is missing.
    """
    for answer in exchange.answers:
        if text_of(answer["content"])[:_SEEN] not in rendered:
            raise ChatFormatError(
                f"The model's chat template leaves out messages of the role {answer['role']!r}, so the model would "
                "never see the results of its tools. Use a tool-call format whose results are user messages, for "
                "instance 'action', or a model whose template supports the role."
            )


def _conversation(
    exchanges: Sequence[ProbeExchange], system: Message | None
) -> tuple[list[Message], list[Message], list[int]]:
    """Return the start of a conversation, the whole of it, and the positions of its turns."""
    opening = [*([system] if system else []), PROBE_QUESTION]
    conversation, numbers = [*opening], []
    for exchange in exchanges:
        numbers.append(len(conversation))
        conversation += [exchange.turn, *exchange.answers]
    return opening, conversation, numbers


def _own_beginning(turns: TemplateRenderer, conversation: Sequence[Message], start: str, tools: ToolDefinitions) -> str:
    """Return the text at the start of the last turn, after its header."""
    try:
        rendered = turns.render_with_slots(conversation, tools, opens=False)
    except ChatFormatError:
        return ""
    beginning = rendered[: first_slot(rendered, len(conversation) - 1)]
    header = turns.shape.reasoning.without_opening_marker(start)
    return beginning[len(header) :] if beginning.startswith(header) else ""


def _agree(turns: TemplateRenderer, in_whole: str, by_turn: str, own: str) -> bool:
    reasoning = turns.shape.reasoning
    header = reasoning.without_opening_marker(by_turn)
    if in_whole.startswith(header):
        return reasoning.without_markers(in_whole[len(header) :]) == reasoning.without_markers(own)
    return header.startswith(in_whole) and not reasoning.without_markers(header[len(in_whole) :])


def _left_out(conversation: Sequence[Message], number: int) -> ChatFormatError:
    return ChatFormatError(
        "The model's chat template is not prefix-stable: in a conversation of "
        f"{len(conversation)} messages it no longer writes all text and calls of the assistant in message "
        f"{number + 1}. Set Agent(history='rewrite') to begin a new sequence where it leaves something out, or use "
        "a template that keeps earlier turns as they are."
    )


def _difference(in_whole: str, by_turn: str) -> ChatFormatError:
    return ChatFormatError(
        "The model's chat template is not prefix-stable: it writes past turns differently once the conversation "
        f"continues. As part of the whole: {_around_difference(in_whole, by_turn)}; turn by turn: "
        f"{_around_difference(by_turn, in_whole)}. Set Agent(history='rewrite') to begin a new sequence in this case, "
        "or use a template that keeps earlier turns as they are."
    )


def _around_difference(text: str, other: str) -> str:
    at = first_difference(text, other)
    return repr(text[max(0, at - 40) : at + 40])
