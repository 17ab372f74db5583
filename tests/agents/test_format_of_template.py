"""Which tool-call format a chat template speaks, for the templates of many models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.agents.tool import tool
from agentfly.agents.toolcalls.deepseek import DeepSeekFormat
from agentfly.agents.toolcalls.format import ToolCallFormat
from agentfly.agents.toolcalls.hermes import HermesFormat
from agentfly.agents.toolcalls.llama_json import LlamaJsonFormat
from agentfly.agents.toolcalls.llama_pythonic import LlamaPythonicFormat
from agentfly.agents.toolcalls.mistral import MistralFormat
from agentfly.agents.toolcalls.model_format import ModelFormat
from agentfly.agents.toolcalls.qwen3_coder import Qwen3CoderFormat
from agentfly.agents.toolcalls.registry import format_for, format_of_template, tool_call_format
from agentfly.errors import ConfigError
from agentfly.messages import Message
from agentfly.policies.chat_template import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / ".test-tokenizers" / "templates"

HERMES = HermesFormat(in_template=True)
XML = Qwen3CoderFormat()
LFM2 = LlamaPythonicFormat(opening="<|tool_call_start|>", closing="<|tool_call_end|>")
DEEPSEEK_V3 = DeepSeekFormat(in_template=False, style="v3")

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
    found = {path.stem: format_of_template(path.read_text("utf-8")) for path in (TEMPLATES / "trl").glob("*.jinja")}
    assert {name: one for name, one in found.items() if one is not None} == SPOKEN
    assert len(found) > len(SPOKEN)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_templates_of_other_collections(name: str) -> None:
    assert format_of_template(template(name)) == ELSEWHERE[name]


WRITTEN = [f"trl/{name}" for name, one in SPOKEN.items() if one.in_template and not name.endswith("_training")]


@pytest.mark.parametrize("name", [*WRITTEN, "axolotl/mistral_v3_tekken", "axolotl/exaone4"])
def test_what_a_template_writes_of_a_call_its_format_reads_back(name: str) -> None:
    source = template(name)
    one = format_of_template(source)
    assert one is not None
    text = one.write("say", {"text": "two words", "number": 3})
    calls = one.parse(text, [say])
    conversation: list[Message] = [
        {"role": "user", "content": "the question"},
        one.said(text, calls),
        one.result(calls[0], "the observation"),
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
    assert asked == ModelFormat()
    assert (
        format_for(asked, '<tool_call>{"name": …, "arguments": …}</tool_call>{{ tools }}{{ tool_calls }}', "qwen")
        == HERMES
    )
    for unknown in (None, "{{ messages }}"):
        with pytest.raises(ConfigError, match="'some-model' speaks of no tool-call format that is known"):
            format_for(asked, unknown, "some-model")
    with pytest.raises(ConfigError, match="is known once the model is"):
        asked.parse("text", [say])


def test_a_template_that_describes_no_tools_is_not_left_to_describe_them() -> None:
    with pytest.raises(ConfigError, match=r"MistralFormat\(in_template=False\)"):
        format_for(MistralFormat(), "{{ messages }}", "some-model")
    assert format_for(MistralFormat(in_template=False), "{{ messages }}", "some-model")
    assert format_for(MistralFormat(), "{{ tools }}", "some-model") == MistralFormat()
