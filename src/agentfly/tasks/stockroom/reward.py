"""What a rollout in the stockroom is worth."""

from __future__ import annotations

from collections.abc import Mapping

from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.tasks.stockroom.shop import ORDERS
from agentfly.tasks.stockroom.tools import STOCKROOM

RIGHT_SHELF = 0.4
RIGHT_ORDER = 0.6
NO_ORDER = -0.2


@reward
async def stockroom_reward(item: str, stock: Mapping[str, str], context: Context) -> RewardResult:
    """0.4 for checking the shelf that was asked for and no other, 0.6 more for the right order, -0.2 without an order.

    Both are read from the rollout's stockroom, as its tools left it.
    """
    room = await context.acquire(STOCKROOM)
    checked = (await room.run("cat checked")).stdout
    ordered = (await room.run("cat ordered")).stdout
    right_shelf = checked == f"{item}\n"
    success = right_shelf and ordered == f"{ORDERS[stock[item]]}\n"
    return RewardResult(
        RIGHT_SHELF * right_shelf + RIGHT_ORDER * success + (0.0 if ordered else NO_ORDER),
        {"success": float(success), "right_shelf": float(right_shelf)},
    )
