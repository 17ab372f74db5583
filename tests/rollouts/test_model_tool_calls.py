"""Agents that call tools in the format of their model's chat template."""

from __future__ import annotations

from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import ConfigError
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.formats.toolcalls.qwen3_coder import Qwen3CoderFormat
from agentfly.formats.toolcalls.registry import ModelDefaultFormat
from agentfly.policies.scripted import ByteTokenizer, ScriptedPolicy
from agentfly.rollouts.agent_runtime import AgentRuntime
from agentfly.rollouts.run import run


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class SpeakingHermes(ByteTokenizer):
    """A stand-in for the tokenizer of a model whose template speaks Hermes's format."""

    chat_template = '{{ tools }}<tool_call>\\n{"name": …, "arguments": …}{{ message.tool_calls }}'


def policy(script: list[str], tokenizer: ByteTokenizer | None = None) -> ScriptedPolicy:
    scripted = ScriptedPolicy(script)
    scripted.tokenizer = tokenizer or ByteTokenizer()
    return scripted


def agent(**settings: Any) -> Agent:
    return Agent(**{"model": "some-model", "tools": [add], "tool_call_format": "model", **settings})


async def test_the_model_s_own_format_reads_the_calls_and_the_template_writes_them() -> None:
    script = [HermesFormat().write("add", {"a": 1, "b": 2}), "It is 3."]
    result = await run(agent(), ["What is 1 + 2?"], policy=policy(script, SpeakingHermes()))
    (trajectory,) = result.trajectories
    assert trajectory.finish_reason == "answered"
    question, call, answer, end = trajectory.messages
    assert (question["role"], call["content"], answer["content"], end["content"]) == ("user", "", "3", "It is 3.")
    assert [one["function"] for one in call["tool_calls"]] == [{"name": "add", "arguments": {"a": 1, "b": 2}}]
    assert answer["tool_call_id"] == call["tool_calls"][0]["id"]


def test_an_agent_whose_model_has_no_known_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="the chat template of 'some-model' speaks of no tool-call format"):
        AgentRuntime.create(agent(), policy([]))


def test_a_template_that_describes_no_tools_is_found_out_before_the_first_rollout() -> None:
    silent = SpeakingHermes()
    silent.chat_template = "{{ messages }}"
    with pytest.raises(ConfigError, match="HermesFormat"):
        AgentRuntime.create(agent(tool_call_format=HermesFormat(uses_chat_template=True)), policy([], silent))


@pytest.mark.parametrize(
    "settings", [{"tools": []}, {"tool_call_format": HermesFormat()}, {"tool_call_format": Qwen3CoderFormat()}]
)
def test_an_agent_that_needs_no_other_format_keeps_its_own(settings: dict[str, Any]) -> None:
    asked = agent(**settings)
    assert AgentRuntime.create(asked, policy([])).agent is asked
    assert asked.format == settings.get("tool_call_format", ModelDefaultFormat())
