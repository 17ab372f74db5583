"""HermesFormat: calls as JSON objects between ``<tool_call>`` tags, as Hermes and Qwen models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.lenient_json import InvalidJSON
from agentfly.core.messages import Message, ToolCall
from agentfly.formats.reasoning import REASONING_MARKER
from agentfly.formats.toolcalls.block_format import (
    CallBlock,
    ModelTrainedFormat,
    ToolsByName,
    blocks_at,
    end_of_malformed_call,
    malformed_call,
)
from agentfly.formats.toolcalls.json_calls import call_from_json, decode_objects, find_tool_name, malformed_json_call
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_OPEN, _CLOSE = re.compile(re.escape(OPEN)), re.compile(re.escape(CLOSE))
_SHAPE = f'{OPEN}\n{{"name": …, "arguments": {{…}}}}\n{CLOSE}'


@dataclass(frozen=True)
class HermesFormat(ModelTrainedFormat):
    """Calls as JSON objects with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``.

    The object is decoded from its first character to its last, so a marker inside an argument is part of the argument.
    Several tags in a turn, and several objects in a tag, are parallel calls. ``parameters`` is accepted for
    ``arguments``, and arguments written as a JSON text are decoded.

    Deviations with one meaning are accepted: texts in single quotes, Python's ``True``, ``False`` and ``None``, a comma
    after the last member, and line breaks inside texts. Nothing is repaired: everything else is reported to the model
    as an error with its position. Text after a call that is neither parsable nor closed is not executed, because it may
    have been meant as a part of it.

    Args:
        calls_in_thinking: whether calls between ``<think>`` and ``</think>`` are executed.
        uses_chat_template: whether the model's own chat template describes the tools, as those of Qwen2.5 and Qwen3 do.
    """

    uses_chat_template: bool = False

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "hermes"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Describe the tools as JSON, one per line, and explain how to call them."""
        if not tools:
            return ""
        listed = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
        return (
            f"You can use these tools:\n<tools>\n{listed}\n</tools>\n\n"
            "To call a tool, write a JSON object with its name and its arguments between tags, like this:\n"
            f'{OPEN}\n{{"name": "<name of the tool>", "arguments": {{"<name>": <value>}}}}\n{CLOSE}'
        )

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"{OPEN}\n{call}\n{CLOSE}"

    def _inner_markers(self) -> re.Pattern[str]:
        return _CLOSE

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        return blocks_at(
            _OPEN, text, lambda found: _well_formed(text, found.start(), known) or _malformed(text, found.start())
        )


def _well_formed(text: str, start: int, known: ToolsByName) -> CallBlock | None:
    """Return the block at ``start`` if its objects can be decoded and its tag is closed or the turn ends; else None."""
    try:
        objects, end = decode_objects(text, start + len(OPEN))
    except InvalidJSON:
        return None
    if text.startswith(CLOSE, end):
        end += len(CLOSE)
    elif not (end == len(text) or text.startswith(OPEN, end) or REASONING_MARKER.match(text, end)):
        return None
    return CallBlock(start, end, tuple(call_from_json(value, _SHAPE, known) for value in objects))


def _malformed(text: str, start: int) -> CallBlock:
    """Return the malformed block at ``start`` as one call with an error."""
    body = start + len(OPEN)
    following = text.find(OPEN, body)
    limit = end_of_malformed_call(text, body, following if following >= 0 else None)
    last = text.rfind(CLOSE, body, limit)
    if last < 0:
        limit = end_of_malformed_call(text, body)
        written = text[body:limit]
        return CallBlock(
            start, limit, (malformed_call(written, f"it is not closed by {CLOSE}", _SHAPE, find_tool_name(written)),)
        )
    return CallBlock(start, last + len(CLOSE), (malformed_json_call(text[body:last], _SHAPE),))


@dataclass(frozen=True)
class HermesUserResultFormat(HermesFormat):
    """The Hermes format with results in user messages, between tags, which every chat template supports.

    The tools are described in the system message if there is one, and otherwise before the first user message.
    """

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "hermes_for_all"

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return a user message with the result between tags."""
        return {"role": "user", "content": f"<tool_response>\n{observation}\n</tool_response>"}
