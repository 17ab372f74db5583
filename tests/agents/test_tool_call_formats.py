"""Properties of every tool-call format."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentfly.agents.tool import Tool
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import UsageError
from agentfly.formats.toolcalls.action import ActionFormat
from agentfly.formats.toolcalls.code_block import CodeBlockFormat
from agentfly.formats.toolcalls.deepseek import DeepSeekFormat
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.formats.toolcalls.llama_json import LlamaJsonFormat
from agentfly.formats.toolcalls.llama_pythonic import LlamaPythonicFormat
from agentfly.formats.toolcalls.mistral import MistralFormat
from agentfly.formats.toolcalls.qwen3_coder import Qwen3CoderFormat
from agentfly.formats.toolcalls.react import ReActFormat
from agentfly.formats.toolcalls.tags import TagsFormat
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat
from tests.support.scale import scaled


@tool
def say(text: str) -> None:
    """Say something."""


@tool
def use(
    text: str,
    number: int = 0,
    ratio: float = 0.0,
    flag: bool = False,
    items: list[str] | None = None,
    tree: dict[str, Any] | None = None,
) -> None:
    """Use a lot."""


@tool
def look() -> None:
    """Look around."""


TOOLS = [say, use, look]
NATIVE: list[ToolCallFormat] = [
    HermesFormat(),
    Qwen3CoderFormat(),
    LlamaJsonFormat(),
    LlamaPythonicFormat(),
    LlamaPythonicFormat(opening="<|tool_call_start|>", closing="<|tool_call_end|>"),
    MistralFormat(),
    MistralFormat(style="separate"),
    DeepSeekFormat(),
    DeepSeekFormat(style="v3"),
]
PLAIN: list[ToolCallFormat] = [ActionFormat(), ReActFormat(), TagsFormat()]
CODE: ToolCallFormat = CodeBlockFormat()
ESCAPING = [one for one in [*NATIVE, *PLAIN] if one.name != "qwen3_coder"]

MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<function=say>",
    "</function>",
    "<parameter=text>",
    "</parameter>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|tool_call_end|>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<say>",
    "</say>",
    "<result>",
    "```python\n",
    "\n```\n",
    "\nAction: say",
    "\nAction Input: x",
    "\nObservation: x",
    "\nThought: x",
    "\nFinal Answer: x",
    '{"name": "say", "parameters": {"text": "x"}}',
    '\n{"name": "say", "parameters": {"text": "x"}}',
    '\n[say(text="x")]',
    "say[x]",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|python_end|>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    '"}}\n',
    "}\n",
    "]\n",
    "\n**Observation:** x",
    "{'name': 'say', 'arguments': {'text': 'x'}}",
]


def identity(one: ToolCallFormat) -> str:
    return repr(one)


def tools_of(one: ToolCallFormat) -> list[Tool]:
    return [say] if one.name == "code_block" else TOOLS


def read(one: ToolCallFormat, text: str) -> list[tuple[str, dict[str, Any] | None]]:
    """The calls as a rollout would execute them: their arguments read by the tool's types."""
    known = {tool.name: tool for tool in tools_of(one)}
    calls = one.parse(text, tools_of(one))
    assert all((call.arguments is None) == (call.error is not None) for call in calls)
    return [
        (call.name, known[call.name].schema.validate(call.arguments) if call.arguments is not None else None)
        for call in calls
    ]


def as_decoded(data: bytes) -> str:
    """Text as tokenizers decode it from bytes."""
    return data.decode(errors="replace")


pieces = st.sampled_from(MARKERS) | st.sampled_from(
    ['"', "'", "\\", "\n", "{", "}", "[", "]", "=", ",", " ", "é", "\U0001f600"]
)
texts = st.lists(pieces | st.text(max_size=4), max_size=6).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
uses = st.fixed_dictionaries(
    {"text": texts},
    optional={
        "number": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "items": st.lists(texts, max_size=3),
        "tree": st.dictionaries(texts, json_values, max_size=2),
    },
)


# --- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ESCAPING, ids=identity)
@settings(max_examples=scaled(60, 3_000))
@given(text=texts | st.text(), arguments=uses)
def test_what_is_written_is_read_back_exactly(one: ToolCallFormat, text: str, arguments: dict[str, Any]) -> None:
    for name, given_arguments in (("say", {"text": text}), ("use", arguments), ("look", {})):
        assert read(one, one.write(name, given_arguments)) == [(name, given_arguments)]


@pytest.mark.parametrize("one", [Qwen3CoderFormat(), CODE], ids=identity)
@settings(max_examples=scaled(100, 3_000))
@given(text=texts | st.text())
def test_a_format_without_escapes_reads_back_exactly_or_refuses_to_write(one: ToolCallFormat, text: str) -> None:
    try:
        written = one.write("say", {"text": text})
    except UsageError:
        assert any(marker in text for marker in ("tool_call>", "function", "parameter"))
    else:
        assert read(one, written) == [("say", {"text": text})]


