"""InstancePool: all live instances of one spec, their holders, and the waiters."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import merge
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any

from agentfly.resources.resource import Scope
from agentfly.resources.scheduler.backoff import StartBackoff
from agentfly.resources.scheduler.budget import NO_COST, ResourceCost, cost_of
from agentfly.resources.spec import ResourceSpec


class InstanceState(StrEnum):
    """The state of an instance. It counts against capacity and budget in every state."""

    STARTING = "starting"
    IDLE = "idle"  # without owners; clean, unless it is shared and waits for its next owner
    LEASED = "leased"
    RESETTING = "resetting"
    STOPPING = "stopping"
    STUCK = "stuck"  # its stop failed; the stop is retried


BECOMING_READY = frozenset({InstanceState.STARTING, InstanceState.RESETTING})
"""States that lead to an instance that is ready for the next owner."""

TRANSITIONAL = BECOMING_READY | {InstanceState.STOPPING, InstanceState.STUCK}
"""States in which an instance has no owner and cannot be granted, because an operation runs on it."""


@dataclass(slots=True, eq=False)
class AcquireRequest:
    """A request for one instance, or for one of each of several specs, granted together or not at all.

    Args:
        id: number of the request, unique in an engine.
        specs: the requested specs. Several are for scope ``rollout`` only, and no two of them are equal.
        owner: owner of the lease, for instance a rollout's id.
        callers: the tasks that wait for the result, for instance a tool call and the requesting task in it. None of
            them can release anything while waiting. The end of the first one releases what is held for a call. Two
            concurrent calls of one owner are different callers.
        deadline: the time at which the request fails, on the scheduler's clock; None for never.
    """

    id: int
    specs: tuple[ResourceSpec[Any], ...]
    owner: str
    scope: Scope = Scope.ROLLOUT
    priority: int = 0
    callers: tuple[Hashable, ...] = ()
    deadline: float | None = None
    timer: list[Any] | None = None
    closed: bool = False  # rejected or cancelled

    @property
    def label(self) -> str:
        """The labels of the requested specs, for messages."""
        return " and ".join(spec.label for spec in self.specs)


@dataclass(slots=True, eq=False)
class Instance:
    """The scheduler's record of an instance."""

    name: str
    pool: InstancePool
    state: InstanceState
    since: float  # when its state last changed
    started: float
    has_started: bool = False  # its start has succeeded
    holdings: dict[int, Hold] = field(default_factory=dict)
    shared: bool = False  # granted with global scope
    uses: int = 0  # number of owners so far
    checked: float = 0.0
    timer: list[Any] | None = None

    @property
    def is_unreserved(self) -> bool:
        """Whether an idle instance is not reserved."""
        return self.shared or len(self.pool.idle) > len(self.pool.reservations)


@dataclass(slots=True, eq=False)
class Hold:
    """An owner's hold on an instance, represented outside by a lease."""

    id: int
    owner: str
    scope: Scope
    instance: Instance
    since: float
    caller: Hashable  # the caller whose end releases it, for scope `call`
    undelivered: list[ServedRequests] = field(default_factory=list)  # requests served by it, until it is delivered
    request_count: int = 0  # number of requests that it has served
    died_undelivered: bool = False  # its instance died before delivery
    death_error: BaseException | None = None  # why its instance is gone; the owner must not get a replacement unnoticed


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Requests that were served by one hold, with their former queue position.

    Args:
        requests: the requests.
        priority: the priority of their waiter.
        arrival: the arrival number of their waiter.
        since: when they began to wait.
    """

    requests: tuple[AcquireRequest, ...]
    priority: int
    arrival: int
    since: float


@dataclass(slots=True, eq=False)
class Waiter:
    """An entry of a pool's queue. Requests of one owner for the same specs share one.

    A request for several specs has a waiter in each of their queues. These siblings have the same arrival number. Of
    two such requests the same one is therefore first in every common queue, and it never waits for the other.
    """

    number: int
    owner: str
    scope: Scope
    priority: int
    arrival: int  # the same for siblings
    since: float
    pool: InstancePool
    requests: dict[int, AcquireRequest]  # the same for siblings
    siblings: list[Waiter]  # including itself
    reserved: bool = False  # an idle instance is reserved until its siblings are served
    yielding: bool = False  # others may take its reserved instance
    has_yielded: bool = False  # it has yielded before

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by priority, then by arrival."""
        return (-self.priority, self.arrival)

    @property
    def is_waiting(self) -> bool:
        """Whether it is still queued."""
        return bool(self.requests) and self in self.siblings

    @property
    def needs_only_this_pool(self) -> bool:
        """Whether all its siblings have a reserved instance."""
        return all(sibling is self or sibling.reserved for sibling in self.siblings)


@dataclass(slots=True, eq=False)
class Owner:
    """The holds and waiters of one owner, over all pools."""

    name: str
    holdings: dict[int, Hold] = field(default_factory=dict)
    waiters: dict[int, Waiter] = field(default_factory=dict)


