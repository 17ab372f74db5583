"""Unescaped text in calls: it is executed as meant, or is an error; it is never altered."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import InvalidArguments
from agentfly.formats.toolcalls.code_block import CodeBlockFormat
from agentfly.formats.toolcalls.registry import tool_call_format
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat
from tests.support.scale import scaled


@tool
def run(code: str) -> None:
    """Run code."""


SNIPPETS = [
    'return ""',
    "return ''",
    'x = "}"',
    "x = '}'",
    's.replace(" ", "")',
    "s.replace(' ', '')",
    'git commit -m "" --allow-empty',
    'x.split(",")',
    "x.split(',')",
    'x = {"a": 1}',
    'x = {"a": "b",}',
    'print(f"{a}")',
    'print("hi")',
    "print('hi')",
    'print("a" "b")',
    'f("a", "b")',
    'd["key"]',
    'd["a"]["b"] = []',
    'if x == "":\n    pass',
    'x = """doc"""',
    "x = '''doc'''",
    'echo "$HOME"',
    "echo '{}' | jq '.a'",
    'grep -E "^(a|b)$" *.txt',
    'awk -F"," "{print $1}"',
    "awk '{print $1}'",
    'sed -i "s/,//" f',
    'curl -d "{}" url',
    'assert f() == "", "no"',
    'json.loads("{}")',
    'json.loads("[]")["a"]',
    "'it's'",
    "it's",
    '"',
    '""',
    '", ',
    '",',
    '"}',
    '"}}',
    '"},',
    '": ',
    '": "',
    "}",
    "{",
    "]",
    "[",
    "',",
    "'}",
    'x = "a", ',
    "a = b\n\nc = d\n",
    'print("</tool_call>")',
    'print("<tool_call>")',
    'print("[TOOL_CALLS]")',
    'say "<|im_end|>" now',
    "<think>",
    "x = [1, 2, 3,]",
    'x = ["a", "b",]',
    '{"name": "run", "arguments": {"code": "x"}}',
]

BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = CodeBlockFormat()

IN_JSON: dict[str, tuple[str, str]] = {  # what stands before and after the object of arguments
    "hermes": ('<tool_call>\n{"name": "run", "arguments": ', "}\n</tool_call>"),
    "llama_json": ('{"name": "run", "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS][{"name": "run", "arguments": ', "}]"),
    "deepseek": (f"{BEGIN}run{SEP}", END),
    "react": ("Action: run\nAction Input: ", ""),
    "tags": ("<run>", "</run>"),
}
RAW: dict[str, tuple[str, str]] = {  # formats that have no escapes
    "qwen3_coder": ("<tool_call>\n<function=run>\n<parameter=code>\n", "\n</parameter>\n</function>\n</tool_call>"),
    "tags": ("<run>", "</run>"),
    "action": ("Action: run[", "]"),
    "react": ("Action: run\nAction Input: ", ""),
    "code_block": ("```python\n", "\n```"),
}


def executed(name: str, text: str) -> list[dict[str, Any]]:
    """The arguments of the calls that a rollout would execute."""
    one: ToolCallFormat = tool_call_format(name)
    found = []
    for call in one.parse(text, [run]):
        if call.arguments is not None and call.name == "run":
            with contextlib.suppress(InvalidArguments):
                found.append(run.schema.validate(call.arguments))
    return found


def is_read(read: Callable[[str], Any], written: str) -> bool:
    try:
        read(written)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


code = st.lists(
    st.sampled_from(['"', "'", "{", "}", "[", "]", "(", ")", ",", ":", " ", "\n", '"""', "'''", '", "', '": "'])
    | st.sampled_from(["</tool_call>", "<tool_call>", "<think>", "<|im_end|>", "code", "```", "</run>", "]\n", END])
    | st.text(max_size=3),
    max_size=8,
).map(lambda pieces: "".join(pieces).replace("\\", "/"))  # a backslash begins an escape, whatever was meant


def corpus(function: Any) -> Any:
    for snippet in SNIPPETS:
        function = example(snippet)(function)
    return function


@pytest.mark.parametrize("quote", ['"', "'"])
@pytest.mark.parametrize("name", IN_JSON)
@corpus
@settings(max_examples=scaled(40, 3_000))
@given(code)
def test_code_in_json_that_is_not_escaped_is_never_altered(name: str, quote: str, snippet: str) -> None:
    before, after = IN_JSON[name]
    arguments = f'{{"code": {quote}{snippet}{quote}}}'
    if quote in snippet:  # then it may say something else, without a fault
        assume(not is_read(lambda text: json.loads(text, strict=False), arguments))
        assume(not is_read(ast.literal_eval, arguments.replace("\n", " ")))
    assert executed(name, f"{before}{arguments}{after}") in ([], [{"code": snippet}])


@pytest.mark.parametrize("quote", ['"', "'"])
@corpus
@settings(max_examples=scaled(40, 3_000))
@given(code)
def test_code_in_python_that_is_not_escaped_is_never_altered(quote: str, snippet: str) -> None:
    written = f"[run(code={quote}{snippet}{quote})]"
    if quote in snippet:
        assume(not is_read(ast.parse, written.replace("\n", " ")))
    assert executed("llama_pythonic", written) in ([], [{"code": snippet}])


UNESCAPED = st.lists(
    st.sampled_from(
        ["]", "[", "a", "\n", "</run>", "<run>", "</parameter>", "<parameter=x>", "</function>", "```", "```\n"]
    )
    | st.sampled_from(["</tool_call>", "<tool_call>", "{", "}", "'", '"', ",", " ", "code=", "<function=run>", "~"])
    | st.text(max_size=3),
    max_size=8,
).map(lambda pieces: "".join(pieces).replace("\\", "/").replace("\r", ""))


@pytest.mark.parametrize("name", RAW)
@corpus
@example("a[0]\nb[1]")
@example("x = [a]\n [b")
@example("]\n")
@example("a</run>b")
@example("{'code': 'it's'}")
@settings(max_examples=scaled(40, 3_000))
@given(UNESCAPED)
def test_code_in_a_format_without_escapes_is_never_altered(name: str, snippet: str) -> None:
    before, after = RAW[name]
    bare = snippet.strip()
    assume(name == "code_block" or not bare.startswith('"'))  # a JSON string, where that may stand
    assume(name not in ("react", "tags") or not is_read(ast.literal_eval, bare))  # an object of arguments
    assume(name != "tags" or not re.search("</run>.*<run", snippet, re.DOTALL))  # two calls, without a fault
    assume(name != "action" or not bare.startswith("code="))  # the argument with its name
    exact = name in ("qwen3_coder", "code_block")
    read = [one.get("code") for one in executed(name, f"{before}{snippet}{after}")]
    assert read in ([], [snippet]) or (not exact and [str(one).strip() for one in read] == [bare])
