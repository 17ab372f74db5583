from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.agents.tool_decorator import tool
from agentfly.core.messages import ToolCall
from agentfly.formats.toolcalls.hermes import HermesFormat

FORMAT = HermesFormat()


@tool
def write(path: str, content: str = "") -> None:
    """Write a file.

    Args:
        path: where to
    """


def calls_in(text: str, **settings: bool) -> list[ToolCall]:
    return list(HermesFormat(**settings).parse(text, [write]))


def only_call(text: str) -> ToolCall:
    (call,) = calls_in(text)
    return call


def tagged(inside: str) -> str:
    return f"<tool_call>{inside}</tool_call>"


# --- what is well written ------------------------------------------------------------------------------------------


def test_a_call_is_found_in_the_text_around_it() -> None:
    text = 'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    assert FORMAT.parse(text, [write]) == (ToolCall("call_0", "f", {"a": 1}),)


def test_text_without_a_tag_is_no_call() -> None:
    assert calls_in('{"name": "f", "arguments": {}}') == []


@pytest.mark.parametrize(
    "content",
    [
        "ends with </tool_call> here",
        "<tool_call>",
        '<tool_call>{"name": "evil", "arguments": {}}</tool_call>',
        "</think>",
        "<think>",
        'a "quoted" \\ line\nand { [ another }',
    ],
)
def test_markers_inside_an_argument_are_the_argument(content: str) -> None:
    text = FORMAT.write("write", {"path": "a", "content": content})
    assert only_call(text) == ToolCall("call_0", "write", {"path": "a", "content": content})


def test_parallel_calls_keep_their_order_and_have_ids_of_their_own() -> None:
    text = tagged('{"name":"a","arguments":{}}') + "\n" + tagged('{"name":"b","arguments":{}}')
    calls = FORMAT.parse(text, [], first_call=5)
    assert [(call.id, call.name) for call in calls] == [("call_5", "a"), ("call_6", "b")]


@pytest.mark.parametrize(
    "inside",
    [
        '{"name":"a","arguments":{}}\n{"name":"b","arguments":{}}',
        '{"name":"a","arguments":{}}, {"name":"b","arguments":{}}',
        '[{"name":"a","arguments":{}}, {"name":"b","arguments":{}}]',
    ],
)
def test_two_objects_in_one_tag_are_two_calls(inside: str) -> None:
    assert [call.name for call in calls_in(tagged(inside))] == ["a", "b"]


def test_nested_braces_and_the_other_name_of_arguments_are_read() -> None:
    call = only_call(tagged('{"name":"f","parameters":{"r":{"a":{"b":{"c":"}{"}}}}}'))
    assert call.arguments == {"r": {"a": {"b": {"c": "}{"}}}}


def test_arguments_written_as_a_json_text_are_decoded() -> None:
    assert only_call(tagged('{"name":"f","arguments":"{\\"a\\": 1}"}')).arguments == {"a": 1}


def test_a_call_of_a_tool_without_arguments_may_leave_them_out() -> None:
    assert only_call(tagged('{"name": "reset"}')).arguments == {}


def test_a_closing_tag_may_be_missing_where_the_turn_or_the_next_call_makes_the_end_clear() -> None:
    text = '<tool_call>{"name":"a","arguments":{}}\n<tool_call>{"name":"b","arguments":{}}'
    assert [(call.name, call.error) for call in calls_in(text)] == [("a", None), ("b", None)]


# --- thinking ------------------------------------------------------------------------------------------------------

CALL = tagged('{"name":"A","arguments":{}}')


@pytest.mark.parametrize(
    ("text", "by_default", "with_thinking"),
    [
        (f"<think>maybe {CALL}</think>{CALL}", 1, 2),
        (f"[THINK]maybe {CALL}[/THINK]{CALL}", 1, 2),
        (f"<think>maybe {CALL}", 0, 1),
        (f"<think>never mind</think>{CALL}", 1, 1),
        (f"<think>I could write <tool_call> now</think>{CALL}", 1, 2),
    ],
)
def test_calls_in_thinking_follow_the_one_setting(text: str, by_default: int, with_thinking: int) -> None:
    assert len([call for call in calls_in(text) if call.error is None]) == by_default
    assert len(calls_in(text, calls_in_thinking=True)) == with_thinking