class PriorityQueue:
    """Waiters by priority and then by arrival. The cost of each operation is independent of the length."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[int, Waiter]] = {}  # highest first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Waiter]:
        for waiters in self._by_priority.values():
            yield from waiters.values()

    def add(self, waiter: Waiter) -> None:
        """Add a waiter after those of the same priority."""
        if waiter.priority not in self._by_priority:
            self._by_priority[waiter.priority] = OrderedDict()
            self._by_priority = dict(sorted(self._by_priority.items(), reverse=True))
        self._by_priority[waiter.priority][waiter.number] = waiter
        self._length += 1

    def reinsert(self, waiter: Waiter) -> None:
        """Return a waiter to its position in the order of arrival, because its grant was void."""
        self.add(waiter)
        waiters = self._by_priority[waiter.priority]
        later = [one for one in waiters.values() if one.arrival > waiter.arrival]
        for waiter in later:
            waiters.move_to_end(waiter.number)

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        waiters = self._by_priority[waiter.priority]
        del waiters[waiter.number]
        if not waiters:
            del self._by_priority[waiter.priority]
        self._length -= 1


class WaitQueue:
    """The waiters of a pool, for an exclusive instance or for a shared one."""

    def __init__(self) -> None:
        self.exclusive = PriorityQueue()
        self.shared = PriorityQueue()

    def __len__(self) -> int:
        return len(self.exclusive) + len(self.shared)

    def __iter__(self) -> Iterator[Waiter]:
        if self.exclusive and self.shared:
            return merge(self.exclusive, self.shared, key=attrgetter("order"))
        return iter(self.exclusive or self.shared)

    def lane(self, scope: Scope) -> PriorityQueue:
        """The queue for requests with a scope."""
        return self.shared if scope is Scope.GLOBAL else self.exclusive


class InstancePool:
    """All live instances of one spec, with its holds and waiters. It decides nothing."""

    def __init__(self, spec: ResourceSpec[Any]) -> None:
        self.spec = spec
        self.cost: ResourceCost = cost_of(spec)
        self.uses_budget = self.cost != NO_COST
        self.start_weight = spec.start_weight
        self.instances: dict[str, Instance] = {}
        self.idle: dict[str, Instance] = {}  # ready for use; the most recently used last
        self.replicas: dict[str, Instance] = {}  # granted with global scope
        self.replicas_with_room: dict[str, Instance] = {}  # those that can take another owner
        self.counts = dict.fromkeys(InstanceState, 0)
        self.holds_by_owner: dict[tuple[str, Scope], Hold] = {}
        self.waiters_by_owner: dict[tuple[str, Scope], list[Waiter]] = {}
        self.queue = WaitQueue()
        self.reservations: dict[int, Waiter] = {}  # waiters with a reserved idle instance, in order
        self.start_queue_key: tuple[int, int] | None = None  # its position in the start queue
        self.backoff = StartBackoff()
        self.is_prewarmed = False  # whether instances are started before they are requested
        self.last_demand = 0.0  # time of the last request
        self.warm = 0  # target number of idle instances: the spec's ``warm`` while there is demand
        self.prewarm_check_at = math.inf  # when demand is checked next

    def set_state(self, instance: Instance, state: InstanceState, now: float) -> None:
        """Change the state of an instance."""
        if instance.name in self.instances:
            self.counts[instance.state] -= 1
        self.instances[instance.name] = instance
        self.counts[state] += 1
        instance.state, instance.since = state, now
        self.idle.pop(instance.name, None)
        if state is InstanceState.IDLE and not instance.shared:
            self.idle[instance.name] = instance
        if state in TRANSITIONAL and instance.shared:
            instance.shared = False
            del self.replicas[instance.name]
            self.replicas_with_room.pop(instance.name, None)
        while len(self.reservations) > len(self.idle):
            _, last = self.reservations.popitem()
            last.reserved = False

    def remove(self, instance: Instance) -> None:
        """Remove an instance that is gone."""
        self.counts[instance.state] -= 1
        del self.instances[instance.name]

    def next_grant(self) -> tuple[Waiter, Instance] | None:
        """The next waiter to serve and its instance; None if no one can be served. Updates the reservations on the way.

        A waiter for a shared instance, while all replicas are full, does not delay waiters for an exclusive one.
        """
        if not self.queue:
            return None
        for waiter in self.reservations.values():
            waiter.reserved = False
        self.reservations.clear()
        spare = len(self.idle)
        for waiter in self._eligible_waiters():
            if waiter.scope is Scope.GLOBAL:
                replica = self._choose_replica(spare)
                return None if replica is None else (waiter, replica)
            if waiter.yielding:
                continue
            if not spare:
                return None
            if waiter.needs_only_this_pool:
                return waiter, self.last_idle()
            waiter.reserved = True
            self.reservations[waiter.number] = waiter
            spare -= 1
        return None

    def last_idle(self) -> Instance:
        """The most recently used idle instance; there must be one."""
        return next(reversed(self.idle.values()))

    def first_unserved(self) -> Waiter | None:
        """The first waiter for which no instance is ready, starting or resetting; None if every waiter has one."""
        return next(islice(self._unreserved_waiters(), self.becoming_ready(), None), None)

    def replicas_are_full(self) -> bool:
        """Whether all allowed replicas exist and none can take another owner."""
        return not self.replicas_with_room and len(self.replicas) >= self.spec.replicas

    def _unreserved_waiters(self) -> Iterator[Waiter]:
        return (waiter for waiter in self._eligible_waiters() if not waiter.reserved)

    def _eligible_waiters(self) -> Iterable[Waiter]:
        return self.queue.exclusive if self.replicas_are_full() else self.queue

    def _choose_replica(self, spare: int) -> Instance | None:
        """The instance for the next shared owner, if ``spare`` idle instances may become replicas."""
        emptiest = min(self.replicas_with_room.values(), key=lambda instance: len(instance.holdings), default=None)
        if (emptiest is None or emptiest.holdings) and spare and len(self.replicas) < self.spec.replicas:
            return self.last_idle()
        return emptiest

    def share(self, instance: Instance) -> None:
        """Note that an instance has been granted with global scope."""
        instance.shared = True
        self.replicas[instance.name] = instance
        self.update_replica_room(instance)

    def update_replica_room(self, instance: Instance) -> None:
        """Record whether a shared instance can take another owner."""
        spec = self.spec
        full = spec.max_owners is not None and len(instance.holdings) >= spec.max_owners
        if full or self.has_reached_max_uses(instance):
            self.replicas_with_room.pop(instance.name, None)
        else:
            self.replicas_with_room[instance.name] = instance

    def has_reached_max_uses(self, instance: Instance) -> bool:
        """Whether an instance has had its maximum number of owners."""
        return self.spec.max_uses is not None and instance.uses >= self.spec.max_uses

    def unused_replica(self) -> Instance | None:
        """A shared instance without owners, if there is one."""
        return next((instance for instance in self.replicas_with_room.values() if not instance.holdings), None)

    def becoming_ready(self) -> int:
        """The number of instances that become ready without a release."""
        return self.counts[InstanceState.STARTING] + self.counts[InstanceState.RESETTING]

    def unmet_demand(self) -> int:
        """The number of instances that waiters need beyond those that are reserved or becoming ready."""
        return len(self.queue.exclusive) - len(self.reservations) + self._replicas_wanted() - self.becoming_ready()

    def starts_wanted(self) -> int:
        """The number of instances to start for waiters, within the capacity and the backoff."""
        room = self.backoff.allowed_starts(self.counts[InstanceState.STARTING])
        return int(min(self.unmet_demand(), self.spec.capacity - len(self.instances), room))

    def prewarm_starts_wanted(self) -> int:
        """The number of instances to start without waiters, within the capacity."""
        if not self.is_prewarmed or self.backoff.blocks_prewarming:
            return 0
        ahead = max(self.warm, int(self._wants_another_replica()))
        wanted = self.unmet_demand() + ahead - (len(self.idle) - len(self.reservations))
        room = self.backoff.allowed_starts(self.counts[InstanceState.STARTING])
        return int(min(wanted, self.spec.capacity - len(self.instances), room))

    def unserved_waiters(self) -> list[Waiter]:
        """All waiters for which no instance is ready or becoming ready."""
        return list(islice(self._unreserved_waiters(), self.becoming_ready(), None))

    def waiters_of_next_start(self) -> list[Waiter]:
        """The waiters that one more instance would serve."""
        first = next(self._unreserved_waiters(), None)
        if first is None or first.scope is not Scope.GLOBAL:
            return [first] if first is not None else []
        owners = self.spec.max_owners or len(self.queue)
        return list(takewhile(lambda waiter: waiter.scope is Scope.GLOBAL, islice(self._unreserved_waiters(), owners)))

    def _replicas_wanted(self) -> int:
        if not (waiting := len(self.queue.shared)):
            return 0
        owners = self.spec.max_owners or waiting
        return min(-(-waiting // owners), self.spec.replicas - len(self.replicas))

    def _wants_another_replica(self) -> bool:
        """Whether another replica would reduce the load, for replicas with an unlimited number of owners."""
        spec, replicas = self.spec, self.replicas
        return spec.max_owners is None and 0 < len(replicas) < spec.replicas and self.unused_replica() is None

    def is_full(self) -> bool:
        """Whether the capacity is used up."""
        return len(self.instances) >= self.spec.capacity

    def is_empty(self) -> bool:
        """Whether the pool has no state worth keeping."""
        return not (
            self.instances or self.queue or self.holds_by_owner or self.is_prewarmed or self.backoff.blocks_prewarming
        )
