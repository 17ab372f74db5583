"""DeepSeekFormat: calls between DeepSeek's own tags, as its models V3, R1 and V3.1 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentfly.core.errors import UsageError
from agentfly.core.lenient_json import InvalidJSON, decode_value
from agentfly.formats.toolcalls.block_format import (
    CallBlock,
    ModelTrainedFormat,
    ParsedCall,
    ToolsByName,
    blocks_at,
    end_of_malformed_call,
    malformed_call,
)
from agentfly.formats.toolcalls.json_calls import malformed_json_arguments
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

CALLS, END_OF_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_OF_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_OPENING = re.compile(rf"(?:{CALLS}\s*)?{CALL}")
_TYPED = re.compile(rf"\s*+\w*+\s*+{SEPARATOR}\s*([^\s<>{{}}]+)[ \t]*\n\s*```(?:json)?\s*")
_PLAIN = re.compile(rf"\s*([^\s<>{{}}]+)\s*{SEPARATOR}\s*(?=\{{)")
_END = re.compile(rf"\s*(?:```\s*)?(?:{END_OF_CALL}(?:\s*{END_OF_CALLS})?|(?={CALL}|{END_OF_CALLS})|\Z)")
_INSIDE = re.compile("|".join((CALLS, END_OF_CALLS, SEPARATOR, END_OF_CALL)))
_WORD = re.compile(r"[^\s<>{}]+")
_EXAMPLES = {
    "v3": f"{CALLS}{CALL}function{SEPARATOR}name of the tool\n```json\n{{…}}\n```{END_OF_CALL}{END_OF_CALLS}",
    "v3.1": f"{CALLS}{CALL}name of the tool{SEPARATOR}{{…}}{END_OF_CALL}{END_OF_CALLS}",
}


@dataclass(frozen=True)
class DeepSeekFormat(ModelTrainedFormat):
    """Calls between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``.

    A call is the name and, after ``<｜tool▁sep｜>``, the arguments as a JSON object (V3.1). Or it is a type and, after
    the separator, the name and the arguments in a fenced block (V3 and R1). Both are parsed with any ``style``. JSON is
    decoded from its first character to its last, as in `HermesFormat`, so a tag inside an argument is part of the
    argument. An unparsable call is reported to the model as an error. Text after a call that is neither parsable nor
    closed is not executed.

    Args:
        calls_in_thinking: whether calls inside reasoning are executed.
        uses_chat_template: whether the model's own chat template describes the tools; those of V3 and R1 do not.
        style: the style that `write` uses, ``"v3"`` or ``"v3.1"``.
    """

    style: Literal["v3", "v3.1"] = "v3.1"

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "deepseek"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Describe the tools as JSON, one per line, and explain how to call them."""
        if not tools:
            return ""
        listed = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
        return f"You can use these tools:\n{listed}\n\nTo call a tool, write this:\n{_EXAMPLES[self.style]}"

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call.

        Raises:
            UsageError: the name cannot be written between the tags.
        """
        if not _WORD.fullmatch(name):
            raise UsageError(f"A tool of the name {name!r} cannot be called in the format {self.name!r}: use a word.")
        written = json.dumps(arguments, ensure_ascii=False)
        if self.style == "v3":
            call = f"{CALL}function{SEPARATOR}{name}\n```json\n{written}\n```{END_OF_CALL}"
        else:
            call = f"{CALL}{name}{SEPARATOR}{written}{END_OF_CALL}"
        return CALLS + call + END_OF_CALLS

    def _inner_markers(self) -> re.Pattern[str]:
        return _INSIDE

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        return blocks_at(_OPENING, text, lambda found: self._block(text, found))

    def _block(self, text: str, opening: re.Match[str]) -> CallBlock:
        start, position = opening.span()
        head = _TYPED.match(text, position) or _PLAIN.match(text, position)
        if head is not None:
            try:
                arguments, end = decode_value(text, head.end())
            except InvalidJSON:
                pass
            else:
                stop = _END.match(text, end)
                if stop and isinstance(arguments, dict):
                    return CallBlock(start, stop.end(), (ParsedCall(head.group(1), arguments),))
        return self._malformed(text, start, head.end() if head else position, head.group(1) if head else "")

    def _malformed(self, text: str, start: int, body: int, name: str) -> CallBlock:
        example = _EXAMPLES[self.style]
        following = text.find(CALL, body)
        limit = end_of_malformed_call(text, body, following if following >= 0 else None)
        last = text.rfind(END_OF_CALL, body, limit)
        if last < 0:
            limit = end_of_malformed_call(text, body)
            return CallBlock(
                start, limit, (malformed_call(text[start:limit], f"it is not closed by {END_OF_CALL}", example),)
            )
        stop = last + len(END_OF_CALL)
        if not name:
            reason = f"the name of the tool and {SEPARATOR} must stand before its arguments"
            return CallBlock(start, stop, (malformed_call(text[start:stop], reason, example),))
        written = text[body:last].rstrip().removesuffix("```")
        return CallBlock(start, stop, (malformed_json_arguments(name, written, example),))
