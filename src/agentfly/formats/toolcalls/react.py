"""ReActFormat: a thought, an action and its input, each on a separate line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.json_schema import UntypedText
from agentfly.core.lenient_json import InvalidJSON, decode_value
from agentfly.core.messages import TOOL_NAME, Message, ToolCall
from agentfly.formats.reasoning import REASONING_MARKER, REASONING_OPENER
from agentfly.formats.toolcalls.block_format import (
    LINE_START,
    BlockFormat,
    CallBlock,
    ParsedCall,
    ToolsByName,
    blocks_at,
    end_of_malformed_call,
    malformed_call,
)
from agentfly.formats.toolcalls.json_calls import dump_escaped
from agentfly.formats.toolcalls.text_arguments import (
    UnparsableCall,
    argument_lines,
    bare_argument,
    label_pattern,
    object_arguments,
    object_example,
    single_text_argument,
)
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

_FLAGS = re.IGNORECASE | re.MULTILINE
_INPUT_WORDS = r"Action[ \t]+Input"
_LINE = rf"((?:(?!{REASONING_MARKER.pattern})[^\n])*)"
_ACTION = re.compile(rf"{LINE_START}{label_pattern('Action')}{_LINE}", _FLAGS)
_INPUT = re.compile(rf"\s*\n[ \t]*{label_pattern(_INPUT_WORDS)}[ \t]*(?:\s*(?=\{{))?", _FLAGS)
_LIKE_INPUT = re.compile(rf"\s*+[^\w\n]*+{_INPUT_WORDS}\b", _FLAGS)
_REST_OF_LINE = re.compile(_LINE)
_THINKING_BEHIND = re.compile(rf"\s*+(?:{REASONING_OPENER.pattern})")
_END_OF_LINE = re.compile(rf"[ \t]*(?:\n|\Z|{REASONING_MARKER.pattern})")
_LABEL = re.compile(
    rf"{LINE_START}(?:{label_pattern('Thought|Action|Observation|Final Answer')}|({label_pattern(_INPUT_WORDS)}))",
    _FLAGS,
)
_GIVEN_INPUT = re.compile(rf"{LINE_START}{label_pattern(_INPUT_WORDS)}", _FLAGS)
_LAST_LINE = re.compile(r"\}[ \t]*$", re.MULTILINE)
_RESULT = re.compile(rf"{LINE_START}{label_pattern('Observation|Final Answer')}", _FLAGS)
_EXAMPLE = "Action: name of the tool\nAction Input: {}"


@dataclass(frozen=True)
class ReActFormat(BlockFormat):
    """Calls as ``Action: tool`` and, on the next line, ``Action Input: …`` (Yao et al., 2022, "ReAct").

    * The input is a JSON object of the arguments, decoded from its first character to its last.
    * For a tool with one argument, or with only one required argument, the input may be that argument on one line. In
      double quotes it is a JSON string. A text of several lines must be written as JSON.
    * The type of the tool's argument converts such a text: ``5`` becomes a number if a number is expected.
    * Labels may be numbered (``Action 1:``) or in bold (``**Action:**``).
    * A tool without arguments needs no input. Several actions are parallel calls. Lines after one that begins with
      ``Observation:`` or ``Final Answer:`` are ignored.

    Text that is recognisably a call but cannot be parsed is reported to the model as an error. Nothing is repaired.
    Observations return as a user message that begins with ``Observation:``.

    Args:
        calls_in_thinking: whether calls between ``<think>`` and ``</think>`` are executed.
    """

    uses_chat_template = False

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "react"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Explain calls, with the first tool as the example, and list the tools with one line each."""
        if not tools:
            return ""
        return "\n".join(
            [
                "To use a tool, end your turn with these lines:",
                "Thought: what you need to know",
                f"Action: {tools[0].name}",
                f"Action Input: {_input_of(tools[0])}",
                "The answer comes back after 'Observation:'. Once you know what to answer, write instead:",
                "Final Answer: your answer",
                "The tools are:",
                *(line for tool in tools for line in _description(tool)),
            ]
        )

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call. A single text is written plainly if it can be, everything else as JSON."""
        if not arguments:
            return f"Action: {name}\nAction Input: {{}}"
        (value, *more) = arguments.values()
        bare = isinstance(value, str) and not more and _stands_for_itself(value)
        return f"Action: {name}\nAction Input: {value if bare else dump_escaped(arguments)}"

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return a user message that begins with ``Observation:``."""
        return {"role": "user", "content": f"Observation: {observation}"}

    def _inner_markers(self) -> re.Pattern[str]:
        return _GIVEN_INPUT

    def _result_marker(self) -> re.Pattern[str]:
        return _RESULT

    def _is_unambiguous_end(self, behind: str) -> bool:
        return not _LAST_LINE.search(behind) and super()._is_unambiguous_end(behind)

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        return blocks_at(_ACTION, text, lambda found: _block(text, found, known))


