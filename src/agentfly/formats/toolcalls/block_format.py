"""Call attempts: text that is plainly meant as a call, though not written as the agent's format wants it.

Block: a stretch of a turn's text that holds tool calls. BlockFormat: a format that finds calls block by block.
"""

from __future__ import annotations

import bisect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from agentfly.core.errors import UsageError
from agentfly.core.messages import Message, ToolCall
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle
from agentfly.formats.reasoning import REASONING_MARKER, Thinking, is_inside, read_thinking
from agentfly.formats.toolcalls.tool_call_format import call_id, message_with_calls, tool_message

if TYPE_CHECKING:
    from agentfly.agents.tool import Tool

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
    """The tool that ``text`` plainly means to call, in whatever format; None if it calls none.

    A call is meant where an object names a tool and its arguments, where a marker with which models begin calls stands
    before a tool's name, and where a line says ``Action:`` and a tool's name. Well-formed it need not be.

    Args:
        text: what was said in a turn, without thinking.
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
    """Whether the name is all that its object holds."""
    before = text[max(0, named.start() - _AROUND) : named.start()].rstrip("\"' \t\r\n")
    return before.endswith("{") and _NOTHING_ELSE.match(text, named.end()) is not None


def _is_near(named: re.Match[str], places: list[int]) -> bool:
    """Whether one of ``places``, which are in order, lies around the name."""
    following = bisect.bisect_left(places, named.start() - _AROUND)
    return following < len(places) and places[following] < named.end() + _AROUND


ToolsByName: TypeAlias = "Mapping[str, Tool]"
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
"""Where a line begins, or what is said after thinking. For patterns with `re.MULTILINE`."""


class CallWriter(Protocol):
    """What writes calls: a tool-call format."""

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a call."""
        ...


@dataclass(frozen=True)
class ParsedCall:
    """A call as it was written, not numbered yet. ``arguments`` is None, and ``error`` says why, if it is malformed."""

    name: str
    arguments: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class CallBlock:
    """The text from ``start`` to ``stop`` (exclusive), markers included, and the calls that it holds."""

    start: int
    stop: int
    calls: tuple[ParsedCall, ...]

    @property
    def is_readable(self) -> bool:
        """Whether it has a call that can be executed."""
        return any(call.arguments is not None for call in self.calls)


@dataclass(frozen=True)
class ParsedTurn:
    """What is said in a turn: its text up to what the model made up, the blocks in it, and where it is thinking.

    ``unspoken`` are the blocks inside thinking.
    """

    text: str
    blocks: Sequence[CallBlock]
    thinking: Thinking
    unspoken: Sequence[CallBlock] = ()

    @property
    def text_without_reasoning(self) -> str:
        """The text without thinking."""
        kept, position = [], 0
        for start, stop in self.thinking.spans:
            kept.append(self.text[position:start])
            position = stop
        return "".join([*kept, self.text[position:]])


