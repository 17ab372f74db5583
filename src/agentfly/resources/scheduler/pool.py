"""Pool: all live instances of one spec, who holds them, and who waits for one."""

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

from agentfly.resources.scheduler.backoff import Backoff
from agentfly.resources.scheduler.budget import NOTHING, Cost, cost_of
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
    over: bool = False  # it was refused or taken back, and waits for nothing any more

    @property
    def label(self) -> str:
        """What is asked for, for people."""
        return " and ".join(spec.label for spec in self.specs)


@dataclass(slots=True, eq=False)
class Instance:
    """An instance as the scheduler knows it: a name and a state."""

    name: str
    pool: Pool
    state: InstanceState
    since: float  # when it came into its state
    started: float
    up: bool = False  # its start is over, well
    holdings: dict[int, Holding] = field(default_factory=dict)
    shared: bool = False  # given out with global scope
    uses: int = 0  # owners so far
    checked: float = 0.0
    timer: list[Any] | None = None

    @property
    def spare(self) -> bool:
        """Whether an idle instance is kept for nobody."""
        return self.shared or len(self.pool.idle) > len(self.pool.kept)


@dataclass(slots=True, eq=False)
class Holding:
    """An owner's hold on an instance: what a lease stands for."""

    id: int
    owner: str
    scope: Scope
    instance: Instance
    since: float
    caller: Hashable  # the thread of control whose end gives it back, if it is held for a call
    answered: list[Answered] = field(default_factory=list)  # by it, until it is handed out
    claims: int = 0  # acquires that were answered with it
    void: bool = False  # what it stood for was dead before anybody had it
    death: BaseException | None = None  # why its instance is gone, for an owner who must not get another unawares