# --- other notations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "f", "arguments": {"a": "x", "b": 1,},}',
        "{'name': 'f', 'arguments': {'a': 'x', 'b': 1}}",
        '{"name": "f", "arguments": "{\'a\': \'x\', \'b\': 1}"}',
    ],
)
def test_notations_with_one_meaning_are_read(inside: str) -> None:
    assert only_call(tagged(inside)) == ToolCall("call_0", "f", {"a": "x", "b": 1})


def test_python_literals_are_read() -> None:
    call = only_call(tagged("{'name': 'f', 'arguments': {'a': True, 'b': None, 'c': \"it's\"}}"))
    assert call.arguments == {"a": True, "b": None, "c": "it's"}


def test_line_breaks_inside_a_string_are_taken_as_they_stand() -> None:
    assert only_call(tagged('{"name":"f","arguments":{"a":"x\ny"}}')).arguments == {"a": "x\ny"}


# --- what cannot be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "write", "arguments": {"path":"a.md","content":"# Ti',
        '<tool_call>{"name": "write", "arguments": {"path":"a.md"',
        "<tool_call>",
        tagged('{"name": "write", "arguments": {"path":"a.md","content":"# Ti'),
        tagged('{"name":"w","arguments":{"content":"print("</tool_call>")"}}'),
        tagged('{"name":"w","arguments":{"content":"print("<tool_call>")"}}'),
        tagged('{"name":"w","arguments":{"content":"say \\"}}'),
        tagged('{"name":"w","arguments":{"a":1,"a":2}}'),
        tagged("{'name':'w','arguments':{'a':1,'a':2}}"),
        tagged('{"name":"w","arguments":{"x":NaN}}'),
        tagged('{"name":"w","arguments":{"x":1e999}}'),
        tagged('{"name":"w","arguments":{"x":"\\ud800"}}'),
        tagged('{"name": "w", "arguments": {"a": "x", "b": 1}}}'),
        tagged('{"name": "w", "arguments": {"a": "x", "b": 1}'),
        tagged('{name: "w", arguments: {a: "x", b: 1}}'),
        tagged('{"name": "w", "arguments": {"a": x}}'),
        tagged('{"name": "w", "arguments": {"a": "x" "y"}}'),
        tagged("{'name': 'w', 'arguments': {'a': 'it's'}}"),
        tagged('{"name":"w","arguments":null}'),
        tagged('{"name":"w","arguments":[1,2]}'),
        tagged('{"name":"w","arguments":"x"}'),
        tagged('{"name":"w","path":"a.md"}'),
        tagged('{"name":"w","arguments":{},"parameters":{}}'),
        tagged('{"arguments":{}}'),
        tagged('{"name":3,"arguments":{}}'),
        tagged("null"),
        tagged("[1,2]"),
        tagged("[]"),
        tagged('"x"'),
        tagged(""),
        tagged('{"name":"w","arguments":{"a":' + '{"x":' * 5000),
        tagged('{"name":"w","arguments":{"a":' + "[" * 200 + "]" * 200 + "}}"),
        tagged('{"name":"w","arguments":{"a":' + "9" * 5000 + "}}"),
        tagged("x" * 50_000),
    ],
)
def test_what_cannot_be_read_is_one_error_and_never_half_a_call(text: str) -> None:
    calls = calls_in(text)
    assert calls
    assert all(call.arguments is None and call.error for call in calls)
    assert all(len(call.error or "") < 1_300 for call in calls)
    assert [call.id for call in calls] == [f"call_{number}" for number in range(len(calls))]


