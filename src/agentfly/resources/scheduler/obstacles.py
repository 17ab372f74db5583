"""Obstacles: what stands in the way of those who wait."""

from __future__ import annotations

from agentfly.resources.scheduler.books import Books
from agentfly.resources.scheduler.deadlock import Obstacle
from agentfly.resources.scheduler.pool import COMING, Holding, Instance, InstanceState, Waiter
from agentfly.resources.scheduler.supply import Supply
from agentfly.resources.scope import Scope


class Obstacles:
    """Reads from the books and the supply why somebody has nothing yet."""

    def __init__(self, books: Books, supply: Supply) -> None:
        self._books = books
        self._supply = supply

    def in_the_way(self, waiter: Waiter) -> list[Obstacle]:
        """What must go before a waiter can go on; none if it will go on without.

        Something else will help it if an instance is coming or, in a full pool, going, or if a start that is put off
        will be tried. What is merely stuck will not,
        nor what moves elsewhere. A pool that may start another one waits for the budget. If what is on its way out
        leaves enough of that, it waits for those before it in the line of starts, whom only holders pass by; and if
        there are none, for a place to start, and every start ends.
        """
        pool, before = waiter.pool, self._instances_before(waiter)
        if pool.backoff.holds or pool.coming() or (pool.is_full() and pool.counts[InstanceState.STOPPING]):
            return []
        if any(instance.state in COMING for instance in before):
            return []
        if not before and waiter.owner not in self._books.entangled:
            first = self._supply.before_in_line(pool)
            return [] if first is None else [first]
        keeping = {instance.pool: None for instance in before if instance.name in instance.pool.idle}
        kept = [one for pool in keeping for one in pool.kept.values() if one.partners is not waiter.partners]
        return [*_holdings_of(before), *kept]

    def holdings_before(self, waiter: Waiter) -> list[Holding]:
        """Who has what a waiter waits for."""
        return _holdings_of(self._instances_before(waiter))

    def _instances_before(self, waiter: Waiter) -> list[Instance]:
        """What is alive of the pool, or shared, if that is full, and otherwise what takes the budget that is short."""
        pool = waiter.pool
        if waiter.scope is Scope.GLOBAL and pool.seats_are_taken():
            return list(pool.replicas.values())
        return list(pool.instances.values()) if pool.is_full() else self._supply.in_place_of(pool)


def _holdings_of(instances: list[Instance]) -> list[Holding]:
    return [holding for instance in instances for holding in instance.holdings.values()]