@dataclass(frozen=True, slots=True)
class Answered:
    """Requests that shared a place in a queue and were granted a holding: where they would have to wait again.

    Args:
        requests: the requests.
        priority: that of their place.
        arrival: that of their place.
        since: when they began to wait.
    """

    requests: tuple[Request, ...]
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
    pool: Pool
    requests: dict[int, Request]  # the same for partners
    partners: list[Waiter]  # itself among them
    kept: bool = False  # an instance is ready for it, and waits with it for its partners
    aside: bool = False  # it lets others have what is kept for it
    let_go: bool = False  # it has done so

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by priority, then by arrival."""
        return (-self.priority, self.arrival)

    @property
    def waits(self) -> bool:
        """Whether it is still in the queue."""
        return bool(self.requests) and self in self.partners

    @property
    def complete(self) -> bool:
        """Whether an instance of its pool is all that it still wants."""
        return all(partner is self or partner.kept for partner in self.partners)


@dataclass(slots=True, eq=False)
class Owner:
    """What one owner holds and waits for, over all pools."""

    name: str
    holdings: dict[int, Holding] = field(default_factory=dict)
    waiters: dict[int, Waiter] = field(default_factory=dict)


class Lane:
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

    def restore(self, waiter: Waiter) -> None:
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


class Queue:
    """Who waits in a pool: for an instance of their own, or for a seat on one that is shared."""

    def __init__(self) -> None:
        self.exclusive = Lane()
        self.shared = Lane()

    def __len__(self) -> int:
        return len(self.exclusive) + len(self.shared)

    def __iter__(self) -> Iterator[Waiter]:
        if self.exclusive and self.shared:
            return merge(self.exclusive, self.shared, key=attrgetter("order"))
        return iter(self.exclusive or self.shared)

    def lane(self, scope: Scope) -> Lane:
        """Where those stand who ask with a scope."""
        return self.shared if scope is Scope.GLOBAL else self.exclusive


class Pool:
    """All live instances of one spec. It keeps its own books straight and decides nothing."""

    def __init__(self, spec: ResourceSpec[Any]) -> None:
        self.spec = spec
        self.cost: Cost = cost_of(spec)
        self.costly = self.cost != NOTHING
        self.start_places = spec.start_places
        self.instances: dict[str, Instance] = {}
        self.idle: dict[str, Instance] = {}  # clean; the one used last is the last
        self.replicas: dict[str, Instance] = {}  # given out with global scope
        self.open: dict[str, Instance] = {}  # those of them that have a seat free
        self.counts = dict.fromkeys(InstanceState, 0)
        self.held: dict[tuple[str, Scope], Holding] = {}
        self.waiting: dict[tuple[str, Scope], list[Waiter]] = {}
        self.queue = Queue()
        self.kept: dict[int, Waiter] = {}  # those in the queue for whom an idle instance waits, in order
        self.line_key: tuple[int, int] | None = None  # its place among the pools that want a start
        self.backoff = Backoff()
        self.attended = False  # whether instances are started ahead of those who ask
        self.asked = 0.0  # when somebody last asked for an instance
        self.warm = 0  # how many idle instances to keep ready: the spec's count, until nobody asks any more
        self.lapses = math.inf  # when it is seen whether anybody still asks

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
        if state in BUSY and instance.shared:
            instance.shared = False
            del self.replicas[instance.name]
            self.open.pop(instance.name, None)
        while len(self.kept) > len(self.idle):
            _, last = self.kept.popitem()
            last.kept = False

    def leave(self, instance: Instance) -> None:
        """An instance is gone."""
        self.counts[instance.state] -= 1
        del self.instances[instance.name]

    def turn(self) -> tuple[Waiter, Instance] | None:
        """Whose turn it is, and the instance for it. Notes on the way for whom one is kept until its partners can go.

        One that waits for a seat, where all replicas there may be are full, holds up nobody who needs an instance.
        """
        if not self.queue:
            return None
        for waiter in self.kept.values():
            waiter.kept = False
        self.kept.clear()
        spare = len(self.idle)
        for waiter in self._in_line():
            if waiter.scope is Scope.GLOBAL:
                seat = self._seat(spare)
                return None if seat is None else (waiter, seat)
            if waiter.aside:
                continue
            if not spare:
                return None
            if waiter.complete:
                return waiter, self.last_idle()
            waiter.kept = True
            self.kept[waiter.number] = waiter
            spare -= 1
        return None

    def last_idle(self) -> Instance:
        """The idle instance that was used last; there must be one."""
        return next(reversed(self.idle.values()))

    def lacking(self) -> Waiter | None:
        """Whoever is first among those for whom no instance is ready or coming."""
        return next(islice(self._unready(), self.coming(), None), None)

    def seats_are_taken(self) -> bool:
        """Whether there are all the replicas there may be, and none has a seat free."""
        return not self.open and len(self.replicas) >= self.spec.replicas

    def _unready(self) -> Iterator[Waiter]:
        return (waiter for waiter in self._in_line() if not waiter.kept)

    def _in_line(self) -> Iterable[Waiter]:
        return self.queue.exclusive if self.seats_are_taken() else self.queue

    def _seat(self, spare: int) -> Instance | None:
        """Where the next owner of a shared instance goes, if ``spare`` idle instances may be used for it."""
        emptiest = min(self.open.values(), key=lambda instance: len(instance.holdings), default=None)
        if (emptiest is None or emptiest.holdings) and spare and len(self.replicas) < self.spec.replicas:
            return self.last_idle()
        return emptiest

    def share(self, instance: Instance) -> None:
        """An instance has been given out with global scope."""
        instance.shared = True
        self.replicas[instance.name] = instance
        self.update_seats(instance)

    def update_seats(self, instance: Instance) -> None:
        """Note whether a shared instance has a seat free."""
        spec = self.spec
        full = spec.owners_at_once is not None and len(instance.holdings) >= spec.owners_at_once
        if full or self.worn_out(instance):
            self.open.pop(instance.name, None)
        else:
            self.open[instance.name] = instance

    def worn_out(self, instance: Instance) -> bool:
        """Whether an instance has had as many owners as it may."""
        return self.spec.max_uses is not None and instance.uses >= self.spec.max_uses

    def unused_shared(self) -> Instance | None:
        """A shared instance that nobody holds."""
        return next((instance for instance in self.open.values() if not instance.holdings), None)

    def coming(self) -> int:
        """How many instances will be free without anybody giving one back."""
        return self.counts[InstanceState.STARTING] + self.counts[InstanceState.RESETTING]

    def unmet(self) -> int:
        """How many instances those who wait need beyond those that are ready for them or coming."""
        return len(self.queue.exclusive) - len(self.kept) + self._replicas_wanted() - self.coming()

    def missing(self) -> int:
        """How many instances to start for those who wait, within capacity and what failures have taught."""
        room = self.backoff.room(self.counts[InstanceState.STARTING])
        return int(min(self.unmet(), self.spec.capacity - len(self.instances), room))

    def missing_ahead(self) -> int:
        """How many instances to start though nobody waits for them, within capacity."""
        if not self.attended or self.backoff.paused:
            return 0
        ahead = max(self.warm, int(self._could_spread()))
        wanted = self.unmet() + ahead - (len(self.idle) - len(self.kept))
        room = self.backoff.room(self.counts[InstanceState.STARTING])
        return int(min(wanted, self.spec.capacity - len(self.instances), room))

    def unprovided(self) -> list[Waiter]:
        """All for whom no instance is ready or coming."""
        return list(islice(self._unready(), self.coming(), None))

    def next_served(self) -> list[Waiter]:
        """Those whom one more instance would serve."""
        first = next(self._unready(), None)
        if first is None or first.scope is not Scope.GLOBAL:
            return [first] if first is not None else []
        seats = self.spec.owners_at_once or len(self.queue)
        return list(takewhile(lambda waiter: waiter.scope is Scope.GLOBAL, islice(self._unready(), seats)))

    def _replicas_wanted(self) -> int:
        if not (waiting := len(self.queue.shared)):
            return 0
        seats = self.spec.owners_at_once or waiting
        return min(-(-waiting // seats), self.spec.replicas - len(self.replicas))

    def _could_spread(self) -> bool:
        """Whether one more replica would lighten the load of those whose seats have no limit."""
        spec, replicas = self.spec, self.replicas
        return spec.owners_at_once is None and 0 < len(replicas) < spec.replicas and self.unused_shared() is None

    def is_full(self) -> bool:
        """Whether as many instances are alive as may be."""
        return len(self.instances) >= self.spec.capacity

    def is_empty(self) -> bool:
        """Whether nothing would be lost if the pool were forgotten."""
        return not (self.instances or self.queue or self.held or self.attended or self.backoff.paused)
