"""Admission: when the next rollout may begin."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from agentfly.resources.scope import Scope
from agentfly.resources.spec import ResourceSpec


class Admission:
    """Lets rollouts begin in order: as many as may run at a time, and fewer while resources are short.

    A rollout that begins while others wait for a resource would only stand in line behind them, and take memory and
    the sampler's time meanwhile. So there is a limit on those who are *ahead*: they wait for a resource, or have begun
    and not had one yet. At first there is none but ``max_concurrent``. Whoever joins a line in which already as many
    wait as there are places lowers it by one, down to that many places; whoever leaves a line empty raises it by one.
    So a line never grows long, nor runs dry. Those that run are never held up.

    Args:
        max_concurrent: how many rollouts run at a time.
    """

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._running = 0
        self._door: deque[Guest] = deque()
        self._ahead: set[Guest] = set()
        self._limit: float = max_concurrent
        self._lines: Counter[tuple[ResourceSpec[Any], Scope]] = Counter()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Guest]:
        """Wait until a rollout may begin; it runs within the block."""
        guest = Guest(self)
        self._door.append(guest)
        self._open()
        try:
            await guest.entry
            yield guest
        finally:
            self._ahead.discard(guest)
            if guest.entry.done() and not guest.entry.cancelled():
                self._running -= 1
            self._open()

    def _open(self) -> None:
        """Let in who may come in."""
        while self._door and self._running < self._max_concurrent and len(self._ahead) + 1 <= self._limit:
            guest = self._door.popleft()
            if not guest.entry.done():  # it may have been cancelled
                guest.entry.set_result(None)
                self._running += 1
                self._ahead.add(guest)

    def _join(self, guest: Guest, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> None:
        self._ahead.add(guest)
        for spec in specs:
            places = _places(spec, scope)
            if self._lines[spec, scope] >= places:
                self._limit = max(min(self._limit, places), self._limit - 1)
            self._lines[spec, scope] += 1

    def _leave(self, guest: Guest, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> None:
        if not guest.waits:
            self._ahead.discard(guest)
        for spec in specs:
            self._lines[spec, scope] -= 1
            if not self._lines[spec, scope]:
                del self._lines[spec, scope]
                self._limit = min(self._limit + 1, self._max_concurrent)
        self._open()


class Guest:
    """A rollout that may begin when ``entry`` is done."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.entry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waits = 0

    @contextmanager
    def notice(self, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> Iterator[None]:
        """Within the block the rollout waits for resources; it may be served at once."""
        self.waits += 1
        self._admission._join(self, specs, scope)
        try:
            yield
        finally:
            self.waits -= 1
            self._admission._leave(self, specs, scope)


def _places(spec: ResourceSpec[Any], scope: Scope) -> float:
    """How many can have something of a spec at a time."""
    if scope is not Scope.GLOBAL:
        return spec.capacity
    return math.inf if spec.owners_at_once is None else spec.replicas * spec.owners_at_once