@settings(max_examples=100)
@given(uses)
def test_what_qwen3_coder_writes_is_read_back_exactly(arguments: dict[str, Any]) -> None:
    try:
        written = Qwen3CoderFormat().write("use", arguments)
    except UsageError:
        assume(False)
    assert read(Qwen3CoderFormat(), written) == [("use", arguments)]


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN], ids=identity)
def test_null_and_the_text_null_are_told_apart_where_the_format_can(one: ToolCallFormat) -> None:
    @tool
    def note(text: str | None = "") -> None:
        """Note."""

    for value in (None, "null"):
        (call,) = one.parse(one.write("note", {"text": value}), [note])
        assert call.arguments is not None
        read_as = note.schema.validate(call.arguments)["text"]
        assert read_as == value or one.name == "qwen3_coder"  # whose values are all texts
        assert read_as is None or type(read_as) is str


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN], ids=identity)
def test_parallel_calls_keep_their_order_and_have_ids_of_their_own(one: ToolCallFormat) -> None:
    written = "\n".join([one.write("say", {"text": "a"}), one.write("look", {}), one.write("say", {"text": "b"})])
    calls = one.parse(f"I do this.\n{written}\n", TOOLS, first_call=7)
    assert [(call.name, call.arguments) for call in calls] == [
        ("say", {"text": "a"}),
        ("look", {}),
        ("say", {"text": "b"}),
    ]
    ids = [call.id for call in calls]
    assert len(set(ids)) == 3
    assert ids == [call.id for call in one.parse(written, TOOLS, first_call=7)]
    assert not set(ids) & {call.id for call in one.parse(written, TOOLS, first_call=10)}


# --- what is not well written --------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
@settings(max_examples=scaled(20, 2_000))
@given(text=st.lists(pieces | st.text(max_size=4), max_size=12).map("".join) | st.binary(max_size=60).map(as_decoded))
def test_no_text_makes_parsing_fail(one: ToolCallFormat, text: str) -> None:
    written = one.write("say", {"text": "words"})
    half = len(written) // 2
    for whole in (text, written + text, text + written, written[:half] + text, written[:half] + text + written[half:]):
        calls = one.parse(whole, tools_of(one), first_call=3)
        assert all((call.arguments is None) == (call.error is not None) for call in calls)
        assert len({call.id for call in calls}) == len(calls)
        one.assistant_message(whole, calls)


@pytest.mark.parametrize("one", [*NATIVE, TagsFormat(), CODE], ids=identity)
@settings(max_examples=scaled(60, 3_000))
@given(text=st.text(alphabet="ab <>{}[]'\"=,\\", max_size=12), data=st.data())
def test_a_call_that_is_cut_anywhere_is_never_read_as_another_call(
    one: ToolCallFormat, text: str, data: st.DataObject
) -> None:
    whole = one.write("say", {"text": text})
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert all(arguments in (None, {"text": text}) for _, arguments in read(one, whole[:cut]))


