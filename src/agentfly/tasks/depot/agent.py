"""The agents that run errands in the depot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from agentfly.agents.agent import Agent
from agentfly.agents.memory.window import Window
from agentfly.tasks.depot.tools import go, put, take


def depot_agent(model: str | Path = "tiny-depot") -> Agent:
    """An agent that recalls all that it has seen. It is told nothing of its tools: its model has met them."""
    return Agent(
        model=model,
        tools=[go, take, put],
        tool_call_format="action",
        tool_prompt="",
        max_turns=10,
        max_tokens_per_turn=6,
    )


def forgetful_depot_agent(model: str | Path = "tiny-depot") -> Agent:
    """An agent that recalls the errand and its last turn alone, which is all that it needs to know."""
    return dataclasses.replace(depot_agent(model), memory=Window(turns=1))
