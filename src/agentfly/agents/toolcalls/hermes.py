"""HermesFormat: calls as JSON objects between ``<tool_call>`` tags, as Hermes and Qwen models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.agents.excerpt import ECHO_CHARS, excerpt
from agentfly.agents.tool import TOOL_NAME, Tool
from agentfly.agents.toolcalls.format import call_id
from agentfly.agents.toolcalls.json_text import BadSyntax, NotJSON, decode_objects, repair
from agentfly.agents.toolcalls.thinking import is_inside, thinking_spans
from agentfly.messages import Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_END_OF_MALFORMED = re.compile(r"<tool_call>|</?think>")
_NAME = re.compile(r'"name"\s*:\s*"([^"\n]{1,64})"')
_SHAPE = f'{OPEN}\n{{"name": …, "arguments": {{…}}}}\n{CLOSE}'


@dataclass(frozen=True)
class HermesFormat:
    """Calls as JSON objects with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``.

    The object is decoded from its first character to its last, so a marker inside an argument is an argument. Several
    tags in a turn, and several objects in a tag, are parallel calls. ``parameters`` is read as ``arguments``, and
    arguments written as a JSON text are decoded. Line breaks inside strings are read as they stand.

    Small slips are repaired if the tag is closed, nothing but white space follows it before the next call or the end,
    and no letter or digit of what was written is lost: Python's literals and quotes, a comma or closing bracket too
    many, a closing bracket missing at the end, words without quotes. Everything else is an error that the model is
    told; text that was cut off is never repaired.

    Args:
        calls_in_thinking: whether calls between ``<think>`` and ``</think>`` are executed.
        in_template: whether the model's own chat template describes the tools, as Qwen's do.
    """

    calls_in_thinking: bool = False
    in_template: bool = False

    @property
    def name(self) -> str:
        """The name by which an agent asks for the format."""
        return "hermes"

    def instructions(self, tools: Sequence[Tool]) -> str:
        """The tools as JSON, one a line, and how to call them."""
        if not tools:
            return ""
        listed = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
        return (
            f"You can use these tools:\n<tools>\n{listed}\n</tools>\n\n"
            "To call a tool, write a JSON object with its name and its arguments between tags, like this:\n"
            f'{OPEN}\n{{"name": "<name of the tool>", "arguments": {{"<name>": <value>}}}}\n{CLOSE}'
        )

    def parse(self, text: str, tools: Sequence[Tool], *, first_call: int = 0) -> tuple[ToolCall, ...]:
        """The calls in a turn's text."""
        blocks = list(_blocks(text))
        if not self.calls_in_thinking:
            thought = thinking_spans(text, [(block.start, block.stop) for block in blocks])
            blocks = [block for block in blocks if not is_inside(block.start, thought)]
        calls = [call for block in blocks for call in block.calls]
        return tuple(
            ToolCall(call_id(first_call + number), call.name, call.arguments, call.error)
            for number, call in enumerate(calls)
        )

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a call."""
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"{OPEN}\n{call}\n{CLOSE}"

    def result(self, call: ToolCall, observation: str) -> Message:
        """A message of role ``tool`` that names the call it answers, and the tool unless none can be called that."""
        message: Message = {"role": "tool", "content": observation, "tool_call_id": call.id}
        if TOOL_NAME.fullmatch(call.name):
            message["name"] = call.name
        return message


@dataclass(frozen=True)
class _Call:
    """A call that is not numbered yet."""

    name: str
    arguments: dict[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class _Block:
    """One tag and what it holds: the text from ``start`` to ``stop``, tags included."""

    start: int
    stop: int
    calls: tuple[_Call, ...]


def _blocks(text: str) -> Iterator[_Block]:
    start = text.find(OPEN)
    while start >= 0:
        block = _well_formed(text, start) or _malformed(text, start)
        yield block
        start = text.find(OPEN, block.stop)


def _well_formed(text: str, start: int) -> _Block | None:
    """The block at ``start`` if its objects can be decoded as they stand and its tag is closed, or the turn ends."""
    try:
        objects, end = decode_objects(text, start + len(OPEN))
    except NotJSON:
        return None
    if text.startswith(CLOSE, end):
        end += len(CLOSE)
    elif not (end == len(text) or text.startswith((OPEN, "</think>"), end)):
        return None
    return _Block(start, end, tuple(map(_call, objects)))


def _malformed(text: str, start: int) -> _Block:
    """The block at ``start``, which is not well formed: repaired, or one call with an error."""
    body = start + len(OPEN)
    boundary = _END_OF_MALFORMED.search(text, body)
    limit = boundary.start() if boundary else len(text)
    first, last = text.find(CLOSE, body, limit), text.rfind(CLOSE, body, limit)
    if first < 0:
        return _Block(start, limit, (_error(text[body:limit], f"it is not closed by {CLOSE}"),))
    stop = last + len(CLOSE)
    written = text[body:last]
    clear_end = first == last and not text[stop:limit].strip()
    return _Block(start, stop, _repaired(written, may_repair=clear_end))


def _repaired(written: str, *, may_repair: bool) -> tuple[_Call, ...]:
    try:
        _, end = decode_objects(written, 0)
        reason = f"there is more text after the object, at character {end}"
    except BadSyntax as error:
        reason = str(error)
    except NotJSON as error:
        return (_error(written, str(error)),)
    if may_repair:
        try:
            return tuple(map(_call, repair(written)))
        except NotJSON:
            pass  # what is wrong with the text as it stands says more
    return (_error(written, reason),)


def _error(written: str, reason: str) -> _Call:
    named = _NAME.search(written)
    message = (
        f"This tool call was not executed, because it cannot be read: {reason}. Write it like this:\n{_SHAPE}\n"
        f"You wrote: {excerpt(written.strip(), ECHO_CHARS)}"
    )
    return _Call(named.group(1) if named else "", None, message)


def _call(value: Any) -> _Call:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return _wrong(value, "", 'it must be a JSON object with the text "name"')
    unknown = sorted(set(value) - {"name", "arguments", "parameters", "id", "type"})
    if unknown or ("arguments" in value and "parameters" in value):
        return _wrong(value, name, 'everything that the tool takes must stand inside "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            decoded, end = decode_objects(arguments, 0)
            arguments = decoded[0] if len(decoded) == 1 and end == len(arguments) else arguments
        except NotJSON:
            pass  # it stays a text, and is refused as one
    if not isinstance(arguments, dict):
        return _wrong(value, name, '"arguments" must be a JSON object')
    return _Call(name, arguments)


def _wrong(value: Any, name: str, reason: str) -> _Call:
    return _Call(name, None, _error(json.dumps(value, ensure_ascii=False), reason).error)
