"""Detection of a chat template's tool-call format, for the templates of many models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import ConfigError
from agentfly.core.messages import Message
from agentfly.formats.toolcalls.deepseek import DeepSeekFormat
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.formats.toolcalls.llama_json import LlamaJsonFormat
from agentfly.formats.toolcalls.llama_pythonic import LlamaPythonicFormat
from agentfly.formats.toolcalls.mistral import MistralFormat
from agentfly.formats.toolcalls.qwen3_coder import Qwen3CoderFormat
from agentfly.formats.toolcalls.registry import ModelDefaultFormat, detect_format, resolve_format, tool_call_format
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat
from agentfly.policies.hf_tokenizer import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / ".test-tokenizers" / "templates"

HERMES = HermesFormat(uses_chat_template=True)
XML = Qwen3CoderFormat()
LFM2 = LlamaPythonicFormat(opening="<|tool_call_start|>", closing="<|tool_call_end|>")
DEEPSEEK_V3 = DeepSeekFormat(uses_chat_template=False, style="v3")

SPOKEN: dict[str, ToolCallFormat] = {
    **dict.fromkeys(
        ["qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training", "qwen3_vl", "qwen3_vl_training"], HERMES
    ),
    **dict.fromkeys(["qwen3_instruct_2507", "qwen3_instruct_2507_training"], HERMES),
    **{
        f"{model}{kind}": XML
        for model in ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")
        for kind in ("", "_training")
    },
    **{
        f"nemotron_3_{model}{kind}": XML
        for model in ("5_lightning", "nano", "super", "ultra")
        for kind in ("", "_training")
    },
    **dict.fromkeys(["llama3_1", "llama3_2"], LlamaJsonFormat()),
    **dict.fromkeys(["lfm2_v2", "lfm2_v2_training", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"], LFM2),
    **dict.fromkeys(
        ["deepseekv3", "deepseekv3_training", "deepseek_r1_distill", "deepseek_r1_distill_training"], DEEPSEEK_V3
    ),
}
"""The templates in the wheel of trl that speak a format known here; the others speak none, or one of their own."""

ELSEWHERE: dict[str, ToolCallFormat | None] = {
    "axolotl/mistral_v3_tekken": MistralFormat(),
    "axolotl/llama4": LlamaJsonFormat(),
    "axolotl/exaone4": HERMES,
    "axolotl/falcon_h1": HermesFormat(),
    "axolotl/gemma3": None,
    "axolotl/chatml": None,
}


@tool
def say(text: str, number: int = 0) -> None:
    """Say something."""


def template(name: str) -> str:
    if not TEMPLATES.is_dir():
        pytest.skip("needs the chat templates of well-known models: python scripts/fetch_tokenizers.py")
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def test_every_template_of_trl_is_recognised_or_not_as_the_table_says() -> None:
    if not TEMPLATES.is_dir():
        pytest.skip("needs the chat templates of well-known models: python scripts/fetch_tokenizers.py")
    found = {path.stem: detect_format(path.read_text("utf-8")) for path in (TEMPLATES / "trl").glob("*.jinja")}
    assert {name: one for name, one in found.items() if one is not None} == SPOKEN
    assert len(found) > len(SPOKEN)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_templates_of_other_collections(name: str) -> None:
    assert detect_format(template(name)) == ELSEWHERE[name]


WRITTEN = [f"trl/{name}" for name, one in SPOKEN.items() if one.uses_chat_template and not name.endswith("_training")]


@pytest.mark.parametrize("name", [*WRITTEN, "axolotl/mistral_v3_tekken", "axolotl/exaone4"])
def test_what_a_template_writes_of_a_call_its_format_reads_back(name: str) -> None:
    source = template(name)
    one = detect_format(source)
    assert one is not None
    text = one.write("say", {"text": "two words", "number": 3})
    calls = one.parse(text, [say])
    conversation: list[Message] = [
        {"role": "user", "content": "the question"},
        one.assistant_message(text, calls),
        one.result_message(calls[0], "the observation"),
    ]
    render: Callable[..., str] = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render
    rendered = render(conversation, tools=[say.definition])
    assert "Say something." in rendered
    turn = rendered[rendered.index("the question") : rendered.index("the observation")]
    (call,) = [call for said in re.split(r"<\|(?:eot_id|im_end)\|>|</s>", turn) for call in one.parse(said, [say])]
    assert call.arguments is not None
    assert (call.name, say.schema.validate(call.arguments)) == ("say", {"text": "two words", "number": 3})


def test_the_model_own_format_is_asked_for_by_name_and_known_with_its_template() -> None:
    asked = tool_call_format("model")
    assert asked == ModelDefaultFormat()
    assert (
        resolve_format(asked, '<tool_call>{"name": …, "arguments": …}</tool_call>{{ tools }}{{ tool_calls }}', "qwen")
        == HERMES
    )
    for unknown in (None, "{{ messages }}"):
        with pytest.raises(ConfigError, match="'some-model' speaks of no tool-call format that is known"):
            resolve_format(asked, unknown, "some-model")
    with pytest.raises(ConfigError, match="is known once the model is"):
        asked.parse("text", [say])


def test_a_template_that_describes_no_tools_is_not_left_to_describe_them() -> None:
    with pytest.raises(ConfigError, match=r"MistralFormat\(uses_chat_template=False\)"):
        resolve_format(MistralFormat(), "{{ messages }}", "some-model")
    assert resolve_format(MistralFormat(uses_chat_template=False), "{{ messages }}", "some-model")
    assert resolve_format(MistralFormat(), "{{ tools }}", "some-model") == MistralFormat()