@pytest.mark.parametrize("one", [*NATIVE, TagsFormat(), CODE], ids=identity)
@settings(max_examples=scaled(100, 3_000))
@given(text=st.text(alphabet="ab c", min_size=1, max_size=12), marker=st.sampled_from(MARKERS), data=st.data())
def test_a_stray_marker_never_shortens_an_argument_unnoticed(
    one: ToolCallFormat, text: str, marker: str, data: st.DataObject
) -> None:
    whole = one.write("say", {"text": text})
    at = data.draw(st.integers(0, len(whole)))
    for call in one.parse(whole[:at] + marker + whole[at:], tools_of(one)):
        if call.name != "say" or call.arguments is None or set(call.arguments) != {"text"}:
            continue  # refused
        value = call.arguments["text"]
        if isinstance(value, str) and value != "x":  # what a marker that is a call itself says
            assert "".join(text.split()) in "".join(value.replace(marker.strip(), "").split())


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
def test_what_an_error_repeats_is_bounded(one: ToolCallFormat) -> None:
    written = one.write("say", {"text": "words"})
    for garbage in ("x" * 50_000, '{"' * 25_000, "[" * 50_000, '{"name": "say", "parameters": ' + "x" * 50_000):
        for text in (
            written[: len(written) // 2] + garbage,
            garbage + written,
            written.replace("words", garbage + "\\"),
        ):
            assert all(len(call.error or "") < 1_400 for call in one.parse(text, tools_of(one)))


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
@pytest.mark.slow
def test_garbage_takes_linear_time(one: ToolCallFormat) -> None:
    """Where it does not, the time limit of the tests ends this one."""
    written = one.write("say", {"text": "words"})
    endless = [
        "x" * 50_000,
        written[:-1] * 1_000,
        written[1:] * 1_000,
        written[: len(written) // 2] * 1_000,
        written[len(written) // 2 :] * 1_000,
        *(marker * (50_000 // len(marker)) for marker in (*MARKERS, "\n{'name':'x\\'")),
        *(blank * 100_000 for blank in (" ", "\t", "\n", "\r\n", "\v", "\u2028", "\u3000")),
        *(
            begun + blank * 100_000 + "x"
            for begun in (
                *(written[:length] for length in range(1, len(written) + 1, 3)),
                "[TOOL_CALLS]say[CALL_ID]",
                "{'name': 'say'",
                "<｜tool▁call▁begin｜>function",
                "Action: say\n",
                "say(",
            )
            for blank in (" ", "\n", "\u2028")
        ),
        *(
            opening * (500_000 // len(opening))
            for opening in (
                '{"name":',
                '\n{"name":',
                "\n[",
                "\n[say(",
                '\n{"a":[',
                '{"name": "say" ',
                "\n]",
                '"}}\n',
            )
        ),
    ]
    for text in endless:
        one.parse(text, tools_of(one))


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
def test_garbage_of_random_pieces_of_a_format_is_read_in_linear_time(one: ToolCallFormat) -> None:
    chance = random.Random(0)
    written = one.write("say", {"text": "words"})
    parts = [written[start : start + chance.randint(1, 12)] for start in range(0, len(written), 5)]
    one.parse("".join(chance.choices([*parts, *MARKERS, "\n", " "], k=10_000)), tools_of(one))


@pytest.mark.parametrize(
    ("one", "turn"),
    [
        (
            MistralFormat(),
            '[TOOL_CALLS][{"name": "say", "arguments": {"text": "[/THINK]"}}]\nand then\n'
            '[TOOL_CALLS][{"name": "say", "arguments": {"text": "b"}}]',
        ),
        (LlamaPythonicFormat(), '[say(text="a")][say(text="</think>")]'),
        (ReActFormat(), "Action: say\nAction Input: a</think>b"),
        (ActionFormat(), "Action: say[a]<think>\nb]"),
    ],
    ids=["mistral", "llama_pythonic", "react", "action"],
)
def test_a_call_that_a_mark_in_an_argument_would_hide_is_an_error(one: ToolCallFormat, turn: str) -> None:
    for opened in ("", "<think>\n"):
        calls = one.parse(opened + turn, TOOLS)
        assert calls
        assert calls[0].error is not None


# --- thinking, and the conversation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
def test_calls_in_thinking_follow_the_one_setting(one: ToolCallFormat) -> None:
    thoughts, spoken = one.write("say", {"text": "a"}), one.write("say", {"text": "b"})
    eager = type(one)(calls_in_thinking=True)  # type: ignore[call-arg]
    for thinking in (
        f"<think>maybe\n{thoughts}\n</think>\n",
        f"[THINK]\n{thoughts}\n[/THINK]\n",
    ):
        assert read(one, thinking + spoken) == [("say", {"text": "b"})]
        assert len(eager.parse(thinking, tools_of(one))) == 1
    assert one.parse("<think>maybe", tools_of(one)) == ()
    assert len(eager.parse(f"<think>maybe\n{thoughts}", tools_of(one))) == 1


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
def test_a_turn_in_which_a_call_may_be_only_thought_is_one_error(one: ToolCallFormat) -> None:
    first, second = one.write("say", {"text": "a"}), one.write("say", {"text": "b"})
    for turn in (
        f"<think>maybe\n{first}",
        f"<think>maybe\n{first}\n[THINK]\n{second}",
        f"maybe\n{first}\n</think>\n{second}",
        f"{first}\n[/THINK]\n",
    ):
        (call,) = one.parse(turn, tools_of(one))
        assert call.error is not None
        assert "Nothing of your turn was executed" in call.error or one.name == "code_block"


THOUGHT_MARKS = ["<think>", "</think>", "[THINK]", "[/THINK]"]
with_marks = st.lists(
    st.sampled_from([*THOUGHT_MARKS, *THOUGHT_MARKS, "\n", '"', "]", "}", ")", "a", " "]) | pieces,
    min_size=1,
    max_size=6,
).map("".join)


def escaped_not_at_all(one: ToolCallFormat, text: str) -> str:
    """A call with ``text`` as the argument, put in as models do that escape nothing."""
    return one.write("say", {"text": "ARGUMENT"}).replace("ARGUMENT", text)


@pytest.mark.parametrize("opened", ["", "<think>\n", "[THINK]"])
@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
@settings(max_examples=scaled(60, 3_000))
@given(text=with_marks, another=st.booleans())
def test_marks_of_thinking_in_an_argument_lose_no_call(
    one: ToolCallFormat, opened: str, text: str, another: bool
) -> None:
    closed = opened and f"{opened}I think.\n{'</think>' if 'think' in opened else '[/THINK]'}\n"
    try:
        written = one.write("say", {"text": text})
    except UsageError:
        assume(False)
    last = "" if one.name == "code_block" or not another else "\n" + one.write("say", {"text": "last"})
    assert read(one, closed + written + last) == [
        ("say", {"text": text}),
        *([("say", {"text": "last"})] if last else []),
    ]


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\nI think.\n</think>\n"])
@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
@settings(max_examples=scaled(100, 5_000))
@given(
    before=st.sampled_from(["", "a", '"', 'a"', "a]", "a\n"]),
    mark=st.sampled_from(["</think>", "[/THINK]", "<think>", "[THINK]", "<think>a</think>"]),
    after=st.sampled_from(["", "b", '"', '"b', "b]", "\nb", " b"]),
    another=st.booleans(),
)
def test_marks_that_nothing_escapes_lose_no_call(
    one: ToolCallFormat, opened: str, before: str, mark: str, after: str, another: bool
) -> None:
    text = before + mark + after
    assume(one.name not in ("action", "react") or not text.startswith('"'))  # a JSON string, where that may stand
    assume(one.name != "react" or opened != "<think>\n" or "\n" not in before)  # the end of thinking, without a fault
    last = "" if one.name == "code_block" or not another else "\nand then\n" + one.write("say", {"text": "last"})
    known = {tool.name: tool for tool in tools_of(one)}
    calls = one.parse(opened + escaped_not_at_all(one, text) + last, tools_of(one))
    assert calls
    if all(call.arguments is not None for call in calls):
        values = [known[call.name].schema.validate(call.arguments or {})["text"] for call in calls]
        assert [value.strip() for value in values] == [text.strip(), *(["last"] if last else [])]


@pytest.mark.parametrize("one", [*PLAIN, CODE, HermesFormat()], ids=identity)
def test_a_turn_whose_calls_no_template_writes_stays_the_text_that_it_is(one: ToolCallFormat) -> None:
    text = f"I do this.\n{one.write('say', {'text': 'a'})}"
    assert not one.uses_chat_template
    assert one.assistant_message(text, one.parse(text, tools_of(one))) == {"role": "assistant", "content": text}


IN_TEMPLATE = [
    HermesFormat(uses_chat_template=True),
    Qwen3CoderFormat(),
    MistralFormat(),
    MistralFormat(style="separate"),
    DeepSeekFormat(),
    DeepSeekFormat(style="v3"),
    LlamaPythonicFormat(opening="<|tool_call_start|>", closing="<|tool_call_end|>"),
]


@pytest.mark.parametrize("one", IN_TEMPLATE, ids=identity)
def test_a_turn_whose_calls_the_template_writes_holds_them_apart_from_what_was_said(one: ToolCallFormat) -> None:
    text = f"I do this.\n{one.write('say', {'text': 'a'})}\n{one.write('look', {})}"
    calls = one.parse(text, TOOLS)
    message = one.assistant_message(text, calls)
    assert message["content"] == "I do this."
    assert message["tool_calls"] == [
        {"id": calls[0].id, "type": "function", "function": {"name": "say", "arguments": {"text": "a"}}},
        {"id": calls[1].id, "type": "function", "function": {"name": "look", "arguments": {}}},
    ]
    assert one.assistant_message("Done.", ()) == {"role": "assistant", "content": "Done."}


@pytest.mark.parametrize("one", IN_TEMPLATE, ids=identity)
def test_a_turn_with_a_malformed_call_stays_the_text_that_it_is(one: ToolCallFormat) -> None:
    text = one.write("look", {}) + "\n" + one.write("say", {"text": "a"})[:-20]
    calls = one.parse(text, TOOLS)
    assert any(call.error for call in calls)
    assert one.assistant_message(text, calls) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
def test_results_name_their_call_or_are_words_of_the_user(one: ToolCallFormat) -> None:
    (call,) = one.parse(one.write("say", {"text": "a"}), tools_of(one), first_call=3)
    message = one.result_message(call, "heard")
    assert "heard" in message["content"]
    if one in NATIVE:
        assert (message["role"], message["tool_call_id"], message["name"]) == ("tool", call.id, "say")
    else:
        assert message["role"] == "user"


@pytest.mark.parametrize("one", [*NATIVE, *PLAIN, CODE], ids=identity)
def test_the_instructions_name_every_tool_and_none_are_given_without_tools(one: ToolCallFormat) -> None:
    told = one.instructions(tools_of(one))
    assert all(tool.name in told or one.name == "code_block" for tool in tools_of(one))
    assert all(tool.description in told for tool in tools_of(one))
    assert one.instructions([]) == ""
