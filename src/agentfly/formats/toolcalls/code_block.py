"""CodeBlockFormat: a fenced block of code as the action of one tool."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.messages import Message, ToolCall
from agentfly.formats.toolcalls.block_format import (
    LINE_START,
    BlockFormat,
    CallBlock,
    ParsedCall,
    ParsedTurn,
    ToolsByName,
    blocks_at,
    end_of_malformed_call,
    malformed_call,
)
from agentfly.formats.toolcalls.text_arguments import bare_argument
from agentfly.formats.toolcalls.tool_call_format import ToolDescription

_OPENING = re.compile(rf"{LINE_START}(`{{3,}})[ \t]*([^\s`]*)[^\n`]*(?:\n|\Z)", re.MULTILINE)
_FENCE = re.compile(r"^[ \t]*(`{3,})([^\n]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"[A-Za-z][\w.+#-]*")
_ONE = "write one block a turn, and mark every other block of your answer with its language"


@dataclass(frozen=True)
class CodeBlockFormat(BlockFormat):
    """One fenced code block per turn. Its lines are the only text argument of the tool.

    The block begins with a line of three or more backticks and the language, and ends with a line of at least as many.
    Code that contains lines of backticks needs a longer fence; `write` makes one. Blocks of other languages are text.
    If the end of the block is ambiguous, or a turn has several blocks of the language, nothing is executed and the
    model gets an error. The end is ambiguous if the block is not closed, if another fence begins inside it, or if a
    fence without a language follows. Nothing is repaired. Observations return as a user message that begins with
    ``Observation:``.

    Args:
        calls_in_thinking: whether a block between ``<think>`` and ``</think>`` is executed.
        language: the language after the backticks, for instance ``bash``; ``""`` for none.
        tool: name of the tool that executes the block; ``""`` for the agent's only tool.
    """

    language: str = "python"
    tool: str = ""
    uses_chat_template = False

    @property
    def name(self) -> str:
        """The name by which an agent selects the format."""
        return "code_block"

    def instructions(self, tools: Sequence[ToolDescription]) -> str:
        """Explain how to act, and what the tool does.

        Raises:
            ConfigError: several tools could execute a block, or the tool takes more than one text.
        """
        if not tools:
            return ""
        tool = self._tool({tool.name: tool for tool in tools})
        if tool is None:
            asked = f"a tool {self.tool!r}" if self.tool else "one tool"
            raise ConfigError(
                f"The tool-call format 'code_block' acts by {asked} that takes one argument, but the agent's tools are "
                f"{', '.join(map(repr, tools))}. Give it the one: CodeBlockFormat(language='bash', tool='shell')."
            )
        return (
            f"To act, end your turn with one block like this:\n```{self.language}\n{bare_argument(tool)}\n```\n"
            f"{' '.join(tool.description.split())} The answer comes back after 'Observation:'."
        )

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a call, in a fence that is long enough.

        Raises:
            UsageError: the call does not have exactly one text argument, or the block is for another tool.
        """
        (value, *more) = arguments.values() or (None,)
        if more or not isinstance(value, str) or (self.tool and name != self.tool):
            raise UsageError(
                f"The call of {name!r} with {sorted(arguments)} cannot be written as a block of code, which is the one "
                f"text argument of {self.tool or 'the tool'!r}."
            )
        longest = max((len(fence.group(1)) for fence in _FENCE.finditer(value)), default=2)
        fence = "`" * (longest + 1)
        return f"{fence}{self.language}\n{value}\n{fence}"

    def result_message(self, call: ToolCall, observation: str) -> Message:
        """Return a user message that begins with ``Observation:``."""
        return {"role": "user", "content": f"Observation:\n{observation}"}

    def _tool(self, known: ToolsByName) -> ToolDescription | None:
        name = self.tool or (next(iter(known)) if len(known) == 1 else "")
        tool = known.get(name)
        return tool if tool is not None and bare_argument(tool) else None

    def _turn(self, text: str, known: ToolsByName) -> ParsedTurn:
        turn = super()._turn(text, known)
        return dataclasses.replace(turn, blocks=self._one(text, turn.blocks))

    def _one(self, text: str, blocks: Sequence[CallBlock]) -> Sequence[CallBlock]:
        """Return the one block, or one error for all blocks."""
        acting = [block for block in blocks if block.calls]
        if not acting:
            return []
        first, last = acting[0], blocks[-1]
        unclear = any(
            block.start > first.start and not _LANGUAGE.fullmatch(_language_of(text, block)) for block in blocks
        )
        if len(acting) == 1 and not unclear:
            return acting
        reason = f"there are several blocks in your turn; {_ONE}"
        written = text[first.start : last.stop]
        return [
            CallBlock(first.start, last.stop, (malformed_call(written, reason, self._example(), first.calls[0].name),))
        ]

    def _blocks(self, text: str, known: ToolsByName) -> Iterable[CallBlock]:
        tool = self._tool(known)
        return blocks_at(_OPENING, text, lambda found: self._block(text, found, tool)) if tool else ()

    def _block(self, text: str, opening: re.Match[str], tool: ToolDescription) -> CallBlock:
        start, body = opening.span()
        acts = opening.group(2).casefold() == self.language.casefold()
        for fence in _FENCE.finditer(text, body):
            if len(fence.group(1)) < len(opening.group(1)):
                continue
            if fence.group(2).strip():
                if not acts:
                    continue
                return self._unclear(
                    text, start, "another fence begins inside the block; use a longer one around it", tool
                )
            code = text[body : max(body, fence.start() - 1)]
            return CallBlock(
                start, fence.end(), (ParsedCall(tool.name, {str(bare_argument(tool)): code}),) if acts else ()
            )
        if acts:
            return self._unclear(text, start, f"the block is not closed by a line of {opening.group(1)}", tool)
        return CallBlock(start, end_of_malformed_call(text, body), ())

    def _unclear(self, text: str, start: int, reason: str, tool: ToolDescription) -> CallBlock:
        limit = end_of_malformed_call(text, start)
        return CallBlock(start, limit, (malformed_call(text[start:limit], reason, self._example(), tool.name),))

    def _example(self) -> str:
        return f"```{self.language}\n…\n```"


def _language_of(text: str, block: CallBlock) -> str:
    opening = _OPENING.match(text, block.start)
    return opening.group(2) if opening else ""