@dataclass(frozen=True)
class BlockFormat(ABC):
    """A format whose calls stand in blocks that are read from their beginning on.

    Markers of thinking inside a block belong to the call, and calls inside thinking are left out unless
    ``calls_in_thinking`` says otherwise. A format says where its blocks are (`_blocks`), and the rest follows:

    * A turn that has no block, but plainly means to call a tool (`_attempted_tool`), is one malformed call. Taken as the
      answer it would end the rollout by a slip that the model was never told of.
    * A turn in which the end of a call stands once more behind its calls (`_is_unambiguous_end`) is one malformed call too:
      an argument that was not escaped has ended one of them too soon.
    * So is a turn in which it is unclear whether a call was spoken or only thought (`_in_doubt`).
    """

    calls_in_thinking: bool = False

    @abstractmethod
    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a call."""

    @abstractmethod
    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        """The blocks of a turn's text, in order and without overlaps, wherever they stand."""

    def parse(self, text: str, tools: Sequence[Tool], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """The calls in a turn's text."""
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
        """The turn's text as it stands."""
        return {"role": "assistant", "content": text}

    def _id(self, number: int) -> str:
        return call_id(number)

    def _result_marker(self) -> re.Pattern[str] | None:
        """What a result begins with, if there is such a thing. Nothing behind it is read: the model made it up."""
        return None

    def _inner_markers(self) -> re.Pattern[str] | None:
        """Markers of the format that stand inside or at the end of a call, so that without a call one was meant."""
        return None

    def _attempted_tool(self, heard: str, known: ToolsByName) -> str | None:
        """The tool that a turn without calls plainly means to call; empty if it does not say which.

        Args:
            heard: what was said, without thinking.
            known: the agent's tools.
        """
        name, remains = attempted_tool(heard, known), self._inner_markers()
        return "" if name is None and remains and remains.search(heard) else name

    def _is_unambiguous_end(self, behind: str) -> bool:
        """Whether the text between two calls, or behind the last, is certainly not the rest of an argument."""
        remains = self._inner_markers()
        if remains is None:
            return True
        again = re.match(rf"(?:\s*(?:{remains.pattern}))*", behind, remains.flags)  # nothing is lost between the two
        return not remains.search(behind, again.end() if again else 0)

    def _is_unambiguous(self, turn: ParsedTurn) -> bool:
        """Whether it is certain where each of the calls ends that can be read."""
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
        """The errors of a turn in which it is unclear whether a call was spoken; None if it is clear."""
        thinking = turn.thinking
        if thinking.stray:
            before = [block for block in turn.blocks if block.stop <= thinking.stray[0][0] and block.calls]
            if before and not any(block.is_readable for block in before):
                return [call for block in before for call in block.calls]  # the mark may stand in what is malformed
            if before:
                return [self._doubted(turn, before[0], STRAY, known)]
        for block in turn.unspoken:
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
        """Whether a call that was thought certainly does not go on behind the thinking, which ends at ``position``."""
        following = bisect.bisect_left(turn.blocks, position, key=lambda block: block.start)
        stop = turn.blocks[following].start if following < len(turn.blocks) else len(turn.text)
        behind = turn.text[position:stop]
        if thought.is_readable:
            return self._is_unambiguous_end(behind)
        return following < len(turn.blocks) and not behind.strip()

    def _doubted(self, turn: ParsedTurn, block: CallBlock, reason: str, known: ToolsByName) -> ParsedCall:
        name = block.calls[0].name
        return malformed_call(turn.text[block.start :], reason, example_call(self, name, known), name)

    def _turn(self, text: str, known: ToolsByName) -> ParsedTurn:
        """What is said in a turn, with the blocks whose calls are to be executed."""
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
    """A format that models are trained on, and that chat templates know.

    Results go back as messages of role ``tool``. Where ``uses_chat_template`` says that the model's own chat template
    describes the tools, a turn stands in the conversation with its calls as ``tool_calls``, for the template to write.
    """

    uses_chat_template: bool = True

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """The turn without its calls, which stand in ``tool_calls``; all of it as text where a call is malformed."""
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
        """A message of role ``tool`` that names the call it answers, and the tool unless none can be called that."""
        return tool_message(call, observation)


def _is_meant(block: CallBlock, text: str, known: ToolsByName) -> bool:
    """Whether a block holds the call of a tool, readable or not, and no mere mention of the format's markers."""
    if block.is_readable or any(call.name in known for call in block.calls):
        return True
    return bool(block.calls) and not known.keys().isdisjoint(_WORD.findall(text, block.start, block.stop))


def blocks_at(
    opening: re.Pattern[str], text: str, read: Callable[[re.Match[str]], CallBlock | None]
) -> Iterator[CallBlock]:
    """The blocks that ``read`` makes of what ``opening`` finds, each search going on behind the last block."""
    found = opening.search(text)
    while found:
        block = read(found)
        if block is not None:
            yield block
        found = opening.search(text, max(block.stop if block else 0, found.end(), found.start() + 1))


def end_of_malformed_call(text: str, position: int, limit: int | None = None) -> int:
    """Where a malformed call ends of which nothing tells the end: where thinking begins or ends, or at ``limit``."""
    limit = len(text) if limit is None else limit
    marker = REASONING_MARKER.search(text, position, limit)
    return marker.start() if marker else limit


def malformed_call(written: str, reason: str, example: str, name: str = "") -> ParsedCall:
    """A malformed call, with what the model is told: why, how to write it, and what it wrote, cut down."""
    message = (
        f"This tool call was not executed, because it cannot be read: {reason}. Write it like this:\n{example}\n"
        f"You wrote: {truncate_middle(written.strip(), MAX_ECHO_CHARS)}"
    )
    return ParsedCall(name, None, message)


def wrong_format_call(heard: str, written_by: CallWriter, name: str, known: ToolsByName) -> ParsedCall:
    """The malformed call of a turn that means to call the tool ``name``, but not as the format wants it."""
    return malformed_call(
        heard, "it is not written as a call must be here", example_call(written_by, name, known), name
    )


def example_call(written_by: CallWriter, name: str, known: ToolsByName) -> str:
    """How a tool is called in a format, with places for what it needs."""
    wanted = known[name].schema.arguments if name in known else ()
    needed = [argument.name for argument in wanted if argument.required] or [one.name for one in wanted[:1]]
    try:
        return written_by.write(name or "name_of_the_tool", dict.fromkeys(needed, "…"))
    except UsageError:
        return "as you were told at the beginning"
