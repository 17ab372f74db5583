"""Tool-call formats for small and base models, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool import Tool
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import ConfigError, UsageError
from agentfly.core.messages import ToolCall
from agentfly.formats.toolcalls.code_block import CodeBlockFormat
from agentfly.formats.toolcalls.react import ReActFormat
from agentfly.formats.toolcalls.tags import TagsFormat
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat

REACT = ReActFormat()
TAGS = TagsFormat()


@tool
def search(query: str, limit: int = 5) -> None:
    """Search."""


@tool
def add(a: int, b: int) -> None:
    """Add.

    Args:
        b: the second
    """


@tool
def look() -> None:
    """Look around."""


@tool
def shell(command: str) -> None:
    """Run a command."""


TOOLS: list[Tool] = [search, add, look, shell]

Calls = list[tuple[str, dict[str, Any] | None]]


def read(one: ToolCallFormat, text: str, tools: list[Tool] = TOOLS) -> Calls:
    return [(call.name, call.arguments) for call in one.parse(text, tools)]


# --- ReAct ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("Thought: hm\nAction: search\nAction Input: green eggs", [("search", {"query": "green eggs"})]),
        ("action : search\n\naction input : eggs\nObservation: made up\nAction: look", [("search", {"query": "eggs"})]),
        ('Action: search\nAction Input: {"query": "eggs", "limit": 3}', [("search", {"query": "eggs", "limit": 3})]),
        ('Action: search\nAction Input:\n{\n "query": "a\\nb"\n}\nSo.', [("search", {"query": "a\nb"})]),
        ('Action: search\nAction Input: "eggs"', [("search", {"query": "eggs"})]),
        ('Action: search\nAction Input: "a" or "b"', [("search", {"query": '"a" or "b"'})]),
        ('Action: search\nAction Input: {"x": 1}', [("search", {"query": '{"x": 1}'})]),
        ("Action: search\nAction Input: {x} is set", [("search", {"query": "{x} is set"})]),
        ('Action: add\nAction Input: {"a": 1, "b": 2}', [("add", {"a": 1, "b": 2})]),
        ("Action: look", [("look", {})]),
        (
            "Action: look\nAction Input: {}\nAction: shell\nAction Input: ls",
            [("look", {}), ("shell", {"command": "ls"})],
        ),
        ("Action: fly\nAction Input: home", [("fly", {"input": "home"})]),
        ("Final Answer: 5\nAction: look", []),
        ("My action: look", []),
        ("Action: search(eggs)", [("", None)]),
        ("Action: search", [("search", None)]),
        ("Action: add\nAction Input: 1, 2", [("add", None)]),
        ('Action: search\nAction Input: {"query": "eggs', [("search", None)]),
        ('Action: search\nAction Input: {"query": "eggs"} now', [("search", None)]),
        ("Action: search\nAction Input: one\ntwo", [("search", None)]),
        ("Action: search\nAction Input: one\nAction Input: two", [("search", None)]),
        ("Action: look\nAction Input: around", [("look", None)]),
        (
            "**Action:** search\n**Action Input**: eggs\n**Observation:** none\nAction: look",
            [("search", {"query": "eggs"})],
        ),
        (
            "Action 1: search\nAction Input 1: eggs\nObservation 1: none\nAction 2: look",
            [("search", {"query": "eggs"})],
        ),
        ("Action: search\nAction Input: {'query': 'eggs',}", [("search", {"query": "eggs"})]),
        ("Action: search\nAction Input: {'query': 'it's'}", [("search", None)]),
        ('Action: search\nAction Input: {"query": ""}\n"}', [("search", None)]),
        ("Action: search\nAction Input: eggs <think>or tea", [("search", None)]),
        ("**Action: search**\n**Action Input: eggs**", [("search", None)]),
        ("Action: look\n**Action Input: around**", [("look", None)]),
        ("Action Input: eggs", [("", None)]),
    ],
)
def test_thought_action_and_input_are_read(text: str, calls: Calls) -> None:
    assert read(REACT, text) == calls


def test_react_writes_a_single_text_as_small_models_can() -> None:
    assert REACT.write("search", {"query": "eggs"}) == "Action: search\nAction Input: eggs"
    assert REACT.write("add", {"a": 1, "b": 2}) == 'Action: add\nAction Input: {"a": 1, "b": 2}'


def test_the_instructions_of_react_are_few_words() -> None:
    assert REACT.instructions([shell, add]) == (
        "To use a tool, end your turn with these lines:\n"
        "Thought: what you need to know\n"
        "Action: shell\n"
        "Action Input: command\n"
        "The answer comes back after 'Observation:'. Once you know what to answer, write instead:\n"
        "Final Answer: your answer\n"
        "The tools are:\n"
        "shell: Run a command. Input: command\n"
        'add: Add. Input: {"a": …, "b": …}\n'
        "  a: integer\n"
        "  b: integer, the second"
    )


# --- tags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("I look: <search> green eggs </search>.", [("search", {"query": "green eggs"})]),
        ("<shell>\n  echo a\nb\n</shell>", [("shell", {"command": "  echo a\nb"})]),
        ('<search limit="3">eggs</search>', [("search", {"limit": "3", "query": "eggs"})]),
        ('<search query=\'a "b"\' limit = "3" />', [("search", {"query": 'a "b"', "limit": "3"})]),
        ('<search>{"query": "</search>", "limit": 3}</search>', [("search", {"query": "</search>", "limit": 3})]),
        ('<search>{"x": 1}</search>', [("search", {"query": '{"x": 1}'})]),
        (
            '<add>\n{"a": 1, "b": 2}\n</add><look/><look></look>',
            [("add", {"a": 1, "b": 2}), ("look", {}), ("look", {})],
        ),
        ("<search>eggs</search><result>low</result><search>tea</search>", [("search", {"query": "eggs"})]),
        ("<b>bold</b> <research>x</research> a <search-engine>", []),
        ("<search>eggs", [("search", None)]),
        ("<search>a </search> b</search>", [("search", None)]),
        ("<search>the <search> tag</search>", [("search", None)]),
        ("<search engine>eggs</search>", [("search", None)]),
        ('<search limit="1" limit="2">eggs</search>', [("search", None)]),
        ("<add>1, 2</add>", [("add", None)]),
        ('<add>{"a": 1</add>', [("add", None)]),
        ('<add a="1">2 3</add><add>{"a": 1, "b": 2} so</add>', [("add", {"a": "1", "b": "2 3"}), ("add", None)]),
        ("<look>around</look>", [("look", None)]),
        ("<add>{'a': 1, 'b': 2}</add>", [("add", {"a": 1, "b": 2})]),
        ('<search>{"query": ""}</search>"}</search>', [("search", None)]),
        ("eggs</search>", [("search", None)]),
    ],
)
def test_a_tag_of_a_tool_is_read(text: str, calls: Calls) -> None:
    assert read(TAGS, text) == calls


def test_a_call_that_a_body_quotes_is_never_executed() -> None:
    assert read(TAGS, "<shell>echo '<search>a</search>'</shell>") == [
        ("shell", {"command": "echo '<search>a</search>'"})
    ]
    assert read(TAGS, "<search>how to <shell>ls</shell>") == [("search", None)]


def test_results_of_tags_stand_in_the_tag_that_is_asked_for() -> None:
    result = TagsFormat(result_tag="information").result_message(ToolCall("call_0", "search", {}), "low")
    assert result == {"role": "user", "content": "<information>\nlow\n</information>"}
    with pytest.raises(ConfigError, match="result_tag='<x>'"):
        TagsFormat(result_tag="<x>")


def test_the_instructions_of_tags_are_few_words() -> None:
    assert TAGS.instructions([shell, add]) == (
        "To use a tool, end your turn with its tag. The answer comes back in <result>.\n"
        "The tools are:\n"
        "<shell>command</shell>: Run a command.\n"
        '<add>{"a": …, "b": …}</add>: Add.\n'
        "  a: integer\n"
        "  b: integer, the second"
    )


# --- a block of code -----------------------------------------------------------------------------------------------

BASH = CodeBlockFormat(language="bash")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("I list.\n```bash\nls -l\ncd /\n```\nDone.", "ls -l\ncd /"),
        ("```Bash title\nls\n```", "ls"),
        ("```bash\n```", ""),
        ("````bash\ncat <<EOF\n```\nEOF\n````", "cat <<EOF\n```\nEOF"),
        ("```python\nx = 1\n```\n```bash\nls\n```", "ls"),
        ("```\nsome output\n```\n```bash\nls\n```\n```python\nx\n```", "ls"),
    ],
)
def test_a_block_of_the_language_is_the_action(text: str, command: str) -> None:
    assert read(BASH, text, [shell]) == [("shell", {"command": command})]


@pytest.mark.parametrize("text", ["```python\nls\n```", "```\nls\n```", "`ls`", "```python\n```bash\nls"])
def test_other_blocks_are_text(text: str) -> None:
    assert read(BASH, text, [shell]) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```bash\nls", "not closed"),
        ("```bash\ncat <<EOF\n```python\nx\n```\nEOF\n```", "another fence begins inside"),
        ("```bash\ncat <<EOF\n```\nx\n```\nEOF\n```", "several blocks"),
        ("```bash\nls\n```\n```bash\ncd\n```", "several blocks"),
        ("```bash\ncat <<EOF\n```\n```]\n```", "several blocks"),
    ],
)
def test_a_block_whose_end_is_unclear_or_that_is_not_alone_is_one_error(text: str, reason: str) -> None:
    (call,) = BASH.parse(text, [shell])
    assert (call.name, call.arguments) == ("shell", None)
    assert reason in (call.error or "")


def test_a_longer_fence_holds_code_with_fences_of_its_own() -> None:
    assert BASH.write("shell", {"command": "a\n  ````\n"}) == "`````bash\na\n  ````\n\n`````"


def test_a_block_is_for_one_tool_with_one_text() -> None:
    agent = Agent(model="tiny", tools=[shell], tool_call_format=BASH)
    assert "```bash\ncommand\n```\nRun a command." in agent.system_message()
    for tools, which in (([shell, look], "one tool"), ([look], "one tool"), ([add], "one tool")):
        with pytest.raises(ConfigError, match=f"acts by {which} that takes one argument"):
            Agent(model="tiny", tools=tools, tool_call_format=BASH)
    chosen = CodeBlockFormat(language="bash", tool="shell")
    assert read(chosen, "```bash\nls\n```", [look, shell]) == [("shell", {"command": "ls"})]
    for arguments in ({}, {"a": "x", "b": "y"}, {"command": 3}):
        with pytest.raises(UsageError, match="cannot be written as a block of code"):
            BASH.write("shell", arguments)
    with pytest.raises(UsageError, match="'shell'"):
        chosen.write("look", {"command": "x"})
