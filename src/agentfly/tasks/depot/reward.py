"""What a rollout in the depot is worth."""

from __future__ import annotations

from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.tasks.depot.tools import DEPOT, enter


@reward
async def depot_reward(goal: str, context: Context) -> RewardResult:
    """1 if the item lies where it was to be brought, else 0: nothing says on the way which steps were right."""
    depot = await context.acquire(DEPOT, prepare=enter)
    delivered = float((await depot.state())["place"] == goal)
    return RewardResult(delivered, {"success": delivered})
