"""Text that evidently tries to call a tool: it is a call or an error for the model, and never the answer."""

from __future__ import annotations

import pytest

from agentfly.agents.tool import Tool
from agentfly.agents.tool_decorator import tool
from agentfly.formats.toolcalls.code_block import CodeBlockFormat
from agentfly.formats.toolcalls.deepseek import DeepSeekFormat
from agentfly.formats.toolcalls.mistral import MistralFormat
from agentfly.formats.toolcalls.registry import tool_call_format
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat


@tool
def run(code: str) -> None:
    """Run code."""


@tool
def look() -> None:
    """Look around."""


FORMATS: list[ToolCallFormat] = [
    *map(tool_call_format, ("hermes", "qwen3_coder", "llama_json", "llama_pythonic", "mistral", "deepseek")),
    MistralFormat(style="separate"),
    DeepSeekFormat(style="v3"),
    *map(tool_call_format, ("action", "react", "tags")),
    CodeBlockFormat(tool="run"),
]
TOOLS: list[Tool] = [run, look]


def tools_of(one: ToolCallFormat) -> list[Tool]:
    return [run] if one.name == "code_block" else TOOLS


ATTEMPTS = [
    "{'name': 'run', 'arguments': {'code': 'x'}}",
    '{"name": "run", "arguments": {"code": "x"}}',
    'I call {"name": "run", "parameters": {"code": "x"}} now.',
    '```json\n{"name": "run", "arguments": {"code": "x"}}\n```',
    '[{"name": "run", "arguments": {"code": "x"}}]',
    '{"arguments": {"code": "x"}, "name": "run"}',
    '{"type": "function", "function": {"name": "run", "arguments": {"code": "x"}}}',
    '{"tool": "run", "args": {"code": "x"}}',
    '{"action": "run", "action_input": "x"}',
    '{name: "run", arguments: {code: "x"}}',
    '{"name": "run", "arguments": {"code": "x"',
    '{"name": "run"}',
    '<tool_call>{"name": "run", "arguments": {"code": "x"}}</tool_call>',
    '{"name": "run", "arguments": {"code": "x"}}\n</tool_call>',
    "<tool_call>run(code='x')",
    "<function=run><parameter=code>x</parameter></function>",
    '[TOOL_CALLS]run[ARGS]{"code": "x"}',
    "<|python_tag|>run(code='x')",
    "<|tool_call_start|>[run(code='x')]<|tool_call_end|>",
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{"code": "x"}',
    "Action: run[x]",
    "Action: run\nAction Input: x",
    "- **Action: run(x)**",
]


@pytest.mark.parametrize("one", FORMATS, ids=repr)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_call_in_another_format_is_a_call_or_an_error(one: ToolCallFormat, attempt: str) -> None:
    for text in (attempt, f"Let me see.\n{attempt}\n", f"<think>I must.</think>\n{attempt}"):
        (call,) = one.parse(text, tools_of(one), first_call=4)
        assert call.name in ("run", "")
        assert call.error is not None or call.arguments == ({"code": "x"} if "x" in attempt else {})
        assert call.id == one.parse(one.write("run", {"code": "x"}), tools_of(one), first_call=4)[0].id


@pytest.mark.parametrize("one", FORMATS, ids=repr)
def test_the_error_shows_how_the_tool_is_called_in_the_agents_format(one: ToolCallFormat) -> None:
    text = 'I call {"tool_name": "run", "args": {"code": "x"}}'
    (call,) = one.parse(text, tools_of(one))
    assert call.error == (
        "This tool call was not executed, because it cannot be read: it is not written as a call must be here. "
        f"Write it like this:\n{one.write('run', {'code': '…'})}\nYou wrote: {text}"
    )


@pytest.mark.parametrize("one", FORMATS, ids=repr)
@pytest.mark.parametrize(
    "answer",
    [
        "The answer is 5.",
        "I would run it and look.",
        '{"name": "Bob", "age": 3}',
        '{"answer": {"name": "walk", "parameters": [1]}}',
        "The tool run takes arguments: code.",
        "name: 'run'",
        "To run code, use a tool. Its parameters: code.",
        "<think>{'name': 'run', 'arguments': {'code': 'x'}}</think>No.",
        "Action: none",
        "<b>run</b> is </i>",
        "run (the code) and look()ing",
    ],
)
def test_what_only_speaks_of_tools_is_an_answer(one: ToolCallFormat, answer: str) -> None:
    if one.name in ("action", "react") and answer.startswith("Action"):
        return  # a call of an unknown tool
    assert one.parse(answer, tools_of(one)) == ()


@pytest.mark.parametrize("one", FORMATS, ids=repr)
def test_beside_a_call_that_is_written_well_no_other_is_looked_for(one: ToolCallFormat) -> None:
    text = "Like {'name': 'run', 'arguments': {'code': 'y'}}:\n" + one.write("run", {"code": "x"})
    assert [call.arguments for call in one.parse(text, tools_of(one))] == [{"code": "x"}]
