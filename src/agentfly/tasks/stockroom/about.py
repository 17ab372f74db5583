"""What the stockroom is, for those who watch an agent learn in it."""

from __future__ import annotations

from agentfly.tasks.stockroom.reward import NO_ORDER, RIGHT_ORDER, RIGHT_SHELF

ABOUT = f"""\
A shop's stockroom, in a sandbox: the agent is asked about a shelf, checks how full it is, and orders for it.
How many the shop wants at which level is told to nobody; the agent finds out from rewards:
{RIGHT_SHELF:g} for checking the shelf asked for, {RIGHT_ORDER:g} more for the right order; {NO_ORDER:g} for none."""
"""The task in three lines."""
