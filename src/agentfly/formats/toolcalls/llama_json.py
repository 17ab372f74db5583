"""LlamaJsonFormat: calls as bare JSON objects, as Llama 3.1 to 3.3 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.lenient_json import InvalidJSON, NestingTooDeep, decode_value
from agentfly.core.messages import Message, ToolCall
from agentfly.formats.reasoning import REASONING_MARKER
from agentfly.formats.toolcalls.block_format import (
    LINE_START,
    CallBlock,
    ModelTrainedFormat,
    ToolsByName,
    blocks_at,
    end_of_malformed_call,
)
from agentfly.formats.toolcalls.json_calls import call_from_json, find_tool_name, malformed_json_call
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

_MEMBER = r"[\"']?(?:name|type|id|parameters|arguments)[\"']?\s*:"
_OPENING = re.compile(
    rf"<\|python_(?:tag|start)\|>\s*(?:<\|python_end\|>\s*)?|{LINE_START}(?=(?:\[\s*)?\{{\s*{_MEMBER})", re.MULTILINE
)
_BETWEEN = re.compile(r"\s*+[;,]?\s*+(?:<\|python_(?:tag|start)\|>\s*+)?(?=\{)")
_END = re.compile(rf"\s*(?:<\|(?:python_end|eom_id|eom)\|>|\Z|(?={REASONING_MARKER.pattern}))|[ \t]*+;?[ \t]*+\n")
_ARGUMENTS = re.compile(r"[\"']?\b(?:parameters|arguments)[\"']?\s*:")
_LAST_LINE = re.compile(r"\}[ \t]*$", re.MULTILINE)
_NEAR = 1000  # characters in which a malformed object must show that it is a call
_EXAMPLE = '{"name": …, "parameters": {…}}'


@dataclass(frozen=True)
class LlamaJsonFormat(ModelTrainedFormat):
    """Calls as JSON objects with ``name`` and ``parameters`` (or ``arguments``), with or without ``<|python_tag|>``.

    An object is decoded from its first character to its last, as in `HermesFormat`. It counts as a call if it follows
    the tag, if it begins a line and has both members, or if it begins a line and names one of the tools. Other objects
    are answers. Several objects in a row, separated by ``;`` or in a list, are parallel calls. Nothing else may follow
    an object on its line.

    Text that is recognisably a call but cannot be parsed is reported to the model as an error, and nothing after it is
    executed.

    A turn enters the conversation with ``tool_calls`` if it is exactly one call, because the templates of these models
    write no more than that. Otherwise it enters as text, which these templates keep.

    Args:
        calls_in_thinking: whether calls between ``<think>`` and ``</think>`` are executed.
        uses_chat_template: whether the model's own chat template describes the tools.
    """

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "llama_json"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Describe the tools as JSON, one per line, and explain how to call them."""
        if not tools:
            return ""
        listed = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
        return (
            f"You can call these functions:\n{listed}\n\n"
            "To call one, write nothing but a JSON object with its name and its arguments, like this:\n"
            '{"name": "name of the function", "parameters": {"name of an argument": its value}}'
        )

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call."""
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)

    def assistant_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Return a message with the turn's one call as ``tool_calls``, or else with the turn's unchanged text."""
        message = super().assistant_message(text, calls)
        return message if len(calls) == 1 and not message["content"] else {"role": "assistant", "content": text}

    def _is_unambiguous_end(self, behind: str) -> bool:
        return not _LAST_LINE.search(behind)

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        return blocks_at(_OPENING, text, lambda found: _block(text, found, known))


def _block(text: str, opening: re.Match[str], known: ToolsByName) -> CallBlock | None:
    """Return the block at ``opening``; None if it is not a call."""
    start, position = opening.span()
    marked = opening.group().startswith("<|")
    try:
        objects, end = _objects(text, position)
    except NestingTooDeep:
        return _malformed(text, start, position, known, marked=marked) or CallBlock(
            start, end_of_malformed_call(text, position), ()
        )
    except InvalidJSON:
        return _malformed(text, start, position, known, marked=marked)
    if not (marked or (objects and _is_call(objects[0], known))):
        return CallBlock(start, end, ())  # an answer in JSON
    if objects and (stop := _END.match(text, end)):
        return CallBlock(start, stop.end(), tuple(call_from_json(value, _EXAMPLE, known) for value in objects))
    return _malformed(text, start, position, known, marked=True)


def _objects(text: str, position: int) -> tuple[list[Any], int]:
    """Return the consecutive objects from ``position`` on, or those of a list, up to one that is not a call."""
    value, end = decode_value(text, position)
    if isinstance(value, list):
        return value, end
    objects = [value]
    while following := _BETWEEN.match(text, end):
        try:
            value, after = decode_value(text, following.end(), origin=position)
        except InvalidJSON:
            if "\n" in following.group():
                break  # on a line of its own it is a call of its own
            raise
        if not _is_call(value, {}):
            break
        objects.append(value)
        end = after
    return objects, end


def _malformed(text: str, start: int, position: int, known: ToolsByName, *, marked: bool) -> CallBlock | None:
    near = text[position : position + _NEAR]
    if not (marked or _ARGUMENTS.search(near) or find_tool_name(near) in known):
        return None
    limit = end_of_malformed_call(text, position)
    return CallBlock(start, limit, (malformed_json_call(text[position:limit], _EXAMPLE),))


def _is_call(value: Any, known: ToolsByName) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return value["name"] in known or "parameters" in value or "arguments" in value
