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
    """Where an instance is in its life. It counts against capacity and budget in every one of these states."""

    STARTING = "starting"
    IDLE = "idle"  # nobody holds it; clean, unless it is a shared one that waits for its next owner
    LEASED = "leased"
    RESETTING = "resetting"
    STOPPING = "stopping"
    STUCK = "stuck"  # it was told to go and did not; tried again now and then


BECOMING_READY = frozenset({InstanceState.STARTING, InstanceState.RESETTING})
"""States after which an instance is there for whoever comes next."""

TRANSITIONAL = BECOMING_READY | {InstanceState.STOPPING, InstanceState.STUCK}
"""States in which something is done with an instance, which nobody has or can get meanwhile."""


@dataclass(slots=True, eq=False)
class AcquireRequest:
    """Somebody asks for an instance, or for one of each of several specs, which are granted together or not at all.

    Args:
        id: the request's number; never used twice in an engine.
        specs: what is asked for. Several are for scope ``rollout`` only, and no two of them are equal.
        owner: whom the lease belongs to, for instance a rollout's id.
        callers: the threads of control that wait for the answer, for instance a tool call and the task in it that
            asks. None of them can give anything back meanwhile. The first is the one whose end gives back what is
            held for a call. Two calls of one owner that run side by side are different callers.
        deadline: when to give up, on the scheduler's clock; None for never.
    """

    id: int
    specs: tuple[ResourceSpec[Any], ...]
    owner: str
    scope: Scope = Scope.ROLLOUT
    priority: int = 0
    callers: tuple[Hashable, ...] = ()
    deadline: float | None = None
    timer: list[Any] | None = None
    closed: bool = False  # it was refused or taken back, and waits for nothing any more

    @property
    def label(self) -> str:
        """What is asked for, for people."""
        return " and ".join(spec.label for spec in self.specs)


@dataclass(slots=True, eq=False)
class Instance:
    """An instance as the scheduler knows it: a name and a state."""

    name: str
    pool: InstancePool
    state: InstanceState
    since: float  # when it came into its state
    started: float
    has_started: bool = False  # its start is over, well
    holdings: dict[int, Hold] = field(default_factory=dict)
    shared: bool = False  # given out with global scope
    uses: int = 0  # owners so far
    checked: float = 0.0
    timer: list[Any] | None = None

    @property
    def is_unreserved(self) -> bool:
        """Whether an idle instance is kept for nobody."""
        return self.shared or len(self.pool.idle) > len(self.pool.reservations)


@dataclass(slots=True, eq=False)
class Hold:
    """An owner's hold on an instance: what a lease stands for."""

    id: int
    owner: str
    scope: Scope
    instance: Instance
    since: float
    caller: Hashable  # the thread of control whose end gives it back, if it is held for a call
    undelivered: list[ServedRequests] = field(default_factory=list)  # by it, until it is handed out
    request_count: int = 0  # acquires that were answered with it
    died_undelivered: bool = False  # what it stood for was dead before anybody had it
    death_error: BaseException | None = None  # why its instance is gone, for an owner who must not get another unawares


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Requests that shared a place in a queue and were granted a holding: where they would have to wait again.

    Args:
        requests: the requests.
        priority: that of their place.
        arrival: that of their place.
        since: when they began to wait.
    """

    requests: tuple[AcquireRequest, ...]
    priority: int
    arrival: int
    since: float


@dataclass(slots=True, eq=False)
class Waiter:
    """A place in a pool's queue. Requests of one owner for the same thing share one.

    A request for several specs has a place in each of their queues. These partners arrived at the same moment, so that
    of two sets the same one is the earlier in every queue that they have in common; it will not wait for the other.
    """

    number: int
    owner: str
    scope: Scope
    priority: int
    arrival: int  # the same for partners
    since: float
    pool: InstancePool
    requests: dict[int, AcquireRequest]  # the same for partners
    siblings: list[Waiter]  # itself among them
    reserved: bool = False  # an instance is ready for it, and waits with it for its partners
    yielding: bool = False  # it lets others have what is kept for it
    has_yielded: bool = False  # it has done so

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by priority, then by arrival."""
        return (-self.priority, self.arrival)

    @property
    def is_waiting(self) -> bool:
        """Whether it is still in the queue."""
        return bool(self.requests) and self in self.siblings

    @property
    def needs_only_this_pool(self) -> bool:
        """Whether an instance of its pool is all that it still wants."""
        return all(partner is self or partner.reserved for partner in self.siblings)


