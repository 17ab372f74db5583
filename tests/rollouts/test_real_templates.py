"""Real tokenizers and templates: rendering turn by turn equals the template's, and text stays text."""

from __future__ import annotations

import copy
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agentfly.core.errors import ChatFormatError
from agentfly.core.messages import Message
from agentfly.formats.chat.prefix_stability import ProbeExchange, drift_from_whole
from agentfly.formats.chat.template_format import TemplateChatFormat
from agentfly.formats.chat.template_renderer import TemplateRenderer
from agentfly.policies.hf_tokenizer import HFTokenizer
from agentfly.policies.scripted import ByteTokenizer

HOME = Path(__file__).parents[2] / ".test-tokenizers"

FAMILIES = {
    "smollm2": ("smollm2", None),
    "qwen2.5": ("qwen2.5", None),
    "qwen3": ("qwen3", None),
    "qwen3-instruct": ("qwen3", "trl/qwen3_instruct_2507"),
    "qwen3.5": ("qwen3", "trl/qwen3_5_think"),
    "qwq": ("qwen3", "llama.cpp/Qwen-QwQ-32B"),
    "llama3.2": ("llama3.2", None),
    "gemma3": ("gemma3", None),
    "deepseek-v3": ("deepseek-v3", None),
    "deepseek-v3.1": ("deepseek-v3", "llama.cpp/deepseek-ai-DeepSeek-V3.1"),
    "deepseek-r1": ("deepseek-v3", "trl/deepseek_r1_distill"),
    "gpt-oss": ("gpt-oss", "trl/gptoss"),
    "phi3.5": ("phi3.5", "trl/phi3_5"),
    "mistral": ("mistral", "axolotl/mistral_v2v3"),
    "glm4.5": ("glm", "trl/glm4moe"),
}
"""The vocabulary and the template of each; GLM's control tokens stand on Qwen's vocabulary."""

GLM_TOKENS = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]

LIGHT = ["smollm2", "qwen2.5", "phi3.5", "mistral"]
"""Those that load fast; the others are slow tests."""


@cache
def vocabulary_of(name: str):
    if not (HOME / "manifest.json").is_file():
        pytest.skip("needs tokenizers of well-known models: python scripts/fetch_tokenizers.py")
    tokenizer = AutoTokenizer.from_pretrained(HOME / ("qwen3" if name == "glm" else name), local_files_only=True)
    if name == "glm":
        tokenizer.add_special_tokens({"additional_special_tokens": GLM_TOKENS})
        tokenizer.eos_token = "<|endoftext|>"
    return tokenizer


@cache
def tokenizer_of(family: str) -> HFTokenizer:
    vocabulary, template = FAMILIES[family]
    tokenizer = copy.copy(vocabulary_of(vocabulary))
    if template:
        tokenizer.chat_template = (HOME / "templates" / f"{template}.jinja").read_text()
    return HFTokenizer(tokenizer)


def families(*names: str):
    """The families as parameters, the heavy ones as slow tests."""
    marks = {name: () if name in LIGHT else (pytest.mark.slow,) for name in FAMILIES}
    return pytest.mark.parametrize("family", [pytest.param(name, marks=marks[name]) for name in names or FAMILIES])


SYSTEM: Message = {"role": "system", "content": "You are an agent."}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls):
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def call(number, name="shell", arguments=None):
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": {"command": "ls"} if arguments is None else arguments},
    }


def result(number, text, name="shell"):
    return {"role": "tool", "name": name, "tool_call_id": f"call_{number}", "content": text}


def tool(name="shell", description="Run a command.", argument="command"):
    schema = {"type": "object", "properties": {argument: {"type": "string", "description": "It."}}}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": {**schema, "required": [argument]}},
    }


TOOLS = [tool(), tool("search", "Search the web.", "query")]

