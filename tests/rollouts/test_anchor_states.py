"""Anchor states: the text that is derived from a trajectory belongs to its anchors."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.memory import SummaryFolding
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.core.messages import Image
from agentfly.core.task import Task
from agentfly.core.trajectory import Trajectory, Turn
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.run import run
from agentfly.rollouts.trajectory_recorder import states_of


@tool
def look(place: str) -> ToolResult:
    """Look at a place.

    Args:
        place: the place.
    """
    state = {"place": place, "seen": 1} if place == "hall" else None
    return ToolResult(f"It is the {place}.", state=state, image=Image(b"png") if place == "gallery" else None)


def call(name: str, **arguments: str) -> str:
    return HermesFormat().write(name, arguments)


def named(trajectory: Trajectory) -> list[str]:
    texts = states_of(trajectory)
    return [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]


helper = Agent(model="m", tools=[look], system_prompt="You help.").as_tool("Helps.", name="helper")


ACTS = [call("look", place="hall"), call("look", place="attic"), call("helper", request="look"), "Done."]


def scripted(texts: list[str]) -> ScriptedPolicy:
    def says(prompt: str, turn: int) -> str:
        return [call("look", place="hall"), "A hall."][turn] if "You help." in prompt else texts[turn]

    return ScriptedPolicy(says)


@pytest.mark.parametrize("strategy", ["chain", "step"])
@pytest.mark.parametrize("remembers", [False, True])
async def test_what_an_anchor_names_can_be_read_in_the_trajectory(strategy: str, remembers: bool) -> None:
    memory: dict[str, Any] = {"memory": SummaryFolding(after_turns=1)} if remembers else {}
    agent = Agent(model="m", tools=[look, helper], max_turns=6, **memory)
    texts = [*ACTS[:2], "I saw things.", ACTS[2], ACTS[0], "I was helped.", ACTS[3]] if remembers else ACTS
    result = await run(agent, ["go"], policy=scripted(texts), strategy=strategy)
    [trajectory] = result.trajectories
    assert {turn.agent for turn in trajectory.turns} == {"", "helper"}
    assert {turn.kind for turn in trajectory.turns} == ({"act", "memory"} if remembers else {"act"})
    assert named(trajectory) == [turn.anchor for turn in trajectory.turns]
    stored = Trajectory.from_json(trajectory.to_json())
    assert states_of(stored) == states_of(trajectory)


async def test_images_are_in_a_state_by_their_hashes() -> None:
    script = [call("look", place="gallery"), "Done."]
    result = await run(Agent(model="m", tools=[look]), ["go"], policy=ScriptedPolicy(script, sees=True))
    [trajectory] = result.trajectories
    assert named(trajectory) == [turn.anchor for turn in trajectory.turns]
    assert "It is the gallery." in states_of(trajectory)[1]
    assert "base64" not in states_of(trajectory)[1]


def test_a_turn_of_unknown_state_has_no_text() -> None:
    assert states_of(Trajectory("r", "g", Task("q"), turns=[Turn(0, 0, 0, 1, "x", True)])) == [""]
