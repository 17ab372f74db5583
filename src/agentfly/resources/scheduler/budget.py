"""Budget: the part of the host that all instances may use, and how much of it is in use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agentfly.resources.spec import ResourceSpec


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The maximum that all instances of an engine may use of the host. None means no limit.

    Args:
        cpus: processor cores.
        memory_bytes: bytes of memory.
        gpus: GPUs.
    """

    cpus: float | None = None
    memory_bytes: int | None = None
    gpus: float | None = None


ResourceCost = tuple[int, int, int]
"""Thousandths of a core, bytes, thousandths of a GPU: integers, so that sums are exact."""

NO_COST: ResourceCost = (0, 0, 0)
_NAMES = ("cpus", "memory", "gpus")
_SCALES = (1000, 1, 1000)


def cost_of(spec: ResourceSpec[Any]) -> ResourceCost:
    """Return the cost of one instance of a spec."""
    return (round(spec.cpus * 1000), spec.memory_bytes, round(spec.gpus * 1000))


def total_cost(costs: Iterable[ResourceCost]) -> ResourceCost:
    """Return the total cost of several instances."""
    cpus, memory, gpus = (sum(amounts) for amounts in zip(*costs, strict=True))
    return (cpus, memory, gpus)


class BudgetUsage:
    """The used part of a budget, and the part of it that stopping instances will return."""

    def __init__(self, budget: Budget) -> None:
        given = (budget.cpus, budget.memory_bytes, budget.gpus)
        self._limits = tuple(
            None if limit is None else round(limit * scale) for limit, scale in zip(given, _SCALES, strict=True)
        )
        self._spent = [0, 0, 0]
        self._returning = [0, 0, 0]

    def spend(self, cost: ResourceCost) -> None:
        """An instance is about to start."""
        for index, amount in enumerate(cost):
            self._spent[index] += amount

    def mark_returning(self, cost: ResourceCost) -> None:
        """An instance is stopping."""
        for index, amount in enumerate(cost):
            self._returning[index] += amount

    def unmark_returning(self, cost: ResourceCost) -> None:
        """A stopping instance is stuck."""
        for index, amount in enumerate(cost):
            self._returning[index] -= amount

    def returned(self, cost: ResourceCost) -> None:
        """A stopping instance is gone."""
        for index, amount in enumerate(cost):
            self._spent[index] -= amount
            self._returning[index] -= amount

    def fits(self, cost: ResourceCost) -> bool:
        """Return whether an instance can start now."""
        return not any(self._lacking(cost, self._spent))

    def shortage(self, cost: ResourceCost) -> tuple[bool, ...]:
        """Return, for each quantity, whether an instance lacks it even after all stopping instances are gone."""
        return self._lacking(cost, [spent - back for spent, back in zip(self._spent, self._returning, strict=True)])

    def describe_excess(self, cost: ResourceCost) -> str | None:
        """Return why an instance can never start; None if it can."""
        over = [
            f"{name} {amount / scale:g} of {limit / scale:g}"
            for name, amount, limit, scale in zip(_NAMES, cost, self._limits, _SCALES, strict=True)
            if limit is not None and amount > limit
        ]
        return ", ".join(over) or None

    def _lacking(self, cost: ResourceCost, spent: list[int]) -> tuple[bool, ...]:
        return tuple(
            limit is not None and amount > 0 and taken + amount > limit
            for amount, taken, limit in zip(cost, spent, self._limits, strict=True)
        )
