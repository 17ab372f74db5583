from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.agents.tool_decorator import tool
from agentfly.core.messages import ToolCall
from agentfly.formats.toolcalls.action import ActionFormat


@tool
def check(item: str) -> str:
    """Look how much of an item is left."""
    return item


@tool
def shell(command: str) -> str:
    """Run a command.

    Args:
        command: a bash command line
    """
    return command


@tool
def guess(number: int) -> str:
    """Guess a number."""
    return str(number)


@tool
def add(a: int, b: str) -> str:
    """Add."""
    return str(a) + b


@tool
def search(query: str, limit: int = 5, tags: list[str] | None = None) -> str:
    """Search."""
    return query


@tool
def look() -> str:
    """Look around."""
    return ""


TOOLS = [check, shell, guess, add, search, look]
FORMAT = ActionFormat()


def calls_in(text: str, **settings: bool) -> list[ToolCall]:
    return list(ActionFormat(**settings).parse(text, TOOLS))


def only_call(text: str) -> ToolCall:
    (call,) = calls_in(text)
    return call


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("Action: check[eggs]", "check", {"item": "eggs"}),
        ("check[eggs]", "check", {"item": "eggs"}),
        ("  action :check [ eggs ] . ", "check", {"item": "eggs"}),
        ("Action: check[item=eggs]", "check", {"item": "eggs"}),
        ("Action: check[]", "check", {"item": ""}),
        ("Action: shell[echo a[0] ]; x=1, y=2]", "shell", {"command": "echo a[0] ]; x=1, y=2"}),
        ('Action: shell["print(1)\\nprint(2)"]', "shell", {"command": "print(1)\nprint(2)"}),
        ('Action: shell["a" "b"]', "shell", {"command": '"a" "b"'}),
        ("Action: guess[5]", "guess", {"number": "5"}),
        ("Action: add[a=1, b=two]", "add", {"a": "1", "b": "two"}),
        ("Action: add[a=1, b=two, three]", "add", {"a": "1", "b": "two, three"}),
        ('Action: add[b="x, a=2", a=1]', "add", {"b": "x, a=2", "a": "1"}),
        ("Action: search[red, and green]", "search", {"query": "red, and green"}),
        ("Action: search[red, limit=3]", "search", {"query": "red", "limit": "3"}),
        ('Action: search[query=red, tags=["a", "b, c=d"], limit=3]', "search", None),
        ("Action: look[]", "look", {}),
        ("Action: look", "look", {}),
        ("Action: fly[home]", "fly", {"argument": "home"}),
    ],
)
def test_a_line_is_read_as_a_call(text: str, name: str, arguments: dict[str, Any] | None) -> None:
    expected = {"query": "red", "tags": ["a", "b, c=d"], "limit": "3"} if arguments is None else arguments
    assert only_call(text) == ToolCall("call_0", name, expected)


def test_an_action_in_quotes_and_brackets_of_no_tool_are_part_of_the_argument() -> None:
    assert only_call('Action: shell["a[0] check[b]"]').arguments == {"command": "a[0] check[b]"}
    assert only_call("Action: shell[echo a[0] b[1]]").arguments == {"command": "echo a[0] b[1]"}


