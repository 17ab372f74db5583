"""Pool: all live instances of one spec, who holds them, and who waits for one."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, takewhile
from typing import Any

from agentfly.resources.budget import NOTHING, Cost, cost_of
from agentfly.resources.scope import Scope
from agentfly.resources.spec import ResourceSpec


class InstanceState(StrEnum):
    """Where an instance is in its life. It counts against capacity and budget in every one of these states."""

    STARTING = "starting"
    IDLE = "idle"  # nobody holds it; clean, unless it is a shared one that waits for its next owner
    LEASED = "leased"
    RESETTING = "resetting"
    STOPPING = "stopping"
    STUCK = "stuck"  # it was told to go and did not; tried again now and then


COMING = frozenset({InstanceState.STARTING, InstanceState.RESETTING})
"""States after which an instance is there for whoever comes next."""

BUSY = COMING | {InstanceState.STOPPING, InstanceState.STUCK}
"""States in which something is done with an instance, which nobody has or can get meanwhile."""


@dataclass(slots=True, eq=False)
class Request:
    """Somebody asks for an instance.

    Args:
        id: the request's number; never used twice in an engine.
        owner: whom the lease belongs to, for instance a rollout's id.
        callers: the threads of control that wait for the answer, for instance a tool call and the task in it that
            asks. None of them can give anything back meanwhile. The first is the one whose end gives back what is
            held for a call. Two calls of one owner that run side by side are different callers.
        deadline: when to give up, on the scheduler's clock; None for never.
    """

    id: int
    spec: ResourceSpec[Any]
    owner: str
    scope: Scope = Scope.ROLLOUT
    priority: int = 0
    callers: tuple[Hashable, ...] = ()
    deadline: float | None = None


@dataclass(slots=True, eq=False)
class Instance:
    """An instance as the scheduler knows it: a name and a state."""

    name: str
    pool: Pool
    state: InstanceState
    since: float  # when it came into its state
    started: float
    holdings: dict[int, Holding] = field(default_factory=dict)
    shared: bool = False  # given out with global scope
    uses: int = 0  # owners so far
    checked: float = 0.0
    timer: list[Any] | None = None


@dataclass(slots=True, eq=False)
class Holding:
    """An owner's hold on an instance: what a lease stands for."""

    id: int
    owner: str
    scope: Scope
    instance: Instance
    since: float
    caller: Hashable  # the thread of control whose end gives it back, if it is held for a call
    claims: int = 0  # acquires that were answered with it
    death: BaseException | None = None  # why its instance is gone, for an owner who must not get another unawares


