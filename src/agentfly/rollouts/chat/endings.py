"""Endings: which control tokens end an assistant's turn, by what a chat template writes after one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentfly.errors import ChatFormatError
from agentfly.messages import Message
from agentfly.policies.policy import Tokenizer
from agentfly.rollouts.chat.rendered import ControlTokens
from agentfly.rollouts.chat.shape import QUESTION, STAND_IN, MessageShape
from agentfly.rollouts.chat.skeleton import behind_last_place, reply

CALL = {"id": "call_0", "type": "function", "function": {"name": "stand_in_tool", "arguments": {}}}
RESULT: Message = {"role": "tool", "name": "stand_in_tool", "tool_call_id": "call_0", "content": "result"}


@dataclass(frozen=True)
class Endings:
    """How turns end.

    Attributes:
        stop_ids: what a model samples at the end of a turn: what its template writes there, and the ids at which its
            tokenizer and its generation settings have it stop.
        ends: what stands at the end of a turn in the middle of a conversation, too.
        by_next_header: a turn ends where the header of the next begins, whose first token the model samples.
    """

    stop_ids: tuple[int, ...]
    ends: frozenset[int]
    by_next_header: bool


def endings_of(tokenizer: Tokenizer, control: ControlTokens, shape: MessageShape) -> Endings:
    """The endings of a tokenizer's chat template.

    Raises:
        ChatFormatError: it writes no control token after a turn, so that a turn has no end to sample.
    """

    def after_turn(turn: Message, *following: Message) -> str | None:
        messages = shape.fit([QUESTION, turn, *following])
        tools = [STAND_IN] if "tool_calls" in turn else []
        try:
            rendered = tokenizer.render(messages, tools=tools)
            return rendered[behind_last_place(rendered, 0) :]
        except ChatFormatError:
            return None

    said, called = reply(0), reply(0, calls=[CALL])
    last, inner = after_turn(said), after_turn(said, QUESTION)
    if last is None:
        tokenizer.render(shape.fit([QUESTION, said]))  # raises: the template refuses even this
        raise ChatFormatError("The model's chat template leaves an assistant's answer out of the conversation.")
    at_end = control.first_in(last)
    called_last, called_inner = after_turn(called), after_turn(called, RESULT)
    if at_end is None:
        headers = [_behind(last, inner), _behind(called_last, called_inner)]
        return _by_next_header(control, [header for header in headers if header is not None], tokenizer.eos_ids)
    stops = [at_end[1]]
    if called_last:
        found = [tokenizer.control_tokens[token] for token in control.in_text(called_last)]
        stops += found[-1:] if at_end[1] not in found else []
    in_the_middle = control.first_in(inner) if inner else None
    ends = frozenset(stops) | ({in_the_middle[1]} if in_the_middle else set())
    return Endings(_with(tokenizer.eos_ids, stops), ends, False)


def without_end(ids: Sequence[int], stop_ids: Collection[int], control: Collection[int]) -> Sequence[int]:
    """What a generation says, without the end of turn.

    A model may be told to stop at a token of ordinary text. That is part of what it says, and ends no turn in the
    template's eyes.

    Args:
        ids: the generation.
        stop_ids: the ids at which it may have stopped.
        control: the ids of control tokens.
    """
    return ids[:-1] if ids and ids[-1] in stop_ids and ids[-1] in control else ids


def _behind(beginning: str | None, whole: str | None) -> str | None:
    """What a text adds to its beginning, white space at the border left out."""
    if beginning is None or whole is None or not whole.startswith(beginning.rstrip()):
        return None
    return whole[len(beginning.rstrip()) :]


def _by_next_header(control: ControlTokens, headers: Sequence[str], eos_ids: Sequence[int]) -> Endings:
    ends = [found[1] for header in headers if (found := control.first_in(header))]
    if not ends:
        raise ChatFormatError(
            "The model's chat template writes no control token at the end of an assistant's turn, so a turn has no "
            "end to sample. Use a model whose template ends turns, for instance with <|im_end|>."
        )
    return Endings(_with(eos_ids, ends), frozenset(ends), True)


def _with(eos_ids: Sequence[int], stops: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*stops, *eos_ids]))
