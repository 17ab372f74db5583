"""Tool-call formats that models are trained on, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from agentfly.agents.tool import Tool
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import UsageError
from agentfly.core.messages import ToolCall
from agentfly.formats.toolcalls.deepseek import DeepSeekFormat
from agentfly.formats.toolcalls.llama_json import LlamaJsonFormat
from agentfly.formats.toolcalls.llama_pythonic import LlamaPythonicFormat
from agentfly.formats.toolcalls.mistral import MistralFormat
from agentfly.formats.toolcalls.qwen3_coder import Qwen3CoderFormat
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat

XML = Qwen3CoderFormat()
LLAMA = LlamaJsonFormat()
PYTHON = LlamaPythonicFormat()
MISTRAL = MistralFormat()
DEEPSEEK = DeepSeekFormat()


@tool
def write(path: str, content: str = "") -> None:
    """Write a file."""


@tool
def search(query: str, limit: int = 5) -> None:
    """Search."""


TOOLS: list[Tool] = [write, search]

Calls = list[tuple[str, dict[str, Any] | None]]


def read(one: ToolCallFormat, text: str) -> Calls:
    return [(call.name, call.arguments) for call in one.parse(text, TOOLS)]


def xml(inside: str) -> str:
    return f"<tool_call>\n<function=write>\n{inside}\n</function>\n</tool_call>"


# --- Qwen3-Coder ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (xml("<parameter=path>\na\n</parameter>"), [("write", {"path": "a"})]),
        ("<function=write><parameter=path>a</parameter></function>", [("write", {"path": "a"})]),
        (
            '<function=write><parameter=content>x = "</parameter>"\ny</parameter></function>',
            [("write", {"content": 'x = "</parameter>"\ny'})],
        ),
        (
            "<function=write><parameter=content><parameter=a>1</parameter></parameter></function>",
            [("write", {"content": "<parameter=a>1</parameter>"})],
        ),
        (
            "<function=write><parameter=content><parameter=a>1</parameter>\n<parameter=b>2</parameter></parameter>"
            "</function>",
            [("write", {"content": "<parameter=a>1</parameter>\n<parameter=b>2</parameter>"})],
        ),
        (xml("<parameter=content>\n\n  a\n\n</parameter>"), [("write", {"content": "\n  a\n"})]),
        (
            "<tool_call><function=search></function><function=write></function></tool_call>",
            [("search", {}), ("write", {})],
        ),
        ("Now:\n" + xml("") + " then " + xml(""), [("write", {}), ("write", {})]),
        ("no <function> and no call", []),
        ("<parameter=path>a</parameter></function>", [("", None)]),
        (xml("") + "<tool_call>\n</parameter></function>", [("write", None)]),
    ],
)
def test_the_tags_of_qwen3_coder_are_read(text: str, calls: Calls) -> None:
    assert read(XML, text) == calls


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (xml("<parameter=path>a"), "not closed|missing"),
        (xml("<parameter=path>a</parameter><parameter=path>b</parameter>"), "given twice"),
        (xml("path=a"), "must stand after each parameter"),
        (xml("<parameter=content>say </function></tool_call> now</parameter>"), "stands in the parameter"),
        (xml("<parameter=content>a</parameter></function></tool_call> b</parameter>"), "unclear where a value ends"),
        (xml("<parameter=content>how to <parameter=x> it</parameter>"), "its </parameter> is missing|not closed"),
        ('<tool_call>{"name": "write", "arguments": {}}</tool_call>', "must begin with <function="),
        ("<tool_call><function=></function></tool_call>", "must begin with <function="),
    ],
)
def test_tags_whose_values_have_no_clear_end_are_one_error(text: str, reason: str) -> None:
    (call,) = XML.parse(text, TOOLS)
    assert call.arguments is None
    assert any(one in (call.error or "") for one in reason.split("|"))


def test_a_call_that_a_value_quotes_is_never_executed() -> None:
    quoted = "<tool_call><function=search></function></tool_call>"
    assert [call.arguments for call in XML.parse(xml(f"<parameter=content>{quoted}</parameter>"), TOOLS)] == [None]


@pytest.mark.parametrize(
    "value", ["a</parameter>\n<parameter=b>c", "</function></tool_call>", "<tool_call>", "<parameter=x>"]
)
def test_what_could_not_be_read_back_is_not_written(value: str) -> None:
    with pytest.raises(UsageError, match="'qwen3_coder', because an argument holds tags"):
        XML.write("write", {"content": value})


def test_values_of_tags_are_texts_that_the_types_of_the_tool_read() -> None:
    @tool
    def use(flag: bool, kind: str, number: int, items: list[str], code: str, maybe: str | None, plain: str) -> None:
        """Use."""

    written = {
        "flag": "True",
        "kind": "none",
        "number": "5",
        "items": '["a"]',
        "code": "0123",
        "maybe": "null",
        "plain": "null",
    }
    (call,) = XML.parse(XML.write("use", written), [use])
    assert call.arguments == written
    assert use.schema.validate(call.arguments) == {
        **written,
        "flag": True,
        "number": 5,
        "items": ["a"],
        "maybe": None,
    }


# --- Llama ---------------------------------------------------------------------------------------------------------

SEARCH = '{"name": "search", "parameters": {"query": "a"}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (SEARCH, [("search", {"query": "a"})]),
        (f"<|python_tag|>{SEARCH}<|eom_id|>", [("search", {"query": "a"})]),
        (f"<|python_start|><|python_end|>{SEARCH}", [("search", {"query": "a"})]),
        (f"{SEARCH}; {SEARCH}", [("search", {"query": "a"})] * 2),
        (f"I look.\n{SEARCH}\nWait.", [("search", {"query": "a"})]),
        ('{"type": "function", "name": "search", "arguments": {}}', [("search", {})]),
        ('{"name": "fly", "parameters": {"r":{"a":{"b":{"c":"}{"}}}}}', [("fly", {"r": {"a": {"b": {"c": "}{"}}}})]),
        (
            "{'name': 'search', 'parameters': {'query': 'a', 'limit': None,},}",
            [("search", {"query": "a", "limit": None})],
        ),
        (f"[{SEARCH}, {SEARCH}]", [("search", {"query": "a"})] * 2),
        ("{'name': 'search'}", [("search", {})]),
        ('{"name": "search", "parameters": {"query": "a"}', [("search", None)]),
        ('{name: "search", parameters: {query: "a"}}', [("search", None)]),
        ("{'name': 'fly', 'parameters': oops}", [("fly", None)]),
        ('{"type": "function", "function": {"name": "search", "parameters": {}}}', [("search", None)]),
        (f'{SEARCH}\n"}}}}', [("search", None)]),
        ('{"name": "Bob", "age": 3}', []),
        ('The answer is {"name": "search", "parameters": {}}', [("search", None)]),
        ('The answer is {"name": "Bob", "parameters": {}}', []),
        ('{"name": "Bob" is my answer', []),
        ('{"name": "search", "query": "a"}', [("search", None)]),
        (f"{SEARCH} and then", [("search", None)]),
        ("<|python_tag|>print(1)", [("", None)]),
        ('{"name": "search", "parameters": {"query": "say "hi""}}', [("search", None)]),
        (f'{SEARCH}\n{{"name": "write", "parameters": oops', [("search", {"query": "a"}), ("write", None)]),
    ],
)
def test_the_objects_of_llama_are_read(text: str, calls: Calls) -> None:
    assert read(LLAMA, text) == calls


def test_llama_s_turn_holds_its_call_apart_only_if_it_is_the_one_and_all() -> None:
    assert "tool_calls" in LLAMA.assistant_message(SEARCH, LLAMA.parse(SEARCH, TOOLS))
    for text in (f"I look.\n{SEARCH}", f"{SEARCH}\n{SEARCH}"):
        assert LLAMA.assistant_message(text, LLAMA.parse(text, TOOLS)) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[search(query="a", limit=3)]', [("search", {"query": "a", "limit": 3})]),
        ("[search('a', limit=3), write(path='b')]", [("search", {"query": "a", "limit": 3}), ("write", {"path": "b"})]),
        (
            '[s(q=["a","b"], o={"k":[1,{"z":2}]})]',
            [("s", {"q": ["a", "b"], "o": {"k": [1, {"z": 2}]}})],
        ),
        ("I look.\n[search(query='''a\n\"b\"''')]\n", [("search", {"query": 'a\n"b"'})]),
        ('[search(query="\\u00e9\\n\\x41\\d")]', [("search", {"query": "é\nA\\d"})]),
        (
            "[f(a=True, b=false, c=None, d=null, e=-1.5, f=[], g={},)]",
            [("f", {"a": True, "b": False, "c": None, "d": None, "e": -1.5, "f": [], "g": {}})],
        ),
        ("<|python_start|>[search(query='a')]<|python_end|>", [("search", {"query": "a"})]),
        ("<|tool_call_start|>[search(query='a')]<|tool_call_end|>Looking.", [("search", {"query": "a"})]),
        ("see [1](link) and [search](x)", []),
        ("[look(around)] is what I would do", []),
        ('[search(query="a"\n"b")]', [("search", None)]),
        ("[search(query=a)]", [("search", None)]),
        ("search(query='a')", [("search", None)]),
        ("I call [search(query='a')].", [("search", None)]),
        ("[search(query='a')]\nb')]", [("search", None)]),
        ("I search (query) first.\nsearch(query) is what I call", []),
        ("[search(query=f'a')]", [("search", None)]),
        ("[search(query=open('x').read())]", [("search", None)]),
        ("[search(query='a', query='b')]", [("search", None)]),
        ("[search('a', 'b', 'c')]", [("search", None)]),
        ("[search('a', query='b')]", [("search", None)]),
        ("[search(limit=0123)]", [("search", None)]),
        ("[search(limit=1e999)]", [("search", None)]),
        ("[search(query='\\ud800')]", [("search", None)]),
        ("[search(query='\\x4')]", [("search", None)]),
        ("[search(query='a)]", [("search", None)]),
        ("[search(query='a')] and more", [("search", None)]),
        ("[search(query=" + "[" * 5_000, [("search", None)]),
        ("[search(limit=" + "9" * 50_000 + ")]", [("search", None)]),
    ],
)
def test_the_python_of_llama_is_read_without_running_it(text: str, calls: Calls) -> None:
    assert read(PYTHON, text) == calls


@pytest.mark.parametrize("arguments", [{"a b": 1}, {"x": float("nan")}, {"": 1}])
def test_what_is_no_python_call_is_not_written(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be written in the format 'llama_pythonic'"):
        PYTHON.write("f", arguments)


# --- Mistral and DeepSeek ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            '[TOOL_CALLS][{"name": "search", "arguments": {"query": "a"}, "id": "abcdefghi"}]',
            [("search", {"query": "a"})],
        ),
        ('[TOOL_CALLS] [{"name":"a","arguments":{}}, {"name":"b","arguments":{}}]</s>', [("a", {}), ("b", {})]),
        (
            '[TOOL_CALLS]search[ARGS]{"query": "a"}[TOOL_CALLS]write[ARGS]{}',
            [("search", {"query": "a"}), ("write", {})],
        ),
        (
            '[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"query": "[TOOL_CALLS]"}',
            [("search", {"query": "[TOOL_CALLS]"})],
        ),
        ('[TOOL_CALLS]search{"query": "a",}', [("search", {"query": "a"})]),
        ('[TOOL_CALLS]search[ARGS]{"query": "a"} so', [("search", None)]),
        ("[TOOL_CALLS]search[ARGS]", [("", None)]),
        ('[TOOL_CALLS][{"name": "search", "arguments": {"query": "a', [("search", None)]),
        ('[TOOL_CALLS]search[ARGS]{"a": 1}{"b": 2}', [("search", None)]),
        ('[TOOL_CALLS]search[ARGS]{"query": ""}[TOOL_CALLS]"}', [("search", None)]),
        ('search[ARGS]{"query": "a"}', [("", None)]),
    ],
)
def test_the_calls_of_mistral_are_read(text: str, calls: Calls) -> None:
    assert read(MISTRAL, text) == calls


def test_ids_of_mistral_s_calls_have_nine_letters_and_digits() -> None:
    (call,) = MISTRAL.parse(MISTRAL.write("search", {}), TOOLS, first_call=12)
    assert call == ToolCall("call00012", "search", {})
    assert call.id.isalnum()
    assert len(call.id) == 9


BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f'{BEGIN}search{SEP}{{"query": "a"}}{END}', [("search", {"query": "a"})]),
        (f'{BEGIN}function{SEP}search\n```json\n{{"query": "a"}}\n```{END}', [("search", {"query": "a"})]),
        (f'{BEGIN}search{SEP}{{"query": "{END}"}}{END}', [("search", {"query": END})]),
        (f"{BEGIN}search{SEP}{{'query': 'a',}}{END}", [("search", {"query": "a"})]),
        (f"{BEGIN}a{SEP}{{}}{END}\n{BEGIN}b{SEP}{{}}{END}<｜tool▁calls▁end｜>", [("a", {}), ("b", {})]),
        (f'{BEGIN}search{SEP}{{"query": "a{END}{BEGIN}b{SEP}{{}}{END}', [("search", None), ("b", {})]),
        (f'{BEGIN}search{SEP}{{"query": "a', [("", None)]),
        (f"{BEGIN}search{END}", [("", None)]),
        (f"{BEGIN}search{SEP}[1]{END}", [("", None)]),
        (f'{BEGIN}search{SEP}{{"query": ""}}{END}"}}{END}', [("search", None)]),
        (f'search{SEP}{{"query": "a"}}', [("", None)]),
    ],
)
def test_the_calls_of_deepseek_are_read(text: str, calls: Calls) -> None:
    assert read(DEEPSEEK, text) == calls


@pytest.mark.parametrize("one", [MistralFormat(style="separate"), DEEPSEEK, DeepSeekFormat(style="v3")])
def test_a_name_that_cannot_stand_between_the_tags_is_not_written(one: ToolCallFormat) -> None:
    with pytest.raises(UsageError, match="use a word"):
        one.write("two words", {})
