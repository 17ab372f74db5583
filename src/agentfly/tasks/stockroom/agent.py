"""The agents that keep the stockroom."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agentfly.agents.agent import Agent
from agentfly.tasks.stockroom.tools import check, order


def hermes_agent(model: str | Path = "tiny") -> Agent:
    """An agent whose model plays the Hermes format already. It is told nothing of its tools: it has met them."""
    return Agent(
        model=model,
        tools=[check, order],
        system_prompt="You keep the stockroom.",
        tool_prompt="",
        max_turns=3,
        max_tokens_per_turn=24,
    )


def thoughtful_agent(model: str | Path = "smollm2-135m") -> Agent:
    """An agent that thinks aloud before it acts; for `train_tasks_with_thoughts`."""
    return dataclasses.replace(
        action_agent(model),
        system_prompt="You keep the stockroom. Think aloud, then give one action.",
        max_tokens_per_turn=48,
    )


def action_agent(model: str | Path = "smollm2-135m") -> Agent:
    """An agent whose model is shown two played tasks, in plain text; for `train_tasks_with_examples`."""
    return Agent(
        model=model,
        tools=[check, order],
        system_prompt="You keep the stockroom. Reply with one action.",
        tool_call_format="action",
        tool_prompt="",
        max_turns=3,
        max_tokens_per_turn=10,
    )