WAYS = {
    "words": (ProbeExchange(assistant("answer"), [user("the next question")]), []),  # type: ignore[arg-type]
    "results as words": (ProbeExchange(assistant("call"), [user("result 0"), user("result 1")]), []),  # type: ignore[arg-type]
    "results": (ProbeExchange(assistant("call"), [result(0, "result 0")]), []),  # type: ignore[arg-type]
    "calls": (ProbeExchange(assistant("", call(0)), [result(0, "result 0")]), TOOLS),  # type: ignore[arg-type]
    "two calls": (
        ProbeExchange(
            assistant("", call(0), call(1, "search")),
            [result(0, "result 0"), result(1, "result 1", "search")],  # type: ignore[arg-type]
        ),
        TOOLS,
    ),
}


def verdict(family: str, way: str) -> str:
    exchange, tools = WAYS[way]
    tokenizer = tokenizer_of(family)
    try:
        chat = TemplateChatFormat(tokenizer, [exchange], tools=tools)
        return "stable" if chat.keeps_thoughts else "drops thoughts"
    except ChatFormatError as error:
        for sign, name in (
            ("rejects", "refused"),
            ("leaves out", "left out"),
            ("not prefix-stable", "rewritten"),
        ):
            if sign in str(error):
                return name
        raise


STABLE, DROPS, REWRITTEN = "stable", "drops thoughts", "rewritten"
REFUSED, LEFT_OUT = "refused", "left out"

TABLE = {
    "smollm2": (STABLE, STABLE, STABLE, LEFT_OUT, LEFT_OUT),
    "qwen2.5": (STABLE, STABLE, STABLE, STABLE, STABLE),
    "qwen3": (DROPS, DROPS, STABLE, STABLE, STABLE),
    "qwen3-instruct": (STABLE, STABLE, STABLE, STABLE, STABLE),
    "qwen3.5": (DROPS, DROPS, STABLE, STABLE, STABLE),
    "qwq": (DROPS, DROPS, DROPS, DROPS, DROPS),
    "llama3.2": (STABLE, STABLE, STABLE, DROPS, STABLE),
    "gemma3": (STABLE, STABLE, STABLE, REFUSED, REFUSED),
    "deepseek-v3": (STABLE, STABLE, REWRITTEN, LEFT_OUT, LEFT_OUT),
    "deepseek-v3.1": (DROPS, DROPS, DROPS, STABLE, STABLE),
    "deepseek-r1": (DROPS, DROPS, REWRITTEN, LEFT_OUT, LEFT_OUT),
    "gpt-oss": (DROPS, DROPS, DROPS, STABLE, STABLE),
    "phi3.5": (STABLE, STABLE, STABLE, LEFT_OUT, LEFT_OUT),
    "mistral": (STABLE, STABLE, STABLE, DROPS, DROPS),
    "glm4.5": (DROPS, DROPS, STABLE, STABLE, STABLE),
}
"""What becomes of each way of conversing under ``history="keep"``, in the order of `WAYS`."""


@families()
@pytest.mark.slow
def test_which_conversations_a_template_can_carry_is_known(family):
    assert tuple(verdict(family, way) for way in WAYS) == TABLE[family]


CONTROL = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "[/INST]", "<|end|>", "<｜end▁of▁sentence｜>"]
SPELLED = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|im_start|>system\n", "<|user|>"]
CODE = ["def f(x):\n\treturn {'a': [x]}\n", '{"k": "v\\n"}', "<b>&amp;</b>", "\\u00e9", "é\u0301 Å ﬁ", "👩\u200d👧"]

# Some vocabularies lack bytes that only control characters, private ones, or such as nobody has assigned, consist of.
assigned = st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Co"])
plain = st.lists(st.sampled_from(CODE) | st.text(assigned, max_size=12), max_size=4).map("".join)
texts = st.lists(st.sampled_from(CONTROL + SPELLED) | plain, max_size=5).map(lambda pieces: f"x{''.join(pieces)}x")
words = plain.map(lambda text: f"So {text}.".replace("</think>", "").replace("<think>", ""))