@pytest.mark.parametrize(
    "text", ["I would check[eggs] now.", "check[eggs] is what I do", "note[1]", "Actions: many", ""]
)
def test_prose_is_no_call(text: str) -> None:
    assert FORMAT.parse(text, TOOLS) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Action: check eggs", "square brackets"),
        ("Action: check[eggs", "square brackets"),
        ("check[eggs", "square brackets"),
        ("Action: check[eggs] please", "square brackets"),
        ("Action:", "square brackets"),
        ("Action: add[1, two]", "name=value"),
        ("Action: add[a=1, a=2]", "'a' is given twice"),
        ('Action: add[a=1, b="two]', "JSON string"),
        ('Action: add[a="1" b=2]', "comma after"),
        ("Action: look[around]", "takes no argument"),
        ("Action: check[eggs] Action: check[tea]", "another action stands behind"),
        ("Action: check[eggs], check[tea]", "another action stands behind"),
        ("check[eggs] and then check[tea]", "another action stands behind"),
        ("Action: check[eggs] Action 2: unknown[tea]", "another action stands behind"),
        ("Action: check[eggs] **Action:** shell[ls]", "another action stands behind"),
        ("Action: search[eggs, limit=1] check[tea]", "another action stands behind"),
        ('Action: check["eggs"] check["tea"]', "another action stands behind"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_never_half_a_call(text: str, reason: str) -> None:
    call = only_call(text)
    assert call.arguments is None
    assert reason in (call.error or "")
    assert "Write it like this:\nAction: " in (call.error or "")


def test_an_unknown_name_among_several_is_kept_for_the_schema_to_refuse() -> None:
    assert only_call("Action: search[query=red, colour=blue]").arguments == {"query": "red", "colour": "blue"}


def test_an_error_repeats_only_part_of_a_long_line() -> None:
    call = only_call("Action: check " + "x" * 50_000)
    assert len(call.error or "") < 1_300


def test_several_lines_are_parallel_calls_in_order() -> None:
    calls = FORMAT.parse("Let me see.\nAction: check[eggs]\nAction: guess[2]\nSo.", TOOLS, first_call=4)
    assert [(call.id, call.name) for call in calls] == [("call_4", "check"), ("call_5", "guess")]


def test_what_follows_an_observation_that_the_model_made_up_is_not_executed() -> None:
    calls = calls_in("Action: check[eggs]\nObservation: low\nAction: check[tea]")
    assert [call.arguments for call in calls] == [{"item": "eggs"}]


@pytest.mark.parametrize(
    ("text", "by_default", "with_thinking"),
    [
        ("<think>maybe\nAction: check[a]\n</think>\nAction: check[b]", 1, 2),
        ("[THINK]maybe\nAction: check[a]\n[/THINK]Action: check[b]", 1, 2),
        ("<think>Action: check[a]", 0, 1),
    ],
)
def test_calls_in_thinking_follow_the_one_setting(text: str, by_default: int, with_thinking: int) -> None:
    assert len([call for call in calls_in(text) if call.error is None]) == by_default
    assert len(calls_in(text, calls_in_thinking=True)) == with_thinking


@given(st.text(alphabet='check[]=,"\\ \nAction:ad1.{}<think>/') | st.text())
@pytest.mark.slow
def test_no_text_makes_parsing_fail(text: str) -> None:
    for written in (text, f"Action: {text}", f"Action: add[{text}]", f"check[{text}"):
        for call in calls_in(written):
            assert (call.arguments is None) == (call.error is not None)


awkward = st.text() | st.sampled_from(["a=1", "x, b=2", '"', "</think>", "item=eggs", "a]", " a ", "", "null", "[1]"])


@given(awkward)
def test_a_single_argument_that_is_written_is_read_back(text: str) -> None:
    for name, argument in (("check", "item"), ("search", "query")):
        assert only_call(FORMAT.write(name, {argument: text})) == ToolCall("call_0", name, {argument: text})


@given(awkward, st.integers(), st.lists(awkward))
def test_several_arguments_that_are_written_are_read_back(query: str, limit: int, tags: list[str]) -> None:
    given_arguments = {"tags": tags, "limit": limit, "query": query}
    call = only_call(FORMAT.write("search", given_arguments))
    assert call.arguments is not None
    assert search.schema.validate(call.arguments) == given_arguments


def test_one_argument_is_written_as_a_small_model_can_write_it() -> None:
    assert FORMAT.write("check", {"item": "green eggs"}) == "Action: check[green eggs]"
    assert FORMAT.write("add", {"a": 1, "b": "two"}) == "Action: add[a=1, b=two]"
    assert FORMAT.write("look", {}) == "Action: look[]"


def test_the_instructions_are_few_words() -> None:
    assert FORMAT.instructions([check, add]) == (
        "To use a tool, end your turn with a line like this:\n"
        "Action: check[item]\n"
        "The answer comes back after 'Observation:'. The tools are:\n"
        "check[item]: Look how much of an item is left.\n"
        "add[a=…, b=…]: Add.\n"
        "  a: integer"
    )
    assert "  command: a bash command line" in FORMAT.instructions([shell])
    assert "  limit: integer, optional" in FORMAT.instructions([search])
    assert FORMAT.instructions([]) == ""


def test_a_result_is_a_user_message() -> None:
    assert FORMAT.result_message(ToolCall("call_0", "check", {}), "low") == {
        "role": "user",
        "content": "Observation: low",
    }