def test_an_id_or_type_is_the_calls_unless_the_tool_has_an_argument_of_that_name() -> None:
    @tool
    def fetch(type: str = "") -> None:  # noqa: A002
        """Fetch."""

    text = tagged('{"id": "5", "type": "function", "name": "NAME", "arguments": {}}')
    assert only_call(text.replace("NAME", "write")).arguments == {}
    (call,) = FORMAT.parse(text.replace("NAME", "fetch"), [write, fetch])
    assert call.arguments is None
    assert 'must stand inside "arguments"' in (call.error or "")


def test_an_error_tells_the_position_and_how_a_quote_is_written() -> None:
    call = only_call(tagged('{"name": "write", "arguments": {"path": "say "hi" now"}}'))
    assert (
        "',' or '}' is missing at character 46, where 'hi\" now\"}}' stands; a quote inside a text is written as \\\""
    ) in (call.error or "")


def test_a_call_behind_which_the_end_of_one_stands_again_takes_all_along() -> None:
    """A text that was not escaped has ended too soon; what follows may have been part of it."""
    text = CALL + tagged('{"name": "write", "arguments": {"path": ""}}</tool_call> x {"y": ""}}')
    call = only_call(text)
    assert call.arguments is None
    assert "the end of a call stands once more behind it" in (call.error or "")
    assert [one.arguments for one in calls_in(CALL + "</tool_call>\n" + CALL)] == [{}, {}]


def test_an_error_says_what_is_wrong_and_how_to_write_it_and_keeps_the_name() -> None:
    call = only_call(tagged('{"name": "write", "arguments": {"path": oops'))
    assert call.name == "write"
    assert "cannot be read: it is not valid JSON" in (call.error or "")
    assert '{"name": …, "arguments": {…}}' in (call.error or "")
    assert "oops" in (call.error or "")


def test_a_malformed_call_does_not_take_its_neighbours_along() -> None:
    first, second, third = calls_in(CALL + tagged("{oops") + CALL)
    assert (first.error, third.error) == (None, None)
    assert second.error


@given(st.text(alphabet="{}[]:,\"'\\ \nab1") | st.text())
def test_no_text_makes_parsing_fail(inside: str) -> None:
    for text in (inside, tagged(inside), "<tool_call>" + inside, "<think>" + tagged(inside)):
        for call in calls_in(text):
            assert (call.arguments is None) == (call.error is not None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
written_calls = st.tuples(
    st.sampled_from(["f", "look-up"]), st.dictionaries(st.text(max_size=3), json_values, max_size=2)
)


@settings(max_examples=50)
@given(st.lists(written_calls, max_size=3))
def test_what_is_written_is_read_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "\n".join(FORMAT.write(name, arguments) for name, arguments in calls)
    assert [(call.name, call.arguments) for call in calls_in(text)] == calls


@given(json_values, st.data())
def test_a_call_that_is_cut_anywhere_is_never_read_as_another_call(value: Any, data: st.DataObject) -> None:
    whole = json.dumps({"name": "f", "arguments": {"first": "a <b> c", "value": value}}, ensure_ascii=False)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for call in calls_in("<tool_call>" + whole[:cut]):
        assert call.error


# --- prompts and results -------------------------------------------------------------------------------------------


def test_the_instructions_hold_each_tool_as_json_on_a_line() -> None:
    lines = FORMAT.instructions([write]).splitlines()
    assert json.loads(lines[lines.index("<tools>") + 1]) == write.definition
    assert FORMAT.instructions([]) == ""


def test_a_result_names_the_call_that_it_answers() -> None:
    assert FORMAT.result_message(ToolCall("call_7", "write", {}), "done") == {
        "role": "tool",
        "content": "done",
        "tool_call_id": "call_7",
        "name": "write",
    }


@pytest.mark.parametrize("name", ["", "<|im_end|>", "write\n", "two words", "x" * 65])
def test_a_result_does_not_repeat_a_name_that_no_tool_can_have(name: str) -> None:
    assert "name" not in FORMAT.result_message(ToolCall("call_7", name, None, "unreadable"), "Error")
