"""TagsFormat: a tag for each tool, ``<search>…</search>``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import ConfigError
from agentfly.core.json_schema import UntypedText
from agentfly.core.messages import TOOL_NAME, Message, ToolCall
from agentfly.formats.toolcalls.block_format import (
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
    object_arguments,
    object_example,
    single_text_argument,
)
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

_OPENING = re.compile(r"<([A-Za-z_][\w-]*)(?=[\s/>])")
_CLOSING = re.compile(r"</([A-Za-z_][\w-]*)\s*>")
_ATTRIBUTE = r"\s+[^\W\d][\w.-]*\s*=\s*(?:\"[^\"]*\"|'[^']*')"
_REST_OF_TAG = re.compile(rf"((?:{_ATTRIBUTE})*)\s*(/?)>")
_NAMED = re.compile(r"([^\W\d][\w.-]*)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class TagsFormat(BlockFormat):
    """Calls as a tag with the tool's name: ``<search>green eggs</search>``.

    * For a tool with one argument, or with only one required argument, the body is that argument: the text between the
      tags, without line breaks at its ends and, if it is one line, without blanks there.
    * Several arguments are a JSON object in the body, decoded from its first character to its last, or attributes:
      ``<search limit="3">green eggs</search>``. The value of an attribute is the text between its quotes.
    * The types of the tool's arguments convert texts: ``5`` becomes a number if a number is expected.
    * ``<look/>`` calls a tool without arguments. Several tags are parallel calls. Tags with other names are text.

    A body that is not JSON is not escaped. If it contains tags of its own tool, its end is ambiguous. The call is then
    reported to the model as an error, and nothing after it is executed. Nothing is repaired. `write` uses JSON for
    values that could not be parsed back otherwise. Results return as a user message in ``<result>``. Text after a
    ``<result>`` that the model wrote itself is ignored.

    Args:
        calls_in_thinking: whether calls between ``<think>`` and ``</think>`` are executed.
        result_tag: the tag of results.

    Raises:
        ConfigError: ``result_tag`` is not a valid tag name.
    """

    result_tag: str = "result"
    uses_chat_template = False

    def __post_init__(self) -> None:
        if not TOOL_NAME.fullmatch(self.result_tag):
            raise ConfigError(f"TagsFormat(result_tag={self.result_tag!r}): give a word, for instance 'result'.")

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "tags"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """List the tools with one line each: how to call it, and what it does."""
        if not tools:
            return ""
        return "\n".join(
            [
                f"To use a tool, end your turn with its tag. The answer comes back in <{self.result_tag}>.",
                "The tools are:",
                *(line for tool in tools for line in _description(tool)),
            ]
        )

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call. A single text is written plainly if it can be, everything else as JSON."""
        if not arguments:
            return f"<{name}></{name}>"
        (value, *more) = arguments.values()
        bare = isinstance(value, str) and not more and _stands_for_itself(value, name)
        body = value if bare else dump_escaped(arguments)
        return f"<{name}>\n{body}\n</{name}>" if "\n" in body else f"<{name}>{body}</{name}>"

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return a user message with the observation between tags."""
        return {"role": "user", "content": f"<{self.result_tag}>\n{observation}\n</{self.result_tag}>"}

    def _result_marker(self) -> re.Pattern[str]:
        return re.compile(rf"<{self.result_tag}>")

    def _attempted_tool(self, heard: str, known: ToolsByName) -> str | None:
        closed = (closing.group(1) for closing in _CLOSING.finditer(heard) if closing.group(1) in known)
        return next(closed, None) or super()._attempted_tool(heard, known)

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        return blocks_at(_OPENING, text, lambda found: _block(text, found, known))


def _block(text: str, opening: re.Match[str], known: ToolsByName) -> CallBlock | None:
    tool = known.get(opening.group(1))
    if tool is None:
        return None
    start = opening.start()
    try:
        arguments, stop = _arguments(text, opening.end(), tool)
    except UnparsableCall as error:
        limit = end_of_malformed_call(text, opening.end())
        reason = f"{error}. Nothing behind it was executed"
        return CallBlock(start, limit, (malformed_call(text[start:limit], reason, _example(tool), tool.name),))
    return CallBlock(start, stop, (ParsedCall(tool.name, arguments),))


def _arguments(text: str, position: int, tool: ToolDescription) -> tuple[dict[str, Any], int]:
    """Return the arguments of the call whose tag name ends at ``position``, and the end of the call."""
    tag = _REST_OF_TAG.match(text, position)
    if tag is None:
        raise UnparsableCall("its tag is not closed by '>', or something else than name=\"value\" stands in it")
    attributes = _attributes(tag.group(1))
    if tag.group(2):
        return attributes, tag.end()
    if not attributes and (found := _object(text, tag.end(), tool)):
        return found
    body, stop = _body(text, tag.end(), tool)
    if not attributes:
        return single_text_argument(UntypedText(body), tool), stop
    missing = [one.name for one in tool.schema.arguments if one.required and one.name not in attributes]
    if body and len(missing) != 1:
        raise UnparsableCall("it is unclear which argument stands between the tags; write all as a JSON object there")
    return ({**attributes, missing[0]: UntypedText(body)} if body else attributes), stop


def _attributes(written: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for one in _NAMED.finditer(written):
        if one.group(1) in attributes:
            raise UnparsableCall(f"the attribute {one.group(1)[:100]!r} is given twice")
        attributes[one.group(1)] = UntypedText(one.group(2) if one.group(2) is not None else one.group(3))
    return attributes


def _object(text: str, position: int, tool: ToolDescription) -> tuple[dict[str, Any], int] | None:
    """Return the arguments in a body that is a JSON object of them, and the end of the call."""
    space = _SPACE.match(text, position)
    found = object_arguments(text, space.end() if space else position, tool)
    if found is None:
        return None
    arguments, end = found
    closing = re.compile(rf"\s*</{tool.name}>").match(text, end)
    if closing is None:
        raise UnparsableCall(f"the JSON object must be followed by </{tool.name}>")
    _require_clear_end(text, closing.end(), tool)
    return arguments, closing.end()


def _body(text: str, start: int, tool: ToolDescription) -> tuple[str, int]:
    """Return the text between the tags, and the end of the call."""
    closing = f"</{tool.name}>"
    end = text.find(closing, start)
    if end < 0:
        raise UnparsableCall(f"it is not closed by {closing}")
    if re.compile(rf"<{tool.name}(?=[\s/>])").search(text, start, end):
        raise _unclear(tool)
    _require_clear_end(text, end + len(closing), tool)
    return _trimmed(text[start:end]), end + len(closing)


def _require_clear_end(text: str, stop: int, tool: ToolDescription) -> None:
    """Check that the call that ends at ``stop`` has no second closing tag before the next call of the tool."""
    opening = re.compile(rf"<{tool.name}(?=[\s/>])").search(text, stop)
    if text.find(f"</{tool.name}>", stop, opening.start() if opening else len(text)) >= 0:
        raise _unclear(tool)


def _unclear(tool: ToolDescription) -> UnparsableCall:
    return UnparsableCall(f"it holds a tag of {tool.name!r} itself, so its end is ambiguous; write it as a JSON object")


def _trimmed(body: str) -> str:
    lines = body.strip("\r\n")
    return lines if "\n" in lines else lines.strip()


def _stands_for_itself(value: str, name: str) -> bool:
    tag = re.search(rf"</?{re.escape(name)}(?=[\s/>])", value)
    return value not in ("", "null") and value == _trimmed(value) and not value.lstrip().startswith("{") and not tag


def _example(tool: ToolDescription) -> str:
    if not tool.schema.arguments:
        return f"<{tool.name}/>"
    return f"<{tool.name}>{bare_argument(tool) or object_example(tool)}</{tool.name}>"


def _description(tool: ToolDescription) -> Iterator[str]:
    yield f"{_example(tool)}: {' '.join(tool.description.split())}"
    yield from argument_lines(tool)
