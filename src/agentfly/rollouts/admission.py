"""Admission of rollouts: when the next may begin, and the statistics of how many run and what blocks the rest."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from agentfly.resources.resource import Scope
from agentfly.resources.spec import ResourceSpec

MAX_ROLLOUTS = 4096
"""How many rollouts run at a time at most, where nobody says so and memory allows it."""

ROLLOUT_BYTES = 2**20
"""What a rollout is taken to hold: its tokens, with their log-probs, and its messages. 32,000 tokens take 0.8 MB."""

MEMORY_SHARE = 0.5
"""The share of the memory that is free which rollouts may be taken to hold."""


class BlockReason(StrEnum):
    """What keeps the next rollout from beginning."""

    LIMIT = "limit"  # as many run as may
    POLICY = "policy"  # it makes as many generations as it can
    RESOURCES = "resources"  # rollouts wait for them already


@dataclass(frozen=True)
class ConcurrencyStats:
    """How many rollouts ran, over some time.

    Attributes:
        seconds: how long that was.
        rollout_seconds: the seconds of all rollouts together that ran in it.
        generation_seconds: the seconds of all generations together, waiting for the policy included.
        blocked_seconds: by obstacle, how long it kept rollouts from beginning that waited to.
    """

    seconds: float = 0.0
    rollout_seconds: float = 0.0
    generation_seconds: float = 0.0
    blocked_seconds: Mapping[BlockReason, float] = field(default_factory=dict)

    def __sub__(self, before: ConcurrencyStats) -> ConcurrencyStats:
        return ConcurrencyStats(
            self.seconds - before.seconds,
            self.rollout_seconds - before.rollout_seconds,
            self.generation_seconds - before.generation_seconds,
            {one: seconds - before.blocked_seconds.get(one, 0.0) for one, seconds in self.blocked_seconds.items()},
        )

    def blocked_fraction(self, obstacle: BlockReason) -> float:
        """The share of the time in which an obstacle kept rollouts from beginning."""
        return self.blocked_seconds.get(obstacle, 0.0) / self.seconds if self.seconds > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """Means over the time, and the shares of it in which rollouts were held back, by what."""
        if self.seconds <= 0:
            return {}
        return {
            "concurrency/rollouts": self.rollout_seconds / self.seconds,
            "concurrency/generations": self.generation_seconds / self.seconds,
            "concurrency/blocked_by_limit": self.blocked_fraction(BlockReason.LIMIT),
            "concurrency/blocked_by_policy": self.blocked_fraction(BlockReason.POLICY),
            "concurrency/blocked_by_resources": self.blocked_fraction(BlockReason.RESOURCES),
        }


class ConcurrencyMeter:
    """Adds up how many rollouts run, and what holds others back.

    Args:
        clock: tells the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._rollouts = self._generations = 0
        self._obstacle: BlockReason | None = None
        self._rollout_seconds = 0.0
        self._generation_times = 0.0  # those of ends less those of begins
        self._held = dict.fromkeys(BlockReason, 0.0)
        self.peak = 0
        """How many rollouts ran at a time at most."""

    def begin_generation(self) -> None:
        """Count a generation that begins."""
        self._generation_times -= self._clock()
        self._generations += 1

    def end_generation(self) -> None:
        """Count a generation that has ended."""
        self._generation_times += self._clock()
        self._generations -= 1

    def update(self, rollouts: int, obstacle: BlockReason | None) -> None:
        """From now on so many rollouts run, and the next is kept from beginning by this."""
        self._add_up()
        self._rollouts, self._obstacle = rollouts, obstacle
        if rollouts > self.peak:
            self.peak = rollouts

    def read(self) -> ConcurrencyStats:
        """Return the statistics collected so far."""
        self._add_up()
        generation_seconds = self._generation_times + self._generations * self._last
        return ConcurrencyStats(self._last - self._began, self._rollout_seconds, generation_seconds, dict(self._held))

    def _add_up(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        self._rollout_seconds += passed * self._rollouts
        if self._obstacle is not None:
            self._held[self._obstacle] += passed


def limit_by_memory() -> int:
    """Return the default limit on concurrent rollouts: `MAX_ROLLOUTS`, or fewer where memory is short."""
    available = _available_bytes()
    if available is None:
        return MAX_ROLLOUTS
    return max(64, min(MAX_ROLLOUTS, int(available * MEMORY_SHARE) // ROLLOUT_BYTES))


def _available_bytes() -> int | None:
    """Return the memory that this process may still use: the machine's, or its control group's if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            left = int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no such group, or no limit
            continue
        available = min(available, max(left, 0))
    return available


class RolloutSource(Protocol):
    """Where rollouts that want to begin come from, in their order."""

    @property
    def priority(self) -> int:
        """Those of a higher one begin first."""
        ...

    @property
    def waits(self) -> bool:
        """Whether there is one to begin, as far as is known."""
        ...

    def begin_next(self, ticket: AdmissionTicket) -> bool:
        """Begin the next rollout, as ``ticket``, and return at once; False if there is none left."""
        ...


class Admission:
    """Lets rollouts begin: as many as may run at a time, and fewer while the policy is busy or resources are short.

    Those of a source of higher priority come first; of two sources of the same one, those of the source that came
    first. A rollout is nothing but a place in its source until it begins, so that any number of them may wait.

    A rollout that begins while others wait for a resource would only stand in line behind them, and take memory and
    the sampler's time meanwhile. So there is a limit on those who are *ahead*: they wait for a resource, or have begun
    and not had one yet. At first it is ``max_concurrent``. It adapts per resource queue: a rollout that
    joins a queue longer than the pool's capacity lowers it by one, not below the capacity, and a rollout that empties a
    queue raises it by one. Rollouts of lower priority are not counted, because the engine serves them later. Running
    rollouts are never held up.

    A rollout begins with a generation, so where the policy makes as many as it can, a newcomer would only stand in line
    there. So where nobody says how many may run, the next begins once fewer are at the policy than it has places, and
    a quarter more, so that it never runs dry. Then the longer tools take, the more rollouts run.

    Args:
        max_concurrent: how many rollouts run at a time; None for what the policy and memory (`limit_by_memory`) bear.
        generations: how many generations the policy makes at a time; None where that is not known.
        clock: tells the time, in seconds.

    Attributes:
        generations: as given.
        max_concurrent: how many rollouts run at a time at most.
        meter: tells how many ran, and what held others back.
    """

    def __init__(
        self,
        max_concurrent: int | None = None,
        *,
        generations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meter = ConcurrencyMeter(clock)
        self.generations = generations
        self._generations = math.inf if generations is None else generations
        self._policy_places = math.inf if max_concurrent is not None else _with_a_line(self._generations)
        self._at_policy: Counter[int] = Counter()
        self.max_concurrent = max_concurrent = limit_by_memory() if max_concurrent is None else max_concurrent
        self._running = 0
        self._arrivals = count()
        self._places: dict[RolloutSource, int] = {}
        self._waiting: list[tuple[int, int, RolloutSource]] = []
        self._ahead: Counter[int] = Counter()
        self._limit: float = max_concurrent
        self._lines: Counter[tuple[ResourceSpec[Any], Scope]] = Counter()
        self._opening = False

    def enqueue(self, source: RolloutSource) -> None:
        """Let a source begin rollouts. A source that was added before keeps its place."""
        place = self._places.get(source)
        if place is None:
            place = self._places[source] = next(self._arrivals)
        entry = (-source.priority, place, source)
        if entry not in self._waiting:
            heapq.heappush(self._waiting, entry)
        self._open()

    def remove(self, source: RolloutSource) -> None:
        """Remove a source that has no more rollouts."""
        self._places.pop(source, None)
        self._waiting = [entry for entry in self._waiting if entry[2] is not source]
        heapq.heapify(self._waiting)

    def _open(self) -> None:
        """Let in who may come in."""
        if self._opening:  # a source that is just beginning a rollout has more to begin
            return
        self._opening = True
        try:
            while self._waiting:
                source = self._waiting[0][2]
                if not source.waits:
                    heapq.heappop(self._waiting)
                    continue
                if self._obstacle() is not None:
                    return
                ticket = AdmissionTicket(self, source.priority)
                if not source.begin_next(ticket):
                    ticket.release()
                    self._waiting = [entry for entry in self._waiting if entry[2] is not source]
                    heapq.heapify(self._waiting)
        finally:
            self._opening = False
            self._note()

    def _obstacle(self) -> BlockReason | None:
        """What keeps the first who waits from beginning."""
        priority = self._waiting[0][2].priority
        at_policy = _of_at_least(priority, self._at_policy)
        if self._running >= self.max_concurrent:
            return BlockReason.POLICY if at_policy >= self._generations else BlockReason.LIMIT
        if at_policy >= self._policy_places:
            return BlockReason.POLICY
        if _of_at_least(priority, self._ahead) + 1 > self._limit:
            return BlockReason.RESOURCES
        return None

    def _note(self) -> None:
        obstacle = self._obstacle() if self._waiting and self._waiting[0][2].waits else None
        self.meter.update(self._running, obstacle)

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
                self._limit = min(self._limit + 1, self.max_concurrent)
        self._open()


class AdmissionTicket:
    """A rollout that has been let in, until it leaves.

    Attributes:
        generation: a block in which the rollout has the policy make a generation. It may be entered several times.
    """

    def __init__(self, admission: Admission, priority: int) -> None:
        self._admission = admission
        self._priority = priority
        self._waits = 0
        self._is_ahead = False
        self._inside = True
        self._is_new = True  # and will be at the policy in a moment
        self.generation = _GenerationScope(self)
        admission._running += 1
        admission._at_policy[priority] += 1
        self._go_ahead(True)

    def release(self) -> None:
        """End the rollout's admission. A second call does nothing."""
        if self._inside:
            self._inside = False
            if self._is_new:
                self._is_new = False
                self._admission._at_policy[self._priority] -= 1
            self._go_ahead(False)
            self._admission._running -= 1
            self._admission._open()

    @contextmanager
    def waiting_for_resources(self, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> Iterator[None]:
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

    def _begin_generation(self) -> None:
        admission = self._admission
        admission.meter.begin_generation()
        if self._is_new:
            self._is_new = False
        else:
            admission._at_policy[self._priority] += 1
            if admission._waiting:
                admission._note()

    def _end_generation(self) -> None:
        admission = self._admission
        admission.meter.end_generation()
        admission._at_policy[self._priority] -= 1
        if admission._waiting:
            admission._open()

    def _go_ahead(self, ahead: bool) -> None:
        if ahead is not self._is_ahead:
            self._is_ahead = ahead
            self._admission._ahead[self._priority] += 1 if ahead else -1


class _GenerationScope(AbstractContextManager[None]):
    """A block in which a rollout has the policy make a generation."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: AdmissionTicket) -> None:
        self._ticket = ticket

    def __enter__(self) -> None:
        self._ticket._begin_generation()

    def __exit__(self, *_: object) -> None:
        self._ticket._end_generation()


def _of_at_least(priority: int, guests: Mapping[int, int]) -> int:
    return sum(number for theirs, number in guests.items() if theirs >= priority)


def _with_a_line(generations: float) -> float:
    """So many generations, and a quarter more that stand in line for them."""
    return generations if generations == math.inf else generations + math.ceil(generations / 4)


def _places(spec: ResourceSpec[Any], scope: Scope) -> float:
    """Return how many owners can hold a resource of a spec at a time."""
    if scope is not Scope.GLOBAL:
        return spec.capacity
    return math.inf if spec.max_owners is None else spec.replicas * spec.max_owners