steady = settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def said_by_template(turns, conversation, tools):
    """The ids that a model samples which writes its turn as the template would, its end included."""
    start = turns.render(conversation[:-1], tools)
    made = conversation[-1].get("tool_calls", [])
    following = [{**result(0, "more"), "tool_call_id": call["id"]} for call in made] or [user("more")]
    rendered = turns.render([*conversation, *following], tools, opens=False)
    header = start if rendered.startswith(start) else turns.shape.reasoning.without_opening_marker(start)
    if not rendered.startswith(header):  # what follows would have the past rewritten
        rendered = turns.render(conversation, tools, opens=False)
        header = start if rendered.startswith(start) else turns.shape.reasoning.without_opening_marker(start)
    assert rendered.startswith(header)
    end = turns.control.first_in(rendered[len(header) :], turns.endings.end_ids)
    if end is None:  # the last turn of all ends where the next would begin
        end = (len(rendered) - len(header), turns.endings.stop_ids[0])
    position, stop = end
    return [*turns.control.encode(rendered[len(header) : len(header) + position]), stop]


@cache
def turns_of(family):
    return TemplateRenderer(tokenizer_of(family))


def test_descriptions_of_the_same_tools_are_made_once_and_those_of_others_anew(monkeypatch):
    made = []
    turns = TemplateRenderer(ByteTokenizer())
    describe = turns.control.escape_tools
    monkeypatch.setattr(turns.control, "escape_tools", lambda tools: made.append(tools) or describe(tools))  # type: ignore[func-returns-value]

    def tools(**more):
        return [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}} | more}]

    for _ in range(3):
        turns.render([user("a")], tools())
        turns.render_continuation([result(0, "b")], tools())
    assert len(made) == 2  # those, and the stand-in
    given = tools()
    before = turns.render([user("a")], given)
    given[0]["function"]["description"] = "Changed."
    assert turns.render([user("a")], given) != before
    turns.render([user("a")], tools(strict=True))
    turns.render([user("a")], tools(strict=1))
    assert len(made) == 5


@cache
def chat_for(family, way):
    exchange, tools = WAYS[way]
    return TemplateChatFormat(tokenizer_of(family), [exchange], tools=tools), tools


def continued(chat, turns, opening, exchanges, tools):
    """The ids sent and sampled turn by turn, and the conversation."""
    conversation = list(opening)
    ids = list(chat.render_prompt(conversation, tools).ids)
    for turn, answers in exchanges:
        conversation.append(turn)
        ids += said_by_template(turns, conversation, tools)
        conversation += answers
        ids += chat.render_continuation(answers, after=ids, conversation=conversation, tools=tools).ids
    return ids, conversation


@families("smollm2", "qwen2.5", "qwen3-instruct", "llama3.2", "gemma3", "deepseek-v3", "phi3.5", "mistral")
@steady
@given(asked=texts, rounds=st.lists(st.tuples(words, texts), min_size=1, max_size=3))
def test_a_conversation_in_words_is_sent_as_the_template_writes_it_as_a_whole(family, asked, rounds):
    chat, _ = chat_for(family, "words")
    turns = turns_of(family)
    exchanges = [(assistant(said), [user(answer)]) for said, answer in rounds]
    ids, conversation = continued(chat, turns, [user(asked)], exchanges, [])
    assert drift_from_whole(chat, tokenizer_of(family), ids, conversation) is None


arguments = st.dictionaries(st.sampled_from(["command", "k\u00e9y"]), texts | st.integers() | st.none(), min_size=1)


@families("qwen2.5", "qwen3", "qwen3-instruct", "llama3.2", "deepseek-v3.1", "gpt-oss", "mistral", "glm4.5")
@steady
@given(asked=texts, rounds=st.lists(st.tuples(arguments, texts), min_size=1, max_size=3))
def test_a_conversation_with_calls_is_sent_as_the_template_writes_it_as_a_whole(family, asked, rounds):
    chat, tools = chat_for(family, "calls")
    turns = turns_of(family)
    exchanges = [
        (assistant("", call(number, arguments=given)), [result(number, answer)])
        for number, (given, answer) in enumerate(rounds)
    ]
    ids, conversation = continued(chat, turns, [user(asked)], exchanges, tools)
    assert drift_from_whole(chat, tokenizer_of(family), ids, conversation, tools) is None


