"""ActionFormat: calls as plain lines, ``Action: tool[argument]``, which small and base models can follow."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.json_schema import UntypedText
from agentfly.core.lenient_json import InvalidJSON, decode_value
from agentfly.core.messages import Message, ToolCall
from agentfly.core.truncation import MAX_ECHO_CHARS, truncate_middle
from agentfly.formats.reasoning import REASONING_MARKER, Thinking, is_inside, read_thinking
from agentfly.formats.toolcalls.block_format import CUT, STRAY, UNCLOSED, attempted_tool, wrong_format_call
from agentfly.formats.toolcalls.json_calls import dump_escaped
from agentfly.formats.toolcalls.text_arguments import UnparsableCall, argument_lines, label_pattern
from agentfly.formats.toolcalls.tool_call_format import ToolDescription, call_id

_PREFIX = re.compile(rf"\s*{label_pattern('action')}\s*", re.IGNORECASE)
_OBSERVATION = re.compile(rf"\s*{label_pattern('observation')}", re.IGNORECASE)
_CALL = re.compile(r"([A-Za-z_][\w-]*)\s*\[(.*)\]\s*(?:\.\s*)?")
_OPENED = re.compile(r"([A-Za-z_][\w-]*)\s*\[")
_WORD = re.compile(r"[A-Za-z_][\w-]*")
_ARGUMENT = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
_NEXT_ARGUMENT = re.compile(r",(?=\s*[^\W\d]\w*\s*=)")
_END_OF_VALUE = re.compile(r"\s*(,|$)")
_ONE_LINE = (
    "it is unclear where it ends, because a line behind it ends with ']'; a text of several lines must be a JSON string"
)
_TWO_ON_A_LINE = (
    "another action stands behind a ']' on the same line; write each on a line of its own, and a text that holds "
    "brackets as a JSON string"
)
_LATER_ACTION = re.compile(rf"{label_pattern('action')}|([A-Za-z_][\w-]*)\s*\[", re.IGNORECASE)
_LINE = re.compile(r"[^\n]+")
_BARE = re.compile(r'(?!null$)[^\s",=\[\]{}<][^",=\[\]{}<\n]*')


@dataclass(frozen=True)
class ActionFormat:
    """Calls as separate lines: ``Action: tool[argument]``, or ``Action: tool[a=1, b=two]``.

    * With one argument, the text between the brackets is the argument: ``Action: check[eggs]``. This holds for a tool
      with one argument, and for the only required argument of a tool with several.
    * With several, each is ``name=value`` and ends at the comma before the next name.
    * A value in double quotes is a JSON string, for instance for line breaks. A list or an object is written as JSON.
      Other values are texts that the tool's types convert: ``5`` becomes a number if a number is expected.
    * ``Action:`` may be numbered (``Action 1:``), in bold, or omitted before the name of a tool. Several such lines are
      parallel calls. Two actions on one line are an error. Lines after one that begins with ``Observation:`` are
      ignored, because the model made them up.

    Text that is recognisably a call but cannot be parsed is reported to the model as an error, never executed in part.
    Observations return as a user message that begins with ``Observation:``.

    Args:
        calls_in_thinking: whether calls between ``<think>`` and ``</think>`` are executed.
    """

    calls_in_thinking: bool = False
    uses_chat_template = False

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "action"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Explain calls and list the tools, one line each. The text is short, for models with short contexts."""
        if not tools:
            return ""
        return "\n".join(
            [
                "To use a tool, end your turn with a line like this:",
                f"Action: {_signature(tools[0])}",
                "The answer comes back after 'Observation:'. The tools are:",
                *(line for tool in tools for line in _description(tool)),
            ]
        )

    def parse(self, text: str, tools: Sequence[ToolDescription], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """Parse the calls in a turn's text."""
        known = {tool.name: tool for tool in tools}
        lines, thinking = self._lines(text, known)
        calls: list[ToolCall] = []
        starts: list[int] = []  # of the lines with calls
        visible_lines: list[str] = []
        thought: ToolCall | None = None  # the last call in thinking, which may go on behind that
        for line in lines:
            if line.is_spoken and _OBSERVATION.match(line.text):
                break
            call = _read_line(line.text, known, call_id(first_call + len(calls)))
            if not line.is_spoken:
                if call is not None and thinking.is_open and line.start >= thinking.spans[-1][0]:
                    return (_malformed(call_id(first_call), call.name, UNCLOSED, known, line.text),)
                if calls and thinking.is_open and line.text.rstrip().endswith("]"):
                    return (_malformed(call_id(first_call), calls[0].name, _ONE_LINE, known, "\n".join(visible_lines)),)
                thought = call or thought
                continue
            visible_lines.append(line.text)
            if call is not None:
                calls.append(call)
                starts.append(line.start)
                thought = None
            elif thought is not None and line.text.rstrip().endswith("]"):
                return (_malformed(call_id(first_call), thought.name, CUT, known, line.text),)
            elif calls and line.text.rstrip().endswith("]") and any(one.arguments is not None for one in calls):
                return (_malformed(call_id(first_call), calls[0].name, _ONE_LINE, known, "\n".join(visible_lines)),)
        visible = "\n".join(visible_lines)
        if thinking.stray and (before := calls[: bisect.bisect_left(starts, thinking.stray[0][0])]):
            if any(call.arguments is not None for call in before):
                return (_malformed(call_id(first_call), before[0].name, STRAY, known, visible),)
            return tuple(before)  # the mark may stand in what is malformed
        if not calls and (name := attempted_tool(visible, known)) is not None:
            missed = wrong_format_call(visible, self, name, known)
            calls.append(ToolCall(call_id(first_call), missed.name, None, missed.error))
        return tuple(calls)

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call. A single argument is written without its name, if it can be (see the class)."""
        if len(arguments) == 1:
            (argument, value), *_ = arguments.items()
            return f"Action: {name}[{_bare(argument, value)}]"
        return f"Action: {name}[{', '.join(f'{key}={_quoted(value)}' for key, value in arguments.items())}]"

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Return a message with the turn's unchanged text."""
        return {"role": "assistant", "content": text}

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return a user message that begins with ``Observation:``."""
        return {"role": "user", "content": f"Observation: {observation}"}

    def _lines(self, text: str, known: Mapping[str, ToolDescription]) -> tuple[Sequence[_Line], Thinking]:
        """Return the lines of a turn, and its reasoning. A line also ends at a marker of reasoning."""
        calling = [line.span() for line in _LINE.finditer(text) if _holds_a_mark(line.group(), known)]
        thinking = read_thinking(text, calling)
        marks = [mark.span() for mark in REASONING_MARKER.finditer(text) if not is_inside(mark.start(), calling)]
        lines: list[_Line] = []
        position = 0
        for start, stop in [*marks, (len(text), len(text))]:
            spoken = self.calls_in_thinking or not is_inside(position, thinking.spans)
            for line in text[position:start].split("\n"):
                lines.append(_Line(line, position, spoken))
                position += len(line) + 1
            position = stop
        return lines, Thinking() if self.calls_in_thinking else thinking


@dataclass(frozen=True)
class _Line:
    """A line of a turn, its start, and whether it is outside of reasoning."""

    text: str
    start: int
    is_spoken: bool


def _holds_a_mark(line: str, known: Mapping[str, ToolDescription]) -> bool:
    """Return whether the reasoning markers in a line are all inside the argument of its one call."""
    if not REASONING_MARKER.search(line):
        return False
    prefix = _PREFIX.match(line)
    call = _CALL.fullmatch(line[prefix.end() if prefix else 0 :].strip())
    return call is not None and (prefix is not None or call.group(1) in known)


def _read_line(line: str, known: dict[str, ToolDescription], id: str) -> ToolCall | None:  # noqa: A002
    prefix = _PREFIX.match(line)
    written = line[prefix.end() if prefix else 0 :].strip()
    call = _CALL.fullmatch(written)
    if call and (prefix or call.group(1) in known):
        return _read_call(call.group(1), call.group(2).strip(), known, id, line)
    if prefix and written in known and not known[written].schema.arguments:
        return ToolCall(id, written, {})
    opened = _OPENED.match(written)
    if prefix or (opened and opened.group(1) in known and "]" not in written):
        word = _WORD.match(written)
        reason = "the tool's name must be followed by its argument in square brackets, and nothing after them"
        return _malformed(id, word.group() if word else "", reason, known, line)
    return None


def _read_call(name: str, inside: str, known: dict[str, ToolDescription], id: str, line: str) -> ToolCall:  # noqa: A002
    tool = known.get(name)
    if tool is None:
        return ToolCall(id, name, {"argument": inside} if inside else {})
    try:
        arguments = _arguments(tool, inside)
        if any(isinstance(value, UntypedText) and _holds_an_action(value, known) for value in arguments.values()):
            raise UnparsableCall(_TWO_ON_A_LINE)
        return ToolCall(id, name, arguments)
    except UnparsableCall as error:
        return _malformed(id, name, str(error), known, line)


def _holds_an_action(value: str, known: Mapping[str, ToolDescription]) -> bool:
    """Return whether a second action begins after a bracket in an argument without a name."""
    closed = value.find("]")
    later = _LATER_ACTION.finditer(value, closed) if closed >= 0 else ()
    return any(action.group(1) is None or action.group(1) in known for action in later)


def _malformed(id: str, name: str, reason: str, known: dict[str, ToolDescription], line: str) -> ToolCall:  # noqa: A002
    example = _signature(known[name]) if name in known else "tool[argument]"
    return ToolCall(
        id,
        name,
        None,
        f"This action was not executed, because it cannot be read: {reason}. Write it like this:\nAction: {example}\n"
        f"You wrote: {truncate_middle(line.strip(), MAX_ECHO_CHARS)}",
    )


def _arguments(tool: ToolDescription, inside: str) -> dict[str, Any]:
    names = [argument.name for argument in tool.schema.arguments]
    required = [argument.name for argument in tool.schema.arguments if argument.required]
    if not inside and not required:
        return {}
    if len(names) == 1:
        return {names[0]: _single(names[0], inside)}
    if not names:
        raise UnparsableCall("the tool takes no argument, so there must be nothing between the brackets")
    arguments: dict[str, Any] = {}
    position = 0
    if not _ARGUMENT.match(inside):
        if len(required) != 1:
            raise UnparsableCall("each argument must be given as name=value")
        arguments[required[0]], position = _value(inside, 0)
    while position < len(inside):
        named = _ARGUMENT.match(inside, position)
        if named is None:
            raise UnparsableCall("each argument must be given as name=value, and a text that holds a comma in quotes")
        name = named.group(1)
        if name in arguments:
            raise UnparsableCall(f"the argument {name!r} is given twice")
        arguments[name], position = _value(inside, named.end())
    return arguments


def _single(name: str, inside: str) -> Any:
    text = inside.removeprefix(f"{name}=").strip()
    if text.startswith('"'):
        try:
            value, end = decode_value(text, 0)
        except InvalidJSON:
            return UntypedText(text)
        return value if end == len(text) else UntypedText(text)
    return UntypedText(text)


def _value(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at ``start``, and the position of the next argument."""
    if text.startswith(('"', "[", "{"), start):
        try:
            value, end = decode_value(text, start)
        except InvalidJSON as error:
            if text.startswith('"', start):
                raise UnparsableCall(f"a text in quotes must be a JSON string: {error}") from None
        else:
            if after := _END_OF_VALUE.match(text, end):
                return value, after.end()
            raise UnparsableCall("there must be a comma after a value in quotes or brackets")
    following = _NEXT_ARGUMENT.search(text, start)
    stop, resume = following.span() if following else (len(text), len(text))
    return UntypedText(text[start:stop].strip()), resume


def _bare(argument: str, value: Any) -> str:
    """Write a single argument without its name."""
    if not isinstance(value, str):
        return dump_escaped(value)
    plain = (
        value not in ("", "null")
        and value == value.strip()
        and "\n" not in value
        and not value.startswith(('"', "[", "{", f"{argument}="))
        and not REASONING_MARKER.search(value)
        and not ("]" in value and _LATER_ACTION.search(value, value.index("]")))
        and not _ARGUMENT.match(value)
        and not _NEXT_ARGUMENT.search(value)
    )
    return value if plain else dump_escaped(value)


def _quoted(value: Any) -> str:
    """Write one of several arguments such that its end is unambiguous."""
    if not isinstance(value, str):
        return dump_escaped(value)
    return value if _BARE.fullmatch(value) and value == value.strip() else dump_escaped(value)


def _signature(tool: ToolDescription) -> str:
    names = [argument.name for argument in tool.schema.arguments]
    if len(names) <= 1:
        return f"{tool.name}[{''.join(names)}]"
    return f"{tool.name}[{', '.join(f'{name}=…' for name in names)}]"


def _description(tool: ToolDescription) -> Iterator[str]:
    yield f"{_signature(tool)}: {' '.join(tool.description.split())}"
    yield from argument_lines(tool)