def _block(text: str, action: re.Match[str], known: ToolsByName) -> CallBlock:
    start, name = action.start(), action.group(1).strip()
    if not TOOL_NAME.fullmatch(name):
        reason = "'Action:' must be followed by the name of a tool, and its input stand on the next line"
        return CallBlock(start, action.end(), (malformed_call(action.group(), reason, _example(known), ""),))
    tool = known.get(name)
    given = _INPUT.match(text, action.end())
    try:
        if given is None:
            arguments = _nothing(tool, misspelt=bool(_LIKE_INPUT.match(text, action.end())))
            return CallBlock(start, action.end(), (ParsedCall(name, arguments),))
        arguments, stop = _arguments(text, given.end(), tool)
    except UnparsableCall as error:
        limit = end_of_malformed_call(text, start) if given else action.end()
        reason = f"{error}. Nothing behind it was executed" if given else str(error)
        return CallBlock(
            start, limit, (malformed_call(text[start:limit], reason, _example({name: tool} if tool else {}), name),)
        )
    return CallBlock(start, stop, (ParsedCall(name, arguments),))


def _nothing(tool: ToolDescription | None, *, misspelt: bool) -> dict[str, Any]:
    if misspelt or (tool is not None and any(argument.required for argument in tool.schema.arguments)):
        raise UnparsableCall("'Action Input:' must stand on the next line")
    return {}


def _arguments(text: str, start: int, tool: ToolDescription | None) -> tuple[dict[str, Any], int]:
    """Return the arguments in the input at ``start``, and its end."""
    if found := object_arguments(text, start, tool):
        arguments, end = found
        if not _END_OF_LINE.match(text, end):
            raise UnparsableCall("there is more text behind the JSON object")
        return arguments, end
    line = _REST_OF_LINE.match(text, start)
    assert line is not None
    if REASONING_MARKER.match(text, line.end()) or _THINKING_BEHIND.match(text, line.end()):
        raise UnparsableCall(
            "an input in which, or behind which, a mark of thinking stands must be written as a JSON object"
        )
    label = _LABEL.search(text, line.end())
    if label and label.group(1):
        raise UnparsableCall("'Action Input:' is given twice")
    limit = end_of_malformed_call(text, line.end(), label.start() if label else None)
    if text[line.end() : limit].strip():
        raise UnparsableCall("an input of several lines must be written as a JSON object")
    written = line.group().strip()
    quoted = _quoted(written)
    return single_text_argument(UntypedText(written) if quoted is None else quoted, tool), line.end()


def _quoted(written: str) -> str | None:
    """Return the value of a JSON string; None for any other text."""
    if not written.startswith('"'):
        return None
    try:
        value, end = decode_value(written, 0)
    except InvalidJSON:
        return None
    return str(value) if end == len(written) else None


def _stands_for_itself(value: str) -> bool:
    return bool(
        value not in ("", "null")
        and value == value.strip()
        and "\n" not in value
        and not value.startswith(("{", '"'))
        and not REASONING_MARKER.search(value)
    )


def _input_of(tool: ToolDescription) -> str:
    return bare_argument(tool) or object_example(tool)


def _example(known: ToolsByName) -> str:
    tool = next(iter(known.values()), None)
    return f"Action: {tool.name}\nAction Input: {_input_of(tool)}" if tool else _EXAMPLE


def _description(tool: ToolDescription) -> Iterator[str]:
    yield f"{tool.name}: {' '.join(tool.description.split())} Input: {_input_of(tool)}"
    yield from argument_lines(tool)
