"""BlockFormat: base of formats that find calls block by block, and the detection of calls in a wrong format."""

from __future__ import annotations

import bisect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from agentfly.core.errors import UsageError
from agentfly.core.messages import Message, ToolCall
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle
from agentfly.formats.reasoning import REASONING_MARKER, Thinking, is_inside, read_thinking
from agentfly.formats.toolcalls.tool_call_format import ToolDescription, call_id, message_with_calls, tool_message

_NAMED = re.compile(
    r"""\b(?:name|tool|tool_name|function|function_name|action)["']?\s*:\s*["']([^"'\s]{1,64})["']""", re.IGNORECASE
)
_ARGUMENTS = re.compile(
    r"""\b(?:arguments|parameters|args|kwargs|params|input|tool_input|action_input)["']?\s*:""", re.IGNORECASE
)
_NOTHING_ELSE = re.compile(r"\s*+,?\s*+\}")
_OPENING = re.compile(
    r"<tool_call>|<function=|<function_call>|<\|python_(?:tag|start)\|>|<\|tool_call_start\|>|\[TOOL_CALLS\]"
    r"|<｜tool▁calls?▁begin｜>"
)
_WORD = re.compile(r"[A-Za-z_][\w-]*")
_ACTION = re.compile(
    r"^[ \t>*_#-]*Action(?:[ \t]+\d+)?[ \t*_]*:[ \t*_`]*([A-Za-z_][\w-]*)", re.IGNORECASE | re.MULTILINE
)
_AROUND = 1000  # characters around a tool's name in which its arguments must be named
_BEHIND = 100  # characters behind a marker in which a tool must be named


def attempted_tool(text: str, known: Collection[str]) -> str | None:
    """Return the tool that ``text`` evidently tries to call, in any format; None if there is no such attempt.

    An attempt is: an object with a tool's name and arguments, a known opening marker of calls before a tool's name, or
    a line with ``Action:`` and a tool's name. It need not be well-formed.

    Args:
        text: the text of a turn, without reasoning.
        known: names of the agent's tools.
    """
    arguments: list[int] | None = None  # where arguments are named
    for named in _NAMED.finditer(text):
        if named.group(1) in known and "{" in text[max(0, named.start() - _AROUND) : named.start()]:
            if _is_whole(text, named):
                return named.group(1)
            if arguments is None:
                arguments = [found.start() for found in _ARGUMENTS.finditer(text)]
            if _is_near(named, arguments):
                return named.group(1)
    for opening in _OPENING.finditer(text):
        for word in _WORD.finditer(text, opening.end(), opening.end() + _BEHIND):
            if word.group() in known:
                return word.group()
    return next((action.group(1) for action in _ACTION.finditer(text) if action.group(1) in known), None)


def _is_whole(text: str, named: re.Match[str]) -> bool:
    """Whether the name is the only member of its object."""
    before = text[max(0, named.start() - _AROUND) : named.start()].rstrip("\"' \t\r\n")
    return before.endswith("{") and _NOTHING_ELSE.match(text, named.end()) is not None


def _is_near(named: re.Match[str], positions: list[int]) -> bool:
    """Whether one of ``positions``, which are sorted, is close to the name."""
    following = bisect.bisect_left(positions, named.start() - _AROUND)
    return following < len(positions) and positions[following] < named.end() + _AROUND


ToolsByName: TypeAlias = "Mapping[str, ToolDescription]"
"""The agent's tools by name."""

_UNCLEAR = (
    "it is unclear where it ends, because the end of a call stands once more behind it. A quote inside a text must be "
    'escaped, for instance as \\". Nothing of your turn was executed'
)

STRAY = (
    "a mark that ends thinking stands behind it, but no thinking was open, so it is unclear whether the call was only "
    "thought. Nothing of your turn was executed"
)
UNCLOSED = (
    "it stands in thinking that was never closed, and calls in thinking are not executed. End your thinking before you "
    "call a tool. Nothing of your turn was executed"
)
CUT = (
    "a mark that ends thinking stands in it, so it is unclear whether the call was only thought. End your thinking "
    "before you call a tool. Nothing of your turn was executed"
)


LINE_START = r"(?:^|(?<=</think>)|(?<=\[/THINK\]))[ \t]*"
"""The beginning of a line, or of the text after reasoning. For patterns with `re.MULTILINE`."""


class CallWriter(Protocol):
    """Writes calls: a tool-call format."""

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        ...


@dataclass(frozen=True)
class ParsedCall:
    """A parsed call without an id. If it is malformed, ``arguments`` is None and ``error`` says why."""

    name: str
    arguments: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class CallBlock:
    """The text from ``start`` to ``stop`` (exclusive), markers included, and the calls in it."""

    start: int
    stop: int
    calls: tuple[ParsedCall, ...]

    @property
    def is_readable(self) -> bool:
        """Whether it has a call that can be executed."""
        return any(call.arguments is not None for call in self.calls)


