"""Rearranged conversations: calls and results where chat templates put up with them, if not where they stand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import cast

from agentfly.messages import Message


def one_call_at_a_time(messages: Sequence[Message]) -> list[Message]:
    """The messages with one call in a turn, each followed by what answers it."""
    single: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        for at, turn in enumerate(waiting):
            if message["role"] != "tool" or _answers_one_of([turn["tool_calls"][0]["id"]], message):
                due = at if message["role"] == "tool" else len(waiting)
                single += waiting[: due + 1]
                del waiting[: due + 1]
                break
        calls = message.get("tool_calls", ())
        single.append(cast(Message, {**message, "tool_calls": [*calls[:1]]}) if len(calls) > 1 else message)
        waiting += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
    return single + waiting


def with_results_of_calls_only(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with what answers no call of the turn before it as a user's words."""
    calls: list[str] = []
    for message in messages:
        if message["role"] != "tool":
            calls = [call["id"] for call in message.get("tool_calls", ())]
        if message["role"] != "tool" or _answers_one_of(calls, message):
            yield message
        else:
            yield {"role": "user", "content": message["content"]}


def _answers_one_of(calls: Collection[str], answer: Message) -> bool:
    """Whether a tool's message is the result of one of these calls; one that names none is that of any."""
    return answer["tool_call_id"] in calls if "tool_call_id" in answer else bool(calls)
