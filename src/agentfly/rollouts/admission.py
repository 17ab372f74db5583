"""Admission: when the next rollout may begin."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

from agentfly.resources.scope import Scope
from agentfly.resources.spec import ResourceSpec


class Source(Protocol):
    """Where rollouts that want to begin come from, in their order."""

    @property
    def priority(self) -> int:
        """Those of a higher one begin first."""
        ...

    def begin_next(self, guest: Guest) -> bool:
        """Begin the next rollout, as ``guest``, and return at once; False if there is none left."""
        ...


class Admission:
    """Lets rollouts begin: as many as may run at a time, and fewer while resources are short.

    Those of a source of higher priority come first; of two sources of the same one, those of the source that came
    first. A rollout is nothing but a place in its source until it begins, so that any number of them may wait.

    A rollout that begins while others wait for a resource would only stand in line behind them, and take memory and
    the sampler's time meanwhile. So there is a limit on those who are *ahead*: they wait for a resource, or have begun
    and not had one yet. At first there is none but ``max_concurrent``. Whoever joins a line in which already as many
    wait as there are places lowers it by one, down to that many places; whoever leaves a line empty raises it by one.
    So a line never grows long, nor runs dry. Who has a lower priority is not ahead, because the engine serves him
    later. Those that run are never held up.

    Args:
        max_concurrent: how many rollouts run at a time.
    """

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._running = 0
        self._arrivals = count()
        self._places: dict[Source, int] = {}
        self._waiting: list[tuple[int, int, Source]] = []
        self._ahead: Counter[int] = Counter()
        self._limit: float = max_concurrent
        self._lines: Counter[tuple[ResourceSpec[Any], Scope]] = Counter()
        self._opening = False

    def announce(self, source: Source) -> None:
        """A source has rollouts to begin. It keeps the place in line that it got when it first came."""
        place = self._places.get(source)
        if place is None:
            place = self._places[source] = next(self._arrivals)
        entry = (-source.priority, place, source)
        if entry not in self._waiting:
            heapq.heappush(self._waiting, entry)
        self._open()

    def forget(self, source: Source) -> None:
        """A source will have no more rollouts."""
        self._places.pop(source, None)
        self._waiting = [entry for entry in self._waiting if entry[2] is not source]
        heapq.heapify(self._waiting)

    def _open(self) -> None:
        """Let in who may come in."""
        if self._opening:  # a source that is just beginning a rollout has more to begin
            return
        self._opening = True
        try:
            while self._waiting and self._running < self._max_concurrent:
                source = self._waiting[0][2]
                if self._ahead_of(source.priority) + 1 > self._limit:
                    return
                guest = Guest(self, source.priority)
                if not source.begin_next(guest):
                    guest.leave()
                    self._waiting = [entry for entry in self._waiting if entry[2] is not source]
                    heapq.heapify(self._waiting)
        finally:
            self._opening = False

    def _ahead_of(self, priority: int) -> int:
        return sum(guests for theirs, guests in self._ahead.items() if theirs >= priority)

    def _join(self, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> None:
        for spec in specs:
            places = _places(spec, scope)
            if self._lines[spec, scope] >= places:
                self._limit = max(min(self._limit, places), self._limit - 1)
            self._lines[spec, scope] += 1

    def _leave(self, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> None:
        for spec in specs:
            self._lines[spec, scope] -= 1
            if not self._lines[spec, scope]:
                del self._lines[spec, scope]
                self._limit = min(self._limit + 1, self._max_concurrent)
        self._open()


class Guest:
    """A rollout that has been let in, until it leaves."""

    def __init__(self, admission: Admission, priority: int) -> None:
        self._admission = admission
        self._priority = priority
        self._waits = 0
        self._is_ahead = False
        self._inside = True
        admission._running += 1
        self._go_ahead(True)

    def leave(self) -> None:
        """The rollout has ended; leaving again does nothing."""
        if self._inside:
            self._inside = False
            self._go_ahead(False)
            self._admission._running -= 1
            self._admission._open()

    @contextmanager
    def notice(self, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> Iterator[None]:
        """Within the block the rollout waits for resources; it may be served at once."""
        self._waits += 1
        self._go_ahead(True)
        self._admission._join(specs, scope)
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._go_ahead(False)
            self._admission._leave(specs, scope)

    def _go_ahead(self, ahead: bool) -> None:
        if ahead is not self._is_ahead:
            self._is_ahead = ahead
            self._admission._ahead[self._priority] += 1 if ahead else -1


def _places(spec: ResourceSpec[Any], scope: Scope) -> float:
    """How many can have something of a spec at a time."""
    if scope is not Scope.GLOBAL:
        return spec.capacity
    return math.inf if spec.owners_at_once is None else spec.replicas * spec.owners_at_once