@dataclass(frozen=True)
class ParsedTurn:
    """A turn's text up to the first invented tool result, its call blocks, and its reasoning.

    ``blocks_in_reasoning`` are the blocks inside reasoning.
    """

    text: str
    blocks: Sequence[CallBlock]
    thinking: Thinking
    blocks_in_reasoning: Sequence[CallBlock] = ()

    @property
    def text_without_reasoning(self) -> str:
        """The text without reasoning."""
        kept, position = [], 0
        for start, stop in self.thinking.spans:
            kept.append(self.text[position:start])
            position = stop
        return "".join([*kept, self.text[position:]])


@dataclass(frozen=True)
class BlockFormat(ABC):
    """A base class for formats that write calls in blocks.

    Reasoning markers inside a block belong to the call. Calls inside reasoning are ignored unless
    ``calls_in_thinking`` is set. A subclass finds its blocks (`_blocks`); this class handles the rest:

    * A turn without blocks that evidently tries to call a tool (`_attempted_tool`) is one malformed call. Otherwise it
      would count as the answer and end the rollout, and the model would never learn of the error.
    * A turn with a further end of a call after its calls (`_is_unambiguous_end`) is one malformed call too: an
      unescaped argument has ended a call too early.
    * So is a turn in which a call may or may not be part of the reasoning (`_in_doubt`).
    """

    calls_in_thinking: bool = False

    @abstractmethod
    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""

    @abstractmethod
    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        """Find the blocks of a turn's text, in order and without overlaps, inside reasoning too."""

    def parse(self, text: str, tools: Sequence[ToolDescription], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """Parse the calls in a turn's text."""
        known = {tool.name: tool for tool in tools}
        turn = self._turn(text, known)
        calls = [call for block in turn.blocks for call in block.calls]
        doubt = self._in_doubt(turn, known)
        if doubt is not None:
            calls = doubt
        elif not calls:
            name = self._attempted_tool(turn.text_without_reasoning, known)
            calls = [] if name is None else [wrong_format_call(turn.text_without_reasoning, self, name, known)]
        elif (first := next((block for block in turn.blocks if block.is_readable), None)) and not self._is_unambiguous(
            turn
        ):
            name = first.calls[0].name
            calls = [malformed_call(turn.text[first.start :], _UNCLEAR, example_call(self, name, known), name)]
        return tuple(
            ToolCall(self._id(first_call + number), call.name, call.arguments, call.error)
            for number, call in enumerate(calls)
        )

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Return a message with the turn's unchanged text."""
        return {"role": "assistant", "content": text}

    def _id(self, number: int) -> str:
        return call_id(number)

    def _result_marker(self) -> re.Pattern[str] | None:
        """The beginning of a tool result, if the format has one. Text from there on was invented and is ignored."""
        return None

    def _inner_markers(self) -> re.Pattern[str] | None:
        """Markers inside or at the end of a call. In a turn without calls they show an attempted call."""
        return None

    def _attempted_tool(self, text: str, known: ToolsByName) -> str | None:
        """Return the tool that a turn without calls evidently tries to call; empty if the tool is not clear.

        Args:
            text: the text of the turn, without reasoning.
            known: the agent's tools.
        """
        name, markers = attempted_tool(text, known), self._inner_markers()
        return "" if name is None and markers and markers.search(text) else name

    def _is_unambiguous_end(self, following: str) -> bool:
        """Whether the text between two calls, or after the last one, is certainly not the rest of an argument."""
        markers = self._inner_markers()
        if markers is None:
            return True
        repeated = re.match(rf"(?:\s*(?:{markers.pattern}))*", following, markers.flags)  # a repeated end loses nothing
        return not markers.search(following, repeated.end() if repeated else 0)

    def _is_unambiguous(self, turn: ParsedTurn) -> bool:
        """Whether the end of each readable call is certain."""
        position = None
        for block in turn.blocks:
            if position is None and not block.is_readable:
                continue
            if position is not None and not self._is_unambiguous_end(turn.text[position : block.start]):
                return False
            if not block.is_readable and "}" in turn.text[block.start : block.stop].partition("{")[0]:
                return False
            position = block.stop
        return position is None or self._is_unambiguous_end(turn.text[position:])

    def _in_doubt(self, turn: ParsedTurn, known: ToolsByName) -> list[ParsedCall] | None:
        """Return the errors of a turn in which a call may be part of the reasoning; None if that is clear."""
        thinking = turn.thinking
        if thinking.stray:
            before = [block for block in turn.blocks if block.stop <= thinking.stray[0][0] and block.calls]
            if before and not any(block.is_readable for block in before):
                return [call for block in before for call in block.calls]  # the marker may be in the malformed call
            if before:
                return [self._doubted(turn, before[0], STRAY, known)]
        for block in turn.blocks_in_reasoning:
            if not _is_meant(block, turn.text, known):
                continue
            stop = thinking.spans[bisect.bisect_right(thinking.spans, (block.start, len(turn.text))) - 1][1]
            if thinking.is_open and stop == thinking.spans[-1][1]:
                return [self._doubted(turn, block, UNCLOSED, known)]
            mark = REASONING_MARKER.match(turn.text, block.stop)
            if mark and (mark.end() == stop or not block.is_readable) and not self._is_over(turn, block, stop):
                return [self._doubted(turn, block, CUT, known)]
        return None

    def _is_over(self, turn: ParsedTurn, thought: CallBlock, position: int) -> bool:
        """Whether a call in reasoning certainly does not continue after the reasoning, which ends at ``position``."""
        following = bisect.bisect_left(turn.blocks, position, key=lambda block: block.start)
        stop = turn.blocks[following].start if following < len(turn.blocks) else len(turn.text)
        rest = turn.text[position:stop]
        if thought.is_readable:
            return self._is_unambiguous_end(rest)
        return following < len(turn.blocks) and not rest.strip()

    def _doubted(self, turn: ParsedTurn, block: CallBlock, reason: str, known: ToolsByName) -> ParsedCall:
        name = block.calls[0].name
        return malformed_call(turn.text[block.start :], reason, example_call(self, name, known), name)

    def _turn(self, text: str, known: ToolsByName) -> ParsedTurn:
        """Split a turn into its text, its reasoning, and the blocks inside and outside reasoning."""
        blocks = list(self._blocks(text, known))
        spans = [(block.start, block.stop) for block in blocks]
        thinking = Thinking() if self.calls_in_thinking else read_thinking(text, spans)
        end = len(text)
        invented = self._result_marker()
        for found in invented.finditer(text) if invented else ():
            if not (is_inside(found.start(), thinking.spans) or is_inside(found.start(), spans)):
                end = found.start()
                break
        kept: tuple[list[CallBlock], list[CallBlock]] = ([], [])
        for block in blocks:
            if block.start < end:
                kept[is_inside(block.start, thinking.spans)].append(block)
        return ParsedTurn(text[:end], kept[0], thinking, kept[1])


@dataclass(frozen=True)
class ModelTrainedFormat(BlockFormat):
    """A format that models are trained on and that chat templates support.

    Results are messages of role ``tool``. With ``uses_chat_template`` the model's
    chat template describes the tools. A turn's message then has the calls in ``tool_calls``, and the template writes
    them.
    """

    uses_chat_template: bool = True

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Return the turn with its calls in ``tool_calls``; all of it as text if a call is malformed."""
        if not self.uses_chat_template or not calls or any(call.arguments is None for call in calls):
            return {"role": "assistant", "content": text}
        blocks = self._turn(text, {}).blocks
        if sum(len(block.calls) for block in blocks) != len(calls):
            return {"role": "assistant", "content": text}
        kept, position = [], 0
        for block in blocks:
            kept.append(text[position : block.start])
            position = block.stop
        return message_with_calls("".join([*kept, text[position:]]).strip(), calls)

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return a message of role ``tool`` with the call's id, and with the tool's name if that is valid."""
        return tool_message(call, observation)


def _is_meant(block: CallBlock, text: str, known: ToolsByName) -> bool:
    """Whether a block holds a call, readable or not, rather than a mere mention of the format's markers."""
    if block.is_readable or any(call.name in known for call in block.calls):
        return True
    return bool(block.calls) and not known.keys().isdisjoint(_WORD.findall(text, block.start, block.stop))


def blocks_at(
    opening: re.Pattern[str], text: str, read: Callable[[re.Match[str]], CallBlock | None]
) -> Iterator[CallBlock]:
    """Yield the blocks that ``read`` returns for matches of ``opening``. Each search continues after the last block."""
    found = opening.search(text)
    while found:
        block = read(found)
        if block is not None:
            yield block
        found = opening.search(text, max(block.stop if block else 0, found.end(), found.start() + 1))


def end_of_malformed_call(text: str, position: int, limit: int | None = None) -> int:
    """Return the end of a malformed call without an end marker: the next reasoning marker, or ``limit``."""
    limit = len(text) if limit is None else limit
    marker = REASONING_MARKER.search(text, position, limit)
    return marker.start() if marker else limit


def malformed_call(written: str, reason: str, example: str, name: str = "") -> ParsedCall:
    """Return a malformed call with an error for the model: the reason, an example, and the truncated text."""
    message = (
        f"This tool call was not executed, because it cannot be read: {reason}. Write it like this:\n{example}\n"
        f"You wrote: {truncate_middle(written.strip(), MAX_ECHO_CHARS)}"
    )
    return ParsedCall(name, None, message)


def wrong_format_call(text: str, writer: CallWriter, name: str, known: ToolsByName) -> ParsedCall:
    """Return the malformed call of a turn that tries to call the tool ``name`` in another format."""
    return malformed_call(text, "it is not written as a call must be here", example_call(writer, name, known), name)


def example_call(writer: CallWriter, name: str, known: ToolsByName) -> str:
    """Return an example of a call in a format, with placeholders for the required arguments."""
    wanted = known[name].schema.arguments if name in known else ()
    needed = [argument.name for argument in wanted if argument.required] or [one.name for one in wanted[:1]]
    try:
        return writer.write(name or "name_of_the_tool", dict.fromkeys(needed, "…"))
    except UsageError:
        return "as described at the beginning"