@dataclass(slots=True, eq=False)
class Owner:
    """What one owner holds and waits for, over all pools."""

    name: str
    holdings: dict[int, Hold] = field(default_factory=dict)
    waiters: dict[int, Waiter] = field(default_factory=dict)


class PriorityQueue:
    """Who waits for the same kind of place, by priority and then by arrival. No step depends on how many wait."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[int, Waiter]] = {}  # highest first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Waiter]:
        for waiters in self._by_priority.values():
            yield from waiters.values()

    def add(self, waiter: Waiter) -> None:
        """Put a waiter at the end of its priority."""
        if waiter.priority not in self._by_priority:
            self._by_priority[waiter.priority] = OrderedDict()
            self._by_priority = dict(sorted(self._by_priority.items(), reverse=True))
        self._by_priority[waiter.priority][waiter.number] = waiter
        self._length += 1

    def reinsert(self, waiter: Waiter) -> None:
        """Put a waiter where it belongs by its arrival, because what it was given has come to nothing."""
        self.add(waiter)
        waiters = self._by_priority[waiter.priority]
        later = [one for one in waiters.values() if one.arrival > waiter.arrival]
        for one in later:
            waiters.move_to_end(one.number)

    def remove(self, waiter: Waiter) -> None:
        """Take a waiter out, wherever it stands."""
        waiters = self._by_priority[waiter.priority]
        del waiters[waiter.number]
        if not waiters:
            del self._by_priority[waiter.priority]
        self._length -= 1


class WaitQueue:
    """Who waits in a pool: for an instance of their own, or for a seat on one that is shared."""

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
        """Where those stand who ask with a scope."""
        return self.shared if scope is Scope.GLOBAL else self.exclusive


class InstancePool:
    """All live instances of one spec. It keeps its own books straight and decides nothing."""

    def __init__(self, spec: ResourceSpec[Any]) -> None:
        self.spec = spec
        self.cost: ResourceCost = cost_of(spec)
        self.uses_budget = self.cost != NO_COST
        self.start_weight = spec.start_weight
        self.instances: dict[str, Instance] = {}
        self.idle: dict[str, Instance] = {}  # clean; the one used last is the last
        self.replicas: dict[str, Instance] = {}  # given out with global scope
        self.replicas_with_room: dict[str, Instance] = {}  # those of them that have a seat free
        self.counts = dict.fromkeys(InstanceState, 0)
        self.holds_by_owner: dict[tuple[str, Scope], Hold] = {}
        self.waiters_by_owner: dict[tuple[str, Scope], list[Waiter]] = {}
        self.queue = WaitQueue()
        self.reservations: dict[int, Waiter] = {}  # those in the queue for whom an idle instance waits, in order
        self.start_queue_key: tuple[int, int] | None = None  # its place among the pools that want a start
        self.backoff = StartBackoff()
        self.is_prewarmed = False  # whether instances are started ahead of those who ask
        self.last_demand = 0.0  # when somebody last asked for an instance
        self.warm = 0  # how many idle instances to keep ready: the spec's count, until nobody asks any more
        self.prewarm_check_at = math.inf  # when it is seen whether anybody still asks

    def set_state(self, instance: Instance, state: InstanceState, now: float) -> None:
        """Bring an instance into a state."""
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
        """An instance is gone."""
        self.counts[instance.state] -= 1
        del self.instances[instance.name]

    def next_grant(self) -> tuple[Waiter, Instance] | None:
        """Whose turn it is, and the instance for it. Notes on the way for whom one is kept until its partners can go.

        One that waits for a seat, where all replicas there may be are full, holds up nobody who needs an instance.
        """
        if not self.queue:
            return None
        for waiter in self.reservations.values():
            waiter.reserved = False
        self.reservations.clear()
        spare = len(self.idle)
        for waiter in self._eligible_waiters():
            if waiter.scope is Scope.GLOBAL:
                seat = self._choose_replica(spare)
                return None if seat is None else (waiter, seat)
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
        """The idle instance that was used last; there must be one."""
        return next(reversed(self.idle.values()))

    def first_unserved(self) -> Waiter | None:
        """Whoever is first among those for whom no instance is ready or coming."""
        return next(islice(self._unreserved_waiters(), self.becoming_ready(), None), None)

    def replicas_are_full(self) -> bool:
        """Whether there are all the replicas there may be, and none has a seat free."""
        return not self.replicas_with_room and len(self.replicas) >= self.spec.replicas

    def _unreserved_waiters(self) -> Iterator[Waiter]:
        return (waiter for waiter in self._eligible_waiters() if not waiter.reserved)

    def _eligible_waiters(self) -> Iterable[Waiter]:
        return self.queue.exclusive if self.replicas_are_full() else self.queue

    def _choose_replica(self, spare: int) -> Instance | None:
        """Where the next owner of a shared instance goes, if ``spare`` idle instances may be used for it."""
        emptiest = min(self.replicas_with_room.values(), key=lambda instance: len(instance.holdings), default=None)
        if (emptiest is None or emptiest.holdings) and spare and len(self.replicas) < self.spec.replicas:
            return self.last_idle()
        return emptiest

    def share(self, instance: Instance) -> None:
        """An instance has been given out with global scope."""
        instance.shared = True
        self.replicas[instance.name] = instance
        self.update_replica_room(instance)

    def update_replica_room(self, instance: Instance) -> None:
        """Note whether a shared instance has a seat free."""
        spec = self.spec
        full = spec.max_owners is not None and len(instance.holdings) >= spec.max_owners
        if full or self.has_reached_max_uses(instance):
            self.replicas_with_room.pop(instance.name, None)
        else:
            self.replicas_with_room[instance.name] = instance

    def has_reached_max_uses(self, instance: Instance) -> bool:
        """Whether an instance has had as many owners as it may."""
        return self.spec.max_uses is not None and instance.uses >= self.spec.max_uses

    def unused_replica(self) -> Instance | None:
        """A shared instance that nobody holds."""
        return next((instance for instance in self.replicas_with_room.values() if not instance.holdings), None)

    def becoming_ready(self) -> int:
        """How many instances will be free without anybody giving one back."""
        return self.counts[InstanceState.STARTING] + self.counts[InstanceState.RESETTING]

    def unmet_demand(self) -> int:
        """How many instances those who wait need beyond those that are ready for them or coming."""
        return len(self.queue.exclusive) - len(self.reservations) + self._replicas_wanted() - self.becoming_ready()

    def starts_wanted(self) -> int:
        """How many instances to start for those who wait, within capacity and what failures have taught."""
        room = self.backoff.allowed_starts(self.counts[InstanceState.STARTING])
        return int(min(self.unmet_demand(), self.spec.capacity - len(self.instances), room))

    def prewarm_starts_wanted(self) -> int:
        """How many instances to start though nobody waits for them, within capacity."""
        if not self.is_prewarmed or self.backoff.blocks_prewarming:
            return 0
        ahead = max(self.warm, int(self._wants_another_replica()))
        wanted = self.unmet_demand() + ahead - (len(self.idle) - len(self.reservations))
        room = self.backoff.allowed_starts(self.counts[InstanceState.STARTING])
        return int(min(wanted, self.spec.capacity - len(self.instances), room))

    def unserved_waiters(self) -> list[Waiter]:
        """All for whom no instance is ready or coming."""
        return list(islice(self._unreserved_waiters(), self.becoming_ready(), None))

    def waiters_of_next_start(self) -> list[Waiter]:
        """Those whom one more instance would serve."""
        first = next(self._unreserved_waiters(), None)
        if first is None or first.scope is not Scope.GLOBAL:
            return [first] if first is not None else []
        seats = self.spec.max_owners or len(self.queue)
        return list(takewhile(lambda waiter: waiter.scope is Scope.GLOBAL, islice(self._unreserved_waiters(), seats)))

    def _replicas_wanted(self) -> int:
        if not (waiting := len(self.queue.shared)):
            return 0
        seats = self.spec.max_owners or waiting
        return min(-(-waiting // seats), self.spec.replicas - len(self.replicas))

    def _wants_another_replica(self) -> bool:
        """Whether one more replica would lighten the load of those whose seats have no limit."""
        spec, replicas = self.spec, self.replicas
        return spec.max_owners is None and 0 < len(replicas) < spec.replicas and self.unused_replica() is None

    def is_full(self) -> bool:
        """Whether as many instances are alive as may be."""
        return len(self.instances) >= self.spec.capacity

    def is_empty(self) -> bool:
        """Whether nothing would be lost if the pool were forgotten."""
        return not (
            self.instances or self.queue or self.holds_by_owner or self.is_prewarmed or self.backoff.blocks_prewarming
        )