def control_ids(tokenizer, ids):
    known = set(tokenizer.control_tokens.values())
    return [token_id for token_id in ids if token_id in known]


@families()
@steady
@given(text=texts)
def test_text_of_tasks_tools_and_users_brings_no_control_token_wherever_it_stands(family, text):
    tokenizer = tokenizer_of(family)
    way = "calls" if TABLE[family][3] in (STABLE, DROPS) else "words"
    chat, tools = chat_for(family, way)

    def sent(word):
        described = [tool(description=word, argument=word)] if tools else []
        start = [user(word)] if family == "mistral" else [{"role": "system", "content": word}, user(word)]
        turn = assistant("", call(0, arguments={word: [word]})) if tools else assistant("answer")
        answers = [result(0, word)] if tools else [user(word)]
        conversation = [*start, turn, *answers]
        after = [*chat.render_prompt(start, described).ids, chat.stop_ids[0]]
        following = chat.render_continuation(answers, after=after, conversation=conversation, tools=described)
        return [*after, *following.ids], chat.render_prompt(conversation, described).ids

    for evil, harmless in zip(sent(text), sent("harmless"), strict=True):
        assert control_ids(tokenizer, evil) == control_ids(tokenizer, harmless)


@families()
@steady
@given(text=texts)
def test_text_is_encoded_without_loss(family, text):
    tokenizer = tokenizer_of(family)
    if "▁" in str(tokenizer.hf.backend_tokenizer.decoder):
        text = text.replace("▁", " ")  # SentencePiece's own blank
    composed = "NFC" in str(tokenizer.hf.backend_tokenizer.normalizer)
    expected = unicodedata.normalize("NFC", text) if composed else text
    assert tokenizer.decode(tokenizer.encode_text(text)) == expected


@families()
@steady
@given(asked=plain.map(lambda text: f"x{text}x"), answer=plain.map(lambda text: f"x{text}x"))
def test_ordinary_text_is_encoded_as_transformers_encodes_it(family, asked, answer):
    tokenizer = tokenizer_of(family)
    tools = TOOLS if TABLE[family][3] in (STABLE, DROPS) else []
    conversation = [user(asked), assistant("Well."), user(answer)]
    ids = chat_for(family, "words")[0].render_prompt(conversation, tools).ids
    text = tokenizer.hf.apply_chat_template(
        conversation, tools=tools or None, add_generation_prompt=True, tokenize=False
    )
    assert ids == tokenizer.hf.encode(text, add_special_tokens=False)


def test_a_template_that_moves_the_system_prompt_is_refused_unless_history_is_to_be_rewritten():
    tokenizer, exchange = tokenizer_of("mistral"), WAYS["words"][0]
    with pytest.raises(ChatFormatError, match=r"You are an agent.*history='rewrite'"):
        TemplateChatFormat(tokenizer, [exchange], system=SYSTEM)
    chat = TemplateChatFormat(tokenizer, [exchange], system=SYSTEM, history="rewrite")
    talk = [SYSTEM, user("one"), assistant("two"), user("three")]
    after = [*chat.render_prompt(talk[:2]).ids, chat.stop_ids[0]]
    assert chat.render_continuation(talk[3:], after=after, conversation=talk) is None
    after = [*chat.render_prompt(talk).ids, chat.stop_ids[0]]
    longer = [*talk, assistant("four"), user("five")]
    assert chat.render_continuation(longer[5:], after=after, conversation=longer) is None


