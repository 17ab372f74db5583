"""Arguments and line labels of the formats for small models: one plain argument, or all as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from agentfly.core.lenient_json import InvalidJSON, decode_value
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

_MEMBER = re.compile(r"""\{\s*(?:(["}])|'?([^\W\d]\w*)'?\s*:)""")


class UnparsableCall(ValueError):
    """A text that is meant as a call cannot be parsed. The message gives the model the reason."""


def bare_argument(tool: ToolDescription) -> str | None:
    """Return the argument that may be written without its name: the tool's only one, or the only required one."""
    names = [argument.name for argument in tool.schema.arguments]
    required = [argument.name for argument in tool.schema.arguments if argument.required]
    if len(names) == 1:
        return names[0]
    return required[0] if len(required) == 1 else None


def object_arguments(text: str, start: int, tool: ToolDescription | None) -> tuple[dict[str, Any], int] | None:
    """Return the arguments in the JSON object at ``start``, and the position after it.

    Returns:
        None if there is no such object. An object with other names than the tool's arguments does not count either, if
        the tool has an argument that may be written without its name.

    Raises:
        UnparsableCall: an object begins there that cannot be decoded.
    """
    if not text.startswith("{", start):
        return None
    bare = bare_argument(tool) if tool else None
    names = {argument.name for argument in tool.schema.arguments} if tool else set()
    try:
        value, end = decode_value(text, start)
    except InvalidJSON as error:
        member = _MEMBER.match(text, start)
        if bare is None or (member and (member.group(1) or member.group(2) in names)):
            raise UnparsableCall(str(error)) from None
        return None
    return (value, end) if bare is None or names.issuperset(value) else None


def single_text_argument(written: str, tool: ToolDescription | None) -> dict[str, Any]:
    """Return the arguments for a single text without a name; for an unknown tool, the argument is ``input``.

    Raises:
        UnparsableCall: the tool takes no argument, or several.
    """
    if tool is None:
        return {"input": written} if written else {}
    bare = bare_argument(tool)
    if bare is not None:
        return {bare: written} if written or any(argument.required for argument in tool.schema.arguments) else {}
    if not written and not any(argument.required for argument in tool.schema.arguments):
        return {}
    if not tool.schema.arguments:
        raise UnparsableCall("the tool takes no arguments")
    raise UnparsableCall(f"the arguments must be a JSON object: {object_example(tool)}")


def object_example(tool: ToolDescription) -> str:
    """Return all arguments of a tool as a JSON object, for instance ``{"a": …, "b": …}``."""
    return "{" + ", ".join(f'"{argument.name}": …' for argument in tool.schema.arguments) + "}"


def argument_lines(tool: ToolDescription) -> Iterator[str]:
    """Describe a tool's arguments: one line for each that is not simply a required text."""
    for argument in tool.schema.arguments:
        kind = tool.schema.type_of(argument.name)
        details = [kind if kind != "string" else "", "" if argument.required else "optional", argument.description]
        if any(details):
            yield f"  {argument.name}: {', '.join(filter(None, details))}"


def label_pattern(words: str) -> str:
    """Return the pattern of a label: ``Action:``, numbered ``Action 1:``, or bold ``**Action:**`` or ``**Action**:``.

    Bold type must be closed at the label. Otherwise it would extend into the line's text.

    Args:
        words: the pattern of the words, without a group.
    """
    numbered = rf"(?:{words})(?:[ \t]+\d{{1,3}})?[ \t]*"
    return rf"(?:{numbered}:|\*\*{numbered}(?::\*\*|\*\*[ \t]*:))"
