from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import cloudpickle
import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.core.errors import ConfigError, UnknownTool
from agentfly.core.messages import ToolCall
from agentfly.formats.toolcalls.action import ActionFormat
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.formats.toolcalls.registry import tool_call_format


@tool
def check(item: str) -> str:
    """Look how much of an item is left."""
    return item


@tool
def order(item: str) -> str:
    """Order an item."""
    return item


AGENT = Agent(model="tiny", tools=[check, order], system_prompt="Run the shop.", tool_call_format="action")


def test_the_system_message_is_the_prompt_and_then_the_tools() -> None:
    instructions = ActionFormat().instructions([check, order])
    assert AGENT.system_message() == f"Run the shop.\n\n{instructions}"


def test_the_words_about_tools_can_be_replaced_or_left_out() -> None:
    assert dataclasses.replace(AGENT, tool_prompt="Use check[item].").system_message() == (
        "Run the shop.\n\nUse check[item]."
    )
    assert dataclasses.replace(AGENT, tool_prompt="").system_message() == "Run the shop."
    assert Agent(model="tiny").system_message() == ""


def test_a_tool_is_found_by_name() -> None:
    assert AGENT.tool("order") is order


def test_an_invented_tool_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(UnknownTool, match=r"no tool 'solve_equation'. The tools are: check, order\."):
        AGENT.tool("solve_equation")
    with pytest.raises(UnknownTool) as long:
        AGENT.tool("x" * 50_000)
    assert len(str(long.value)) < 500
    with pytest.raises(UnknownTool, match="There are no tools"):
        Agent(model="tiny").tool("check")


def test_calls_are_numbered_through_the_rollout() -> None:
    assert AGENT.parse_calls("check[eggs]\norder[tea]", first_call=3) == (
        ToolCall("call_3", "check", {"item": "eggs"}),
        ToolCall("call_4", "order", {"item": "tea"}),
    )


def test_an_agent_without_tools_makes_no_calls() -> None:
    text = HermesFormat().write("check", {"item": "eggs"})
    assert Agent(model="tiny").parse_calls(text) == ()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tools": [check, check]}, "two tools named 'check'.*Rename one"),
        ({"tools": [len]}, "'len', which is no tool. Put @agentfly.tool"),
        ({"tools": (), "tool_prompt": "Use check[item]."}, "there are none"),
        ({"tool_call_format": "hermse"}, "Did you mean 'hermes'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_turns": 2.5}, "whole number"),
        ({"max_turns": True}, "whole number"),
        ({"max_tokens_per_turn": 8192, "max_sequence_tokens": 4096}, "Lower the first or raise the second"),
        ({"max_tool_calls": 0}, "max_tool_calls=0"),
        ({"max_wall_seconds": 0}, "max_wall_seconds=0"),
        ({"max_consecutive_invalid_calls": 0}, "max_consecutive_invalid_calls=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "whole number"),
        ({"max_wall_seconds": "5"}, "max_wall_seconds='5'"),
        ({"temperature": "0.5"}, "temperature='0.5'"),
        ({"temperature": None}, "temperature=None"),
        ({"top_p": "1"}, "top_p='1'"),
    ],
)
def test_what_contradicts_itself_is_refused_when_the_agent_is_made(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        dataclasses.replace(AGENT, **change)


def test_a_format_of_ones_own_is_used_as_it_is() -> None:
    mine = HermesFormat(calls_in_thinking=True)
    assert Agent(model="tiny", tool_call_format=mine).format is mine


@pytest.mark.parametrize("asked", [3, object()])
def test_what_is_no_format_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigError, match="action, code_block"):
        tool_call_format(asked)


def test_an_agent_survives_pickling() -> None:
    AGENT.parse_calls("check[eggs]")  # so that what it keeps for itself is there
    assert pickle.loads(cloudpickle.dumps(AGENT)) == AGENT
