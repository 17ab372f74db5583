"""Qwen3CoderFormat: calls in XML-like tags, as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import UsageError
from agentfly.core.json_schema import UntypedText
from agentfly.formats.reasoning import REASONING_MARKER
from agentfly.formats.toolcalls.block_format import (
    CallBlock,
    ModelTrainedFormat,
    ParsedCall,
    ParsedTurn,
    ToolsByName,
    blocks_at,
    end_of_malformed_call,
    malformed_call,
)
from agentfly.formats.toolcalls.json_calls import dump_escaped
from agentfly.formats.toolcalls.text_arguments import UnparsableCall
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

_OPENING = re.compile(r"<tool_call>\s*(?:<function=)?|<function=")
_NEXT_CALL = re.compile(f"{_OPENING.pattern}|{REASONING_MARKER.pattern}")
_FUNCTION = re.compile(r"([^<>\n]*)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?")
_TAG = re.compile(r"</?tool_call>|<function=|<parameter=[^<>\n]*>|</function>|</parameter>")
_INSIDE = re.compile(r"</tool_call>|</function>|<parameter=|</parameter>")
_END_OF_VALUE = re.compile(
    r"</parameter>\s*(?=<parameter=|</function>\s*(?:</tool_call>|<tool_call>|<function=|</?think>|\Z))"
)
_END = re.compile(r"</function>(?:\s*</tool_call>)?")
_EXAMPLE = "<tool_call>\n<function=…>\n<parameter=…>\n…\n</parameter>\n</function>\n</tool_call>"


@dataclass(frozen=True)
class Qwen3CoderFormat(ModelTrainedFormat):
    """Calls as ``<function=name>`` with a ``<parameter=name>`` for each argument, in ``<tool_call>`` tags.

    Every value is a text that the types of the tool's arguments convert: ``5`` or ``True`` to a number or a boolean,
    ``["a"]`` to a list, ``null`` to null where null is allowed. A text keeps every character except the line break
    after its opening tag and the one before its closing tag. The outer tag is optional, and may hold several functions.
    Several of either are parallel calls.

    A value is not escaped. It ends at the closing tag that is followed by the next parameter or the end of the call. So
    ``</parameter>`` and whole ``<parameter=a>1</parameter>`` inside it are part of it. If a value holds other tags of
    this format, its end is ambiguous. The call is then reported to the model as an error, and nothing after it is
    executed. `write` rejects values that could not be parsed back exactly. Nothing is repaired.

    Args:
        calls_in_thinking: whether calls between ``<think>`` and ``</think>`` are executed.
        uses_chat_template: whether the model's own chat template describes the tools.
    """

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "qwen3_coder"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Describe the tools as JSON, one per line, and explain how to call them."""
        if not tools:
            return ""
        listed = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
        example = "\n".join(
            [
                "<tool_call>",
                "<function=name of the tool>",
                "<parameter=name of the first argument>",
                "its value",
                "</parameter>",
                "<parameter=name of the second argument>",
                "its value, which may have",
                "several lines",
                "</parameter>",
                "</function>",
                "</tool_call>",
            ]
        )
        return f"You can use these tools:\n<tools>\n{listed}\n</tools>\n\nTo call a tool, write this:\n{example}"

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call. Values that are not text are written as JSON.

        Raises:
            UsageError: a name or a value contains tags of the format, so that it could not be parsed back unchanged.
        """
        texts = {key: value if isinstance(value, str) else dump_escaped(value) for key, value in arguments.items()}
        parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        written = f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
        read = list(self._blocks(written, {}))
        if read != [CallBlock(0, len(written), (ParsedCall(name, dict(texts)),))]:
            raise UsageError(
                f"The call of {name!r} cannot be written in the format {self.name!r}, because an argument holds tags "
                "of this format, which it cannot escape. Use a format that can, for instance 'hermes'."
            )
        return written

    def _inner_markers(self) -> re.Pattern[str]:
        return _INSIDE

    def _is_unambiguous(self, turn: ParsedTurn) -> bool:
        return all(block.is_readable for block in turn.blocks)  # a value may hold what looks like a call

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        return blocks_at(_OPENING, text, lambda found: _block(text, found))


def _block(text: str, opening: re.Match[str]) -> CallBlock:
    start, position = opening.span()
    function = _FUNCTION.match(text, position) if opening.group().endswith("<function=") else None
    name = function.group(1).strip() if function else ""
    if function is None or not name:
        following = _NEXT_CALL.search(text, position)
        limit = following.start() if following else len(text)
        return CallBlock(start, limit, (_error(text[start:limit], "it must begin with <function=name of the tool>"),))
    try:
        arguments, stop = _arguments(text, function.end())
    except UnparsableCall as error:
        limit = end_of_malformed_call(text, position)
        return CallBlock(start, limit, (_error(text[start:limit], f"{error}. Nothing behind it was executed", name),))
    following = _TAG.search(text, stop)
    if following and not following.group().startswith(("<tool_call>", "<function=")):
        limit = end_of_malformed_call(text, following.start())
        reason = f"{following.group()} stands behind its end, so it is unclear where a value ends"
        return CallBlock(start, limit, (_error(text[start:limit], f"{reason}. Nothing behind it was executed", name),))
    return CallBlock(start, stop, (ParsedCall(name, arguments),))


def _arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Return the arguments of the call whose function tag ends at ``position``, and the end of the call."""
    arguments: dict[str, Any] = {}
    while True:
        if end := _END.match(text, position):
            return arguments, end.end()
        opened = _PARAMETER.match(text, position)
        name = opened.group(1).strip() if opened else ""
        if opened is None or not name:
            raise UnparsableCall("a <parameter=…> or </function> must stand after each parameter")
        if name in arguments:
            raise UnparsableCall(f"the parameter {name[:100]!r} is given twice")
        stop, position = _end_of_value(text, opened.end(), name)
        value = text[opened.end() : stop]
        arguments[name] = UntypedText(value.removesuffix("\n"))


def _end_of_value(text: str, start: int, name: str) -> tuple[int, int]:
    """Return the end of the value that begins at ``start``, and the position after its closing tag."""
    inside = 0  # parameters that are opened in the value
    for tag in _TAG.finditer(text, start):
        written = tag.group()
        if written.startswith("<parameter="):
            inside += 1
        elif written == "</parameter>":
            if inside:
                inside -= 1
            elif end := _END_OF_VALUE.match(text, tag.start()):
                return tag.start(), end.end()
        elif written != "</function>":
            raise UnparsableCall(f"{written} stands in the parameter {name[:100]!r}, or its </parameter> is missing")
    raise UnparsableCall(f"the parameter {name[:100]!r} is not closed by </parameter> and </function>")


def _error(written: str, reason: str, name: str = "") -> ParsedCall:
    return malformed_call(written, reason, _EXAMPLE, name)
