"""What an agent can do in the stockroom: check a shelf, and order. Each rollout has a stockroom of its own."""

from __future__ import annotations

import shlex

from agentfly.agents.tool import ToolResult, tool
from agentfly.contexts.context import Context
from agentfly.resources.containers.container import Container
from agentfly.resources.containers.spec import ContainerSpec

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
