"""The agents of the depot task, and an oracle that solves every errand in the fewest turns."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from agentfly.agents.agent import Agent
from agentfly.agents.memory import Window
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat
from agentfly.policies.scripted import Script
from agentfly.tasks.depot.environment import ways_towards
from agentfly.tasks.depot.tools import go, put, take


def depot_agent(model: str | Path = "tiny-depot") -> Agent:
    """Return an agent that sees its whole conversation. Its prompt describes no tools: the model knows them."""
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


PARAMETERS = {"go": "way", "take": "item", "put": "item"}
"""What each tool's argument is called."""

_ERRAND = re.compile(r"The (\w+) is in the (\w+)\. Bring it to the (\w+)\.")
_SEEN = re.compile(r"You are in the (\w+)( with the)?")


def oracle(tool_call_format: ToolCallFormat) -> Script:
    """Return a script for `agentfly.policies.scripted.ScriptedPolicy` that reads the conversation as a model would.

    Args:
        tool_call_format: the agent's format, ``agent.format``.
    """

    def play(conversation: str, turn: int) -> str:
        item, place, goal = _ERRAND.findall(conversation)[-1]
        room, carried = _SEEN.findall(conversation)[-1]
        tool, argument = right_actions(item, None if carried else place, goal, room)[0]
        return tool_call_format.write(tool, {PARAMETERS[tool]: argument})

    return play


def right_actions(item: str, place: str | None, goal: str, room: str) -> list[tuple[str, str]]:
    """Return the actions that bring an errand closer to its end, as pairs of tool and argument.

    Args:
        item, goal: the item, and the room where it belongs.
        place: the room where the item lies; None if the agent holds it.
        room: the agent's room.
    """
    target = goal if place is None else place
    if room == target:
        return [("put" if place is None else "take", item)]
    return [("go", way) for way in ways_towards(room, target)]
