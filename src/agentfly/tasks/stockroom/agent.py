"""The agents of the stockroom task, its oracle of full-reward answers, and its description for viewers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from agentfly.agents.agent import Agent
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat
from agentfly.policies.scripted import Script
from agentfly.tasks.stockroom.tasks import ORDERS
from agentfly.tasks.stockroom.tools import NO_ORDER, RIGHT_ORDER, RIGHT_SHELF, check, order


def hermes_agent(model: str | Path = "tiny") -> Agent:
    """Return an agent for a model that knows the Hermes format and these tools. Its prompt does not describe them."""
    return Agent(
        model=model,
        tools=[check, order],
        system_prompt="You keep the stockroom.",
        tool_prompt="",
        max_turns=3,
        max_tokens_per_turn=24,
    )


def thoughtful_agent(model: str | Path = "smollm2-135m") -> Agent:
    """Return an agent that reasons before it acts; for `thoughtful_train_tasks`."""
    return dataclasses.replace(
        action_agent(model),
        system_prompt="You keep the stockroom. Think aloud, then give one action.",
        max_tokens_per_turn=48,
    )


def action_agent(model: str | Path = "smollm2-135m") -> Agent:
    """Return an agent whose prompt shows two solved tasks in plain text; for `train_tasks_with_examples`."""
    return Agent(
        model=model,
        tools=[check, order],
        system_prompt="You keep the stockroom. Reply with one action.",
        tool_call_format="action",
        tool_prompt="",
        max_turns=3,
        max_tokens_per_turn=10,
    )


_ASKED = re.compile(r"(?:How is|What about) the (\w+)\?")
_LEVEL = re.compile(rf"\b({'|'.join(ORDERS)})<\|im_end\|>")


def oracle(tool_call_format: ToolCallFormat) -> Script:
    """Return a script for `agentfly.policies.scripted.ScriptedPolicy` that reads the conversation as a model would.

    Args:
        tool_call_format: the agent's format, ``agent.format``.
    """

    def play(conversation: str, turn: int) -> str:
        if turn == 0:
            return tool_call_format.write("check", {"item": _ASKED.findall(conversation)[-1]})
        return tool_call_format.write("order", {"crates": ORDERS[_LEVEL.findall(conversation)[-1]]})

    return play


ABOUT = f"""\
A shop's stockroom, in a sandbox: the agent is asked about a shelf, checks how full it is, and orders for it.
The prompt does not say how many crates the shop wants at each level; the agent learns it from rewards:
{RIGHT_SHELF:g} for checking the shelf asked for, {RIGHT_ORDER:g} more for the right order; {NO_ORDER:g} for none."""
"""The task in three lines."""
