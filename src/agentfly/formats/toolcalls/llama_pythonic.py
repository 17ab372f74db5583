"""LlamaPythonicFormat: calls as a list of Python calls, as Llama 3.2, Llama 4 and LFM2 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import UsageError
from agentfly.core.messages import Message, ToolCall
from agentfly.formats.reasoning import REASONING_MARKER
from agentfly.formats.toolcalls.block_format import (
    LINE_START,
    CallBlock,
    ModelTrainedFormat,
    ParsedCall,
    ToolsByName,
    blocks_at,
    end_of_malformed_call,
    malformed_call,
)
from agentfly.formats.toolcalls.python_calls import InvalidPythonCall, PythonCall, read_calls, write_value
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

_OPENING = re.compile(
    rf"<\|(?:python_tag|python_start|tool_call_start)\|>\s*|{LINE_START}(?=\[\s*([^\W\d][\w.-]*)\s*\()", re.MULTILINE
)
_CLOSED = re.compile(r"<\|(?:python_end|tool_call_end|eom_id)\|>")
_CLOSING = re.compile(rf"\s*{_CLOSED.pattern}")
_LAST_LINE = re.compile(r"\][ \t]*$", re.MULTILINE)
_END_OF_LINE = re.compile(rf"[ \t]*(?:\n|\Z|{REASONING_MARKER.pattern})")
_END_OF_TURN = re.compile(rf"\s*(?:\Z|{REASONING_MARKER.pattern})")
_BARE_CALL = re.compile(  # without brackets, or with brackets that do not begin a line
    rf"(?:{LINE_START}|\[[ \t]*)([^\W\d][\w.-]*)[ \t]*\((?=\s*(?:[^\W\d]\w*\s*=(?!=)|[\"'\[{{\d]|\)\s*(?:\]|$)))",
    re.MULTILINE,
)
_EXAMPLE = '[name_of_tool(first=1, second="text")]'


@dataclass(frozen=True)
class LlamaPythonicFormat(ModelTrainedFormat):
    """Calls in Python syntax, in square brackets: ``[check(item="eggs"), add(a=1, b=2)]``.

    A parser of this package reads the list. It knows calls and plain values: texts in any of Python's quotes, numbers,
    ``True`` or ``true``, ``None`` or ``null``, lists and dictionaries. Nothing is evaluated. Arguments without a name
    are assigned in the tool's order. Line breaks inside quotes are kept.

    A list counts as calls if a tag marks it (``<|python_tag|>``, ``<|python_start|>``, ``<|tool_call_start|>``), if it
    begins a line and names a tool of the agent, or if it is the whole turn. Nothing else may follow on its last line.
    An unparsable list is reported to the model as an error, and nothing after it is executed. Nothing is repaired.

    A turn enters the conversation with ``tool_calls`` if ``opening`` marks lists, as for LFM2. Otherwise it enters as
    text, because Llama's templates keep text and would write calls without quotes.

    Args:
        calls_in_thinking: whether calls between ``<think>`` and ``</think>`` are executed.
        uses_chat_template: whether the model's own chat template describes the tools.
        opening: text that `write` puts before the list, for instance ``<|tool_call_start|>`` for LFM2.
        closing: text that `write` puts after it.
    """

    opening: str = ""
    closing: str = ""

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "llama_pythonic"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Describe the tools as JSON, one per line, and explain how to call them."""
        if not tools:
            return ""
        listed = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
        return (
            f"You can call these functions:\n{listed}\n\n"
            "To call some, write nothing but a list of calls in Python, each argument with its name, like this:\n"
            f"{self.opening}[first_function(argument=1), second_function(argument='text')]{self.closing}"
        )

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call.

        Raises:
            UsageError: a name is not valid in such a call, or a value cannot be written as JSON.
        """
        listed = ", ".join(f"{key}={write_value(value)}" for key, value in arguments.items())
        written = f"{self.opening}[{name}({listed})]{self.closing}"
        read = [call for block in self._blocks(written, {}) for call in block.calls]
        if read != [ParsedCall(name, arguments)]:
            raise UsageError(
                f"The call of {name!r} with the arguments {', '.join(map(repr, arguments))} cannot be written in the "
                f"format {self.name!r}: names must be words, and values what JSON can hold. Use 'hermes', for instance."
            )
        return written

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Return a message with the calls as ``tool_calls`` if tags mark them, else with the turn's unchanged text."""
        return super().assistant_message(text, calls) if self.opening else {"role": "assistant", "content": text}

    def _inner_markers(self) -> re.Pattern[str]:
        return _CLOSED

    def _attempted_tool(self, heard: str, known: ToolsByName) -> str | None:
        calls = (call.group(1) for call in _BARE_CALL.finditer(heard) if call.group(1) in known)
        return next(calls, None) or super()._attempted_tool(heard, known)

    def _is_unambiguous_end(self, behind: str) -> bool:
        return not _LAST_LINE.search(behind) and super()._is_unambiguous_end(behind)

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        return blocks_at(_OPENING, text, lambda found: _block(text, found, known))


def _block(text: str, opening: re.Match[str], known: ToolsByName) -> CallBlock | None:
    """Return the block at ``opening``; None if it is ordinary text."""
    start, position = opening.span()
    first = opening.group(1)
    marked = first is None
    try:
        calls, end = read_calls(text, position)
        stop = _end(text, end)
    except InvalidPythonCall as error:
        if not marked and first not in known:
            return None
        limit = end_of_malformed_call(text, position)
        reason = f"{error}. Nothing behind it was executed"
        return CallBlock(start, limit, (malformed_call(text[position:limit], reason, _EXAMPLE, first or ""),))
    if not marked and first not in known and not _is_all(text, start, stop):
        return None
    return CallBlock(start, stop, tuple(_call(call, known, text[position:end]) for call in calls))


def _end(text: str, end: int) -> int:
    """Return the end of the block whose list ends at ``end``."""
    closing = _CLOSING.match(text, end)
    stop = closing.end() if closing else end
    if closing or _END_OF_LINE.match(text, stop):
        return stop
    raise InvalidPythonCall("there is more text behind the list")


def _is_all(text: str, start: int, stop: int) -> bool:
    """Return whether only reasoning is before ``start`` and after ``stop``."""
    if not _END_OF_TURN.match(text, stop):
        return False
    before = text[:start].rstrip()
    return not before or before.endswith(("</think>", "[/THINK]"))


def _call(call: PythonCall, known: ToolsByName, written: str) -> ParsedCall:
    names = [argument.name for argument in known[call.name].schema.arguments] if call.name in known else []
    if call.name not in known:
        names = [f"argument_{number}" for number in range(1, len(call.positional) + 1)]
    given = dict(zip(names, call.positional, strict=False))
    if len(given) < len(call.positional) or set(given) & set(call.named):
        reason = "the arguments without a name do not fit the tool's; give each with its name"
        return malformed_call(written, reason, _EXAMPLE, call.name)
    return ParsedCall(call.name, {**given, **call.named})