@dataclass(slots=True, eq=False)
class Waiter:
    """A place in a pool's queue. Requests of one owner for the same thing share one."""

    number: int
    owner: str
    scope: Scope
    priority: int
    since: float
    pool: Pool
    requests: dict[int, Request] = field(default_factory=dict)
    timers: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by priority, then by arrival."""
        return (-self.priority, self.number)


@dataclass(slots=True, eq=False)
class Owner:
    """What one owner holds and waits for, over all pools."""

    name: str
    holdings: dict[int, Holding] = field(default_factory=dict)
    waiters: dict[int, Waiter] = field(default_factory=dict)


class Queue:
    """Who waits, by priority and then by arrival. Every step is independent of how many wait."""

    def __init__(self) -> None:
        self._lanes: dict[int, OrderedDict[int, Waiter]] = {}  # by priority, highest first
        self.exclusive = 0
        self.shared = 0

    def __len__(self) -> int:
        return self.exclusive + self.shared

    def __iter__(self) -> Iterator[Waiter]:
        for lane in self._lanes.values():
            yield from lane.values()

    def add(self, waiter: Waiter) -> None:
        """Put a waiter at the end of its priority."""
        if waiter.priority not in self._lanes:
            self._lanes[waiter.priority] = OrderedDict()
            self._lanes = dict(sorted(self._lanes.items(), reverse=True))
        self._lanes[waiter.priority][waiter.number] = waiter
        self._count(waiter, 1)

    def remove(self, waiter: Waiter) -> None:
        """Take a waiter out, wherever it stands."""
        lane = self._lanes[waiter.priority]
        del lane[waiter.number]
        if not lane:
            del self._lanes[waiter.priority]
        self._count(waiter, -1)

    def first(self) -> Waiter | None:
        """Whose turn it is."""
        for lane in self._lanes.values():
            return next(iter(lane.values()))
        return None

    def _count(self, waiter: Waiter, by: int) -> None:
        if waiter.scope is Scope.GLOBAL:
            self.shared += by
        else:
            self.exclusive += by


class Pool:
    """All live instances of one spec. It keeps its own books straight and decides nothing."""

    def __init__(self, spec: ResourceSpec[Any]) -> None:
        self.spec = spec
        self.cost: Cost = cost_of(spec)
        self.costly = self.cost != NOTHING
        self.instances: dict[str, Instance] = {}
        self.idle: dict[str, Instance] = {}  # clean; the one used last is the last
        self.shared: dict[str, Instance] = {}  # given out with global scope and open for more owners
        self.counts = dict.fromkeys(InstanceState, 0)
        self.held: dict[tuple[str, Scope], Holding] = {}
        self.waiting: dict[tuple[str, Scope], Waiter] = {}
        self.queue = Queue()
        self.line_key: tuple[int, int] | None = None  # its place among the pools that want a start
        self.failures = 0  # starts that failed since the last that did not
        self.asked = 0.0  # when somebody last asked for an instance
        self.warm = 0  # how many idle instances to keep ready: the spec's count, until nobody asks any more
        self.lapses = math.inf  # when it is seen whether anybody still asks
        self.warm_from = 0.0  # no start for the warm count before this

    def enter(self, instance: Instance, state: InstanceState, now: float) -> None:
        """Bring an instance into a state."""
        if instance.name in self.instances:
            self.counts[instance.state] -= 1
        self.instances[instance.name] = instance
        self.counts[state] += 1
        instance.state, instance.since = state, now
        self.idle.pop(instance.name, None)
        if state is InstanceState.IDLE and not instance.shared:
            self.idle[instance.name] = instance
        if state in BUSY:
            instance.shared = False
            self.shared.pop(instance.name, None)

    def leave(self, instance: Instance) -> None:
        """An instance is gone."""
        self.counts[instance.state] -= 1
        del self.instances[instance.name]

    def seat(self, scope: Scope) -> Instance | None:
        """An instance that can be given out now."""
        if scope is Scope.GLOBAL and self.shared:
            return min(self.shared.values(), key=lambda instance: len(instance.holdings))
        return next(reversed(self.idle.values()), None)

    def update_seats(self, instance: Instance) -> None:
        """Note whether a shared instance is open for more owners."""
        spec = self.spec
        full = spec.owners_at_once is not None and len(instance.holdings) >= spec.owners_at_once
        if full or self.worn_out(instance):
            self.shared.pop(instance.name, None)
        else:
            self.shared[instance.name] = instance

    def worn_out(self, instance: Instance) -> bool:
        """Whether an instance has had as many owners as it may."""
        return self.spec.max_uses is not None and instance.uses >= self.spec.max_uses

    def unused_shared(self) -> Instance | None:
        """A shared instance that nobody holds."""
        return next((instance for instance in self.shared.values() if not instance.holdings), None)

    def coming(self) -> int:
        """How many instances will be free without anybody giving one back."""
        return self.counts[InstanceState.STARTING] + self.counts[InstanceState.RESETTING]

    def unmet(self) -> int:
        """How many instances those who wait need beyond those that are coming."""
        seats = self.spec.owners_at_once or len(self.queue) or 1
        return self.queue.exclusive + -(-self.queue.shared // seats) - self.coming()

    def missing(self) -> int:
        """How many instances to start for those who wait, within capacity."""
        return min(self.unmet(), self.spec.capacity - len(self.instances))

    def missing_warm(self, now: float) -> int:
        """How many instances to start for the warm count, within capacity."""
        if not self.warm or now < self.warm_from:
            return 0
        wanted = self.unmet() + self.warm - len(self.idle)
        return min(wanted, self.spec.capacity - len(self.instances))

    def next_served(self) -> list[Waiter]:
        """Those whom one more instance would serve."""
        first = self.queue.first()
        if first is None or first.scope is not Scope.GLOBAL:
            return [first] if first is not None else []
        seats = self.spec.owners_at_once or len(self.queue)
        return list(takewhile(lambda waiter: waiter.scope is Scope.GLOBAL, islice(self.queue, seats)))

    def is_full(self) -> bool:
        """Whether as many instances are alive as may be."""
        return len(self.instances) >= self.spec.capacity

    def is_empty(self) -> bool:
        """Whether nothing would be lost if the pool were forgotten."""
        return not (self.instances or self.queue or self.held or self.warm)
