"""Block: a stretch of a turn's text that holds tool calls. BlockFormat: a format that finds calls block by block."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.agents.tool import Tool
from agentfly.agents.toolcalls.format import call_id, message_with_calls, tool_message
from agentfly.agents.toolcalls.thinking import MARKER, is_inside, thinking_spans
from agentfly.messages import Message, ToolCall

Known = Mapping[str, Tool]
"""The agent's tools by name."""

LINE_START = r"(?:^|(?<=</think>)|(?<=\[/THINK\]))[ \t]*"
"""Where a line begins, or what is said after thinking. For patterns with `re.MULTILINE`."""


@dataclass(frozen=True)
class WrittenCall:
    """A call as it was written, not numbered yet. ``arguments`` is None, and ``error`` says why, if it is malformed."""

    name: str
    arguments: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Block:
    """The text from ``start`` to ``stop`` (exclusive), markers included, and the calls that it holds."""

    start: int
    stop: int
    calls: tuple[WrittenCall, ...]


@dataclass(frozen=True)
class BlockFormat(ABC):
    """A format whose calls stand in blocks that are read from their beginning on.

    Markers of thinking inside a block belong to the call, and calls inside thinking are left out unless
    ``calls_in_thinking`` says otherwise. A format says where its blocks are (`_blocks`), and the rest follows.
    """

    calls_in_thinking: bool = False

    @abstractmethod
    def _blocks(self, text: str, known: Known) -> Iterable[Block]:
        """The blocks of a turn's text, in order and without overlaps, wherever they stand."""

    def parse(self, text: str, tools: Sequence[Tool], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """The calls in a turn's text."""
        blocks = self._spoken(text, {tool.name: tool for tool in tools})
        calls = [call for block in blocks for call in block.calls]
        return tuple(
            ToolCall(self._id(first_call + number), call.name, call.arguments, call.error)
            for number, call in enumerate(calls)
        )

    def said(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """The turn's text as it stands."""
        return {"role": "assistant", "content": text}

    def _id(self, number: int) -> str:
        return call_id(number)

    def _invented(self) -> re.Pattern[str] | None:
        """What a result begins with, if there is such a thing. Nothing behind it is read: the model made it up."""
        return None

    def _spoken(self, text: str, known: Known) -> list[Block]:
        """The blocks whose calls are to be executed."""
        blocks = list(self._blocks(text, known))
        spans = [(block.start, block.stop) for block in blocks]
        thought = [] if self.calls_in_thinking else thinking_spans(text, spans)
        end = len(text)
        invented = self._invented()
        for found in invented.finditer(text) if invented else ():
            if not (is_inside(found.start(), thought) or is_inside(found.start(), spans)):
                end = found.start()
                break
        return [block for block in blocks if block.start < end and not is_inside(block.start, thought)]


@dataclass(frozen=True)
class NativeFormat(BlockFormat):
    """A format that models are trained on, and that chat templates know.

    Results go back as messages of role ``tool``. Where ``in_template`` says that the model's own chat template
    describes the tools, a turn stands in the conversation with its calls as ``tool_calls``, for the template to write.
    """

    in_template: bool = True

    def said(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """The turn without its calls, which stand in ``tool_calls``; all of it as text where a call is malformed."""
        if not self.in_template or not calls or any(call.arguments is None for call in calls):
            return {"role": "assistant", "content": text}
        blocks = self._spoken(text, {})
        if sum(len(block.calls) for block in blocks) != len(calls):
            return {"role": "assistant", "content": text}
        return message_with_calls(_without(text, blocks), calls)

    def result(self, call: ToolCall, observation: str) -> Message:
        """A message of role ``tool`` that names the call it answers, and the tool unless none can be called that."""
        return tool_message(call, observation)


def blocks_at(opening: re.Pattern[str], text: str, read: Callable[[re.Match[str]], Block | None]) -> Iterator[Block]:
    """The blocks that ``read`` makes of what ``opening`` finds, each search going on behind the last block."""
    found = opening.search(text)
    while found:
        block = read(found)
        if block is not None:
            yield block
        found = opening.search(text, max(block.stop if block else 0, found.end(), found.start() + 1))


def rest_of(text: str, position: int, limit: int | None = None) -> int:
    """Where a malformed call ends of which nothing tells the end: where thinking begins or ends, or at ``limit``."""
    limit = len(text) if limit is None else limit
    marker = MARKER.search(text, position, limit)
    return marker.start() if marker else limit


def unreadable(written: str, reason: str, example: str, name: str = "") -> WrittenCall:
    """A malformed call, with what the model is told: why, how to write it, and what it wrote, cut down."""
    message = (
        f"This tool call was not executed, because it cannot be read: {reason}. Write it like this:\n{example}\n"
        f"You wrote: {excerpt(written.strip(), ECHO_CHARS)}"
    )
    return WrittenCall(name, None, message)


def _without(text: str, blocks: Sequence[Block]) -> str:
    kept, position = [], 0
    for block in blocks:
        kept.append(text[position : block.start])
        position = block.stop
    return "".join([*kept, text[position:]]).strip()
