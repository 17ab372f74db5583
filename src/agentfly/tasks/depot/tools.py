"""The tools of the depot (go, take, put) and its reward. Each rollout has its own depot."""

from __future__ import annotations

from typing import Any

from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.resources.environments.spec import EnvironmentSpec
from agentfly.tasks.depot.environment import Depot

DEPOT = EnvironmentSpec(factory=Depot, capacity=128)


async def enter(depot: Any, context: Context) -> None:
    """Begin where the task begins."""
    await depot.reset(context.task["start"], context.task["item"], context.task["place"])


@tool
async def go(way: str, context: Context) -> ToolResult:
    """Go into the next room.

    Args:
        way: north, south, west or east.
    """
    return await _done("go", way, context)


@tool
async def take(item: str, context: Context) -> ToolResult:
    """Take something that lies in this room.

    Args:
        item: what to take.
    """
    return await _done("take", item, context)


@tool
async def put(item: str, context: Context) -> ToolResult:
    """Put down what you hold. The task ends once the right thing lies in the right room.

    Args:
        item: what to put down.
    """
    return await _done("put", item, context)


async def _done(action: str, argument: str, context: Context) -> ToolResult:
    """Act in the rollout's depot. The new state is the anchor of the next turn."""
    depot = await context.acquire(DEPOT, prepare=enter)
    seen, state = await depot.act(action, argument)
    delivered = state["place"] == context.task["goal"]
    return ToolResult(seen, state=state, done=delivered, reward=float(delivered))


@reward
async def depot_reward(goal: str, context: Context) -> RewardResult:
    """1 if the item lies where it was to be brought, else 0: nothing says on the way which steps were right."""
    depot = await context.acquire(DEPOT, prepare=enter)
    delivered = float((await depot.state())["place"] == goal)
    return RewardResult(delivered, {"success": delivered})
