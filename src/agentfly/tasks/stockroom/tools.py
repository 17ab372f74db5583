"""The tools of the stockroom (check, order) and its reward. Each rollout has its own stockroom."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.contexts.context import Context
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.tasks.stockroom.tasks import ORDERS

STOCKROOM = ContainerSpec(memory="64MiB", pids=32, capacity=16)


async def fill_shelves(room: Container, context: Context) -> None:
    """Lay out what the task says is on each shelf; the agent sees only the shelves that it checks."""
    filling = [f"echo {shlex.quote(level)} > {shlex.quote(item)}" for item, level in context.task["stock"].items()]
    filled = await room.run("\n".join(["mkdir shelves", "cd shelves", *filling, "cd .."]))
    if filled.exit_code or filled.stderr:
        raise RuntimeError(f"the shelves could not be filled: {filled}")


@tool
async def check(item: str, context: Context) -> str:
    """Look how full the shelf of an item is.

    Args:
        item: what is on the shelf.
    """
    room = await context.acquire(STOCKROOM, prepare=fill_shelves)
    name = shlex.quote(item)
    seen = await room.run(f"printf '%s\\n' {name} >> checked; cat -- shelves/{name}")
    return f"There is no shelf of {item}." if seen.exit_code else seen.stdout.strip()


@tool
async def order(crates: int, context: Context) -> ToolResult:
    """Order so many crates for the shelf, which ends the task.

    Args:
        crates: number of crates, 0 for none.
    """
    room = await context.acquire(STOCKROOM, prepare=fill_shelves)
    await room.run(f"echo {crates} > ordered")
    return ToolResult(f"Ordered {crates}.", done=True)


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