@families("qwen2.5", "qwen3", "qwen3.5", "glm4.5")
@steady
@given(asked=texts, rounds=st.lists(st.tuples(words, st.booleans(), texts), min_size=1, max_size=4))
def test_rewritten_history_is_what_the_template_writes_at_every_turn_and_breaks_at_questions_only(
    family, asked, rounds
):
    turns, tools = turns_of(family), TOOLS
    chat = TemplateChatFormat(tokenizer_of(family), [WAYS["calls"][0]], tools=tools, history="rewrite")
    conversation = [user(asked)]
    ids = list(chat.render_prompt(conversation, tools).ids)
    for number, (thought, calls, answer) in enumerate(rounds):
        turn = assistant("", call(number)) if calls else assistant("So.")
        conversation.append({**turn, "reasoning_content": thought})
        ids += said_by_template(turns, conversation, tools)
        answers = [result(number, answer) if calls else user(answer)]
        conversation += answers
        following = chat.render_continuation(answers, after=ids, conversation=conversation, tools=tools)
        assert following is not None or not calls
        ids = [*ids, *following.ids] if following else list(chat.render_prompt(conversation, tools).ids)
        assert drift_from_whole(chat, tokenizer_of(family), ids, conversation, tools) is None


def told(number, name="shell"):
    return result(number, f"result {number}", name)


MISHAPS = {
    "two calls": [assistant("", call(0), call(1, "search")), told(0), told(1, "search")],
    "a call that cannot be read": [assistant('<tool_call>{"name": '), told(0)],
    "one of two calls that can be read": [assistant("", call(0)), told(0), told(1, "search")],
    "a turn that a limit cut, and words": [assistant('<tool_call>{"na'), user("go on")],
    "silence, and words": [assistant(""), user("go on")],
    "a call, its result, and words": [assistant("", call(0)), told(0), user("Sum up.")],
}

CALLING = [family for family in FAMILIES if TABLE[family][3] in (STABLE, DROPS)]


@families(*CALLING)
@pytest.mark.parametrize("history", ["keep", "rewrite"])
def test_whatever_happens_between_calls_can_be_written_as_a_whole_and_gone_on_from(family, history):
    chat = TemplateChatFormat(tokenizer_of(family), [WAYS["calls"][0]], tools=TOOLS, history=history)
    for talk in MISHAPS.values():
        conversation = [user("the question"), *talk, *talk]
        text = tokenizer_of(family).decode(chat.render_prompt(conversation, TOOLS).ids)
        answers = talk[1:]
        assert all(text.count(answer["content"]) == 2 for answer in answers)
        after = [*chat.render_prompt(conversation[: -len(answers) - 1], TOOLS).ids, chat.stop_ids[0]]
        following = chat.render_continuation(answers, after=after, conversation=conversation, tools=TOOLS)
        if following is not None:
            assert all(answer["content"] in tokenizer_of(family).decode(following.ids) for answer in answers)


@families("llama3.2", "gpt-oss")
def test_two_calls_of_a_turn_are_written_one_after_the_other_where_the_template_writes_one(family):
    chat = TemplateChatFormat(tokenizer_of(family), [WAYS["two calls"][0]], tools=TOOLS)
    both, one_by_one = MISHAPS["two calls"], [assistant("", call(0)), told(0), assistant("", call(1, "search"))]
    ask = [user("the question")]
    expected = chat.render_prompt([*ask, *one_by_one, told(1, "search")], TOOLS).ids
    assert chat.render_prompt([*ask, *both], TOOLS).ids == expected
    after = [*chat.render_prompt(ask, TOOLS).ids, chat.stop_ids[0]]
    assert chat.render_continuation(both[1:], after=after, conversation=[*ask, *both], tools=TOOLS) is None


def test_tools_that_a_template_moves_to_the_last_question_are_described_once():
    tokenizer, called = tokenizer_of("mistral"), MISHAPS["a call, its result, and words"]
    chat = TemplateChatFormat(tokenizer, [WAYS["calls"][0]], tools=TOOLS)
    ask = [user("the question")]
    after = [*chat.render_prompt(ask, TOOLS).ids, chat.stop_ids[0]]
    goes_on = chat.render_continuation(called[1:2], after=after, conversation=[*ask, *called[:2]], tools=TOOLS)
    assert "result 0" in tokenizer.decode(goes_on.ids)
    talk = [*ask, assistant("the answer"), user("another")]
    assert chat.render_continuation(talk[2:], after=after, conversation=talk, tools=TOOLS) is None
    assert tokenizer.decode(chat.render_prompt(talk, TOOLS).ids).count("[AVAILABLE_TOOLS]") == 1
