"""MistralFormat: calls after ``[TOOL_CALLS]``, as Mistral's models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentfly.core.errors import UsageError
from agentfly.core.lenient_json import InvalidJSON
from agentfly.formats.reasoning import REASONING_MARKER
from agentfly.formats.toolcalls.block_format import (
    CallBlock,
    ModelTrainedFormat,
    ParsedCall,
    ToolsByName,
    blocks_at,
    end_of_malformed_call,
    malformed_call,
)
from agentfly.formats.toolcalls.json_calls import (
    call_from_json,
    decode_objects,
    malformed_json_arguments,
    malformed_json_call,
)
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"

_OPEN = re.compile(re.escape(OPEN))
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*+[^\s\[\]{}]*+\s*+)?(?:\[ARGS\]\s*)?(?=\{)")
_END = re.compile(rf"\s*(?:\Z|</s>|(?={re.escape(OPEN)}|{REASONING_MARKER.pattern}))")
_INSIDE = re.compile(r"\[(?:ARGS|CALL_ID)\]")
_WORD = re.compile(r"[^\s\[\]{}]+")
_EXAMPLES = {
    "list": '[TOOL_CALLS][{"name": …, "arguments": {…}}]',
    "separate": "[TOOL_CALLS]name of the tool[ARGS]{…}",
}


@dataclass(frozen=True)
class MistralFormat(ModelTrainedFormat):
    """Calls after ``[TOOL_CALLS]``: a JSON list of them, or each as ``[TOOL_CALLS]name[ARGS]{…}``.

    Both are parsed with any ``style``. ``[CALL_ID]…`` and the ``id`` of an object are skipped. JSON is decoded from its
    first character to its last, as in `HermesFormat`, so a marker inside an argument is part of the argument. Nothing
    may follow the calls.

    An unparsable call is reported to the model as an error, and nothing after it is executed. Call ids have nine
    letters and digits, as the templates of these models require.

    Args:
        calls_in_thinking: whether calls inside reasoning are executed.
        uses_chat_template: whether the model's own chat template describes the tools.
        style: the style that `write` uses: ``"list"`` as models up to tokenizer version v7, or ``"separate"`` as those
            from v11 on.
    """

    style: Literal["list", "separate"] = "list"

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "mistral"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Describe the tools as JSON, and explain how to call them."""
        if not tools:
            return ""
        listed = json.dumps([tool.definition for tool in tools], ensure_ascii=False)
        return f"[AVAILABLE_TOOLS]{listed}[/AVAILABLE_TOOLS]\n\nTo call a tool, write this:\n{_EXAMPLES[self.style]}"

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call.

        Raises:
            UsageError: the name cannot be written before ``[ARGS]``.
        """
        if self.style == "list":
            return OPEN + json.dumps([{"name": name, "arguments": arguments}], ensure_ascii=False)
        if not _WORD.fullmatch(name):
            raise UsageError(f"A tool of the name {name!r} cannot be called in the format {self.name!r}: use a word.")
        return f"{OPEN}{name}{ARGUMENTS}{json.dumps(arguments, ensure_ascii=False)}"

    def _id(self, number: int) -> str:
        return f"call{number:05d}"

    def _inner_markers(self) -> re.Pattern[str]:
        return _INSIDE

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        return blocks_at(_OPEN, text, lambda found: self._block(text, found, known))

    def _block(self, text: str, opening: re.Match[str], known: ToolsByName) -> CallBlock:
        start, position = opening.span()
        head = _HEAD.match(text, position)
        body = head.end() if head else position
        try:
            objects, end = decode_objects(text, body)
            stop = _END.match(text, end)
        except InvalidJSON:
            stop = None
        if stop is None:
            limit = end_of_malformed_call(text, body)
            return CallBlock(start, limit, (self._malformed(head.group(1) if head else None, text[body:limit]),))
        if head is None:
            calls = tuple(call_from_json(value, _EXAMPLES["list"], known) for value in objects)
        elif len(objects) == 1:
            calls = (ParsedCall(head.group(1), objects[0]),)
        else:
            reason = "the arguments of a call must be one JSON object"
            calls = (malformed_call(text[body : stop.end()], reason, _EXAMPLES["separate"], head.group(1)),)
        return CallBlock(start, stop.end(), calls)

    def _malformed(self, name: str | None, written: str) -> ParsedCall:
        if name is not None:
            return malformed_json_arguments(name, written, _EXAMPLES["separate"])
        return malformed_json_call(written, _EXAMPLES[self.style])
