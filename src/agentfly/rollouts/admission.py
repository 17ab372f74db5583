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
"""Default limit on concurrent rollouts, if memory allows it."""

ROLLOUT_BYTES = 2**20
"""Estimated memory of a rollout: its tokens with log-probs, and its messages. 32,000 tokens take 0.8 MB."""

MEMORY_SHARE = 0.5
"""Share of the free memory that rollouts may take, by the estimate `ROLLOUT_BYTES`."""


class BlockReason(StrEnum):
    """Why the next rollout may not begin yet."""

    LIMIT = "limit"  # the maximum number of rollouts is running
    POLICY = "policy"  # the policy makes as many generations as it can
    RESOURCES = "resources"  # other rollouts already wait for resources


@dataclass(frozen=True)
class ConcurrencyStats:
    """How many rollouts ran over a period.

    Attributes:
        seconds: length of the period.
        rollout_seconds: sum of the seconds for which each rollout ran in it.
        generation_seconds: sum of the seconds of all generations, waiting for the policy included.
        blocked_seconds: seconds for which waiting rollouts could not begin, by reason.
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

    def blocked_fraction(self, reason: BlockReason) -> float:
        """Return the share of the time in which ``reason`` kept waiting rollouts from beginning."""
        return self.blocked_seconds.get(reason, 0.0) / self.seconds if self.seconds > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """Return mean numbers of rollouts and generations, and the share of the time blocked for each reason."""
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
    """Measures how many rollouts run, and why others may not begin.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._rollouts = self._generations = 0
        self._reason: BlockReason | None = None
        self._rollout_seconds = 0.0
        self._generation_times = 0.0  # sum of end times minus sum of start times
        self._blocked = dict.fromkeys(BlockReason, 0.0)
        self.peak = 0
        """Largest number of rollouts that ran at the same time."""

    def begin_generation(self) -> None:
        """Count a generation that begins."""
        self._generation_times -= self._clock()
        self._generations += 1

    def end_generation(self) -> None:
        """Count a generation that has ended."""
        self._generation_times += self._clock()
        self._generations -= 1

    def update(self, rollouts: int, reason: BlockReason | None) -> None:
        """Set the number of running rollouts, and why the next one may not begin, from now on."""
        self._add_up()
        self._rollouts, self._reason = rollouts, reason
        if rollouts > self.peak:
            self.peak = rollouts

    def read(self) -> ConcurrencyStats:
        """Return the statistics collected so far."""
        self._add_up()
        generation_seconds = self._generation_times + self._generations * self._last
        return ConcurrencyStats(
            self._last - self._began, self._rollout_seconds, generation_seconds, dict(self._blocked)
        )

    def _add_up(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        self._rollout_seconds += passed * self._rollouts
        if self._reason is not None:
            self._blocked[self._reason] += passed


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
    """An ordered source of rollouts that wait to begin, such as a batch."""

    @property
    def priority(self) -> int:
        """Rollouts of a higher priority begin first."""
        ...

    @property
    def waits(self) -> bool:
        """Whether a rollout waits to begin, as far as is known."""
        ...

    def begin_next(self, ticket: AdmissionTicket) -> bool:
        """Begin the next rollout with ``ticket`` and return at once. Return False if there is none left."""
        ...


class Admission:
    """Decides when rollouts begin, by the limit on running rollouts, the load of the policy and waits for resources.

    Sources of higher priority come first; among sources of equal priority, the one that was added first. A rollout
    costs nothing before it begins, so any number may wait.

    A rollout that begins while others wait for a resource would only join their queue, and use memory and the sampler
    meanwhile. So there is a limit on the rollouts *ahead*: those that wait for a resource, or have begun and not
    acquired one yet. It starts at ``max_concurrent`` and adapts per resource queue. A rollout that joins a queue as
    long as the pool's capacity, or longer, lowers the limit by one, but not below the capacity. A rollout that empties
    a queue raises it by one. Rollouts of lower priority are not counted, because the engine serves them later. Running
    rollouts are never delayed.

    A rollout begins with a generation, so it would only queue at a policy that is fully loaded. Unless
    ``max_concurrent`` is given, the next rollout therefore begins once fewer rollouts are at the policy than 1.25 times
    the generations that it makes at a time. The extra quarter keeps the policy busy. So the longer tools take, the more
    rollouts run.

    Args:
        max_concurrent: maximum number of running rollouts; if None, the policy and memory (`limit_by_memory`) decide.
        generations: how many generations the policy makes at a time; None if this is not known.
        clock: returns the time in seconds.

    Attributes:
        generations: as given.
        max_concurrent: maximum number of running rollouts.
        meter: measures how many rollouts ran, and what blocked others.
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
        self._max_at_policy = math.inf if max_concurrent is not None else _with_queue(self._generations)
        self._at_policy: Counter[int] = Counter()
        self.max_concurrent = max_concurrent = limit_by_memory() if max_concurrent is None else max_concurrent
        self._running = 0
        self._arrivals = count()
        self._positions: dict[RolloutSource, int] = {}
        self._waiting: list[tuple[int, int, RolloutSource]] = []
        self._ahead: Counter[int] = Counter()
        self._limit: float = max_concurrent
        self._queues: Counter[tuple[ResourceSpec[Any], Scope]] = Counter()
        self._opening = False

    def enqueue(self, source: RolloutSource) -> None:
        """Let a source begin rollouts. A source that was added before keeps its position."""
        position = self._positions.get(source)
        if position is None:
            position = self._positions[source] = next(self._arrivals)
        entry = (-source.priority, position, source)
        if entry not in self._waiting:
            heapq.heappush(self._waiting, entry)
        self._admit()

    def remove(self, source: RolloutSource) -> None:
        """Remove a source that has no more rollouts."""
        self._positions.pop(source, None)
        self._waiting = [entry for entry in self._waiting if entry[2] is not source]
        heapq.heapify(self._waiting)

    # --- called by tickets --------------------------------------------------------------------------------------------

    def enter(self, priority: int) -> None:
        """Count a rollout that begins. It is about to use the policy, so it counts there, too."""
        self._running += 1
        self._at_policy[priority] += 1

    def leave(self, priority: int, *, at_policy: bool) -> None:
        """Count a rollout that has ended, and admit others. ``at_policy``: it began and never generated."""
        if at_policy:
            self._at_policy[priority] -= 1
        self._running -= 1
        self._admit()

    def count_ahead(self, priority: int, change: int) -> None:
        """Change the number of rollouts that wait for a resource, or have begun and not acquired one yet."""
        self._ahead[priority] += change

    def begin_generation(self, priority: int, *, counted: bool) -> None:
        """Count a generation that begins; ``counted`` if the rollout already counts as being at the policy."""
        self.meter.begin_generation()
        if not counted:
            self._at_policy[priority] += 1
            if self._waiting:
                self._update_meter()

    def end_generation(self, priority: int) -> None:
        """Count a generation that has ended, and admit others."""
        self.meter.end_generation()
        self._at_policy[priority] -= 1
        if self._waiting:
            self._admit()

    def join_queues(self, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> None:
        """Count a rollout that begins to wait for resources, and adapt the limit."""
        for spec in specs:
            owners = _max_owners(spec, scope)
            if self._queues[spec, scope] >= owners:
                self._limit = max(min(self._limit, owners), self._limit - 1)
            self._queues[spec, scope] += 1

    def leave_queues(self, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> None:
        """Count a rollout that no longer waits for resources, adapt the limit, and admit others."""
        for spec in specs:
            self._queues[spec, scope] -= 1
            if not self._queues[spec, scope]:
                del self._queues[spec, scope]
                self._limit = min(self._limit + 1, self.max_concurrent)
        self._admit()

    # --- which rollout begins next ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Begin all rollouts that may begin now."""
        if self._opening:  # called from a source that is beginning a rollout: the loop below continues
            return
        self._opening = True
        try:
            while self._waiting:
                source = self._waiting[0][2]
                if not source.waits:
                    heapq.heappop(self._waiting)
                    continue
                if self._block_reason() is not None:
                    return
                ticket = AdmissionTicket(self, source.priority)
                if not source.begin_next(ticket):
                    ticket.release()
                    self._waiting = [entry for entry in self._waiting if entry[2] is not source]
                    heapq.heapify(self._waiting)
        finally:
            self._opening = False
            self._update_meter()

    def _block_reason(self) -> BlockReason | None:
        """Return why the first waiting rollout may not begin."""
        priority = self._waiting[0][2].priority
        at_policy = _of_at_least(priority, self._at_policy)
        if self._running >= self.max_concurrent:
            return BlockReason.POLICY if at_policy >= self._generations else BlockReason.LIMIT
        if at_policy >= self._max_at_policy:
            return BlockReason.POLICY
        if _of_at_least(priority, self._ahead) + 1 > self._limit:
            return BlockReason.RESOURCES
        return None

    def _update_meter(self) -> None:
        reason = self._block_reason() if self._waiting and self._waiting[0][2].waits else None
        self.meter.update(self._running, reason)


class AdmissionTicket:
    """The admission of one rollout, from its start to its end.

    Attributes:
        generation: a context manager, entered while the policy generates for the rollout. It can be entered again
            before it is left.
    """

    def __init__(self, admission: Admission, priority: int) -> None:
        self._admission = admission
        self._priority = priority
        self._waits = 0
        self._is_ahead = False
        self._admitted = True
        self._is_new = True  # it has not generated yet
        self.generation: AbstractContextManager[None] = _GenerationScope(self._begin_generation, self._end_generation)
        admission.enter(priority)
        self._set_ahead(True)

    def release(self) -> None:
        """End the rollout's admission. A second call does nothing."""
        if self._admitted:
            self._admitted = False
            was_new, self._is_new = self._is_new, False
            self._set_ahead(False)
            self._admission.leave(self._priority, at_policy=was_new)

    @contextmanager
    def waiting_for_resources(self, specs: tuple[ResourceSpec[Any], ...], scope: Scope) -> Iterator[None]:
        """Mark the rollout as waiting for resources inside the block, even if it gets them at once."""
        self._waits += 1
        self._set_ahead(True)
        self._admission.join_queues(specs, scope)
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._set_ahead(False)
            self._admission.leave_queues(specs, scope)

    def _begin_generation(self) -> None:
        was_new, self._is_new = self._is_new, False
        self._admission.begin_generation(self._priority, counted=was_new)

    def _end_generation(self) -> None:
        self._admission.end_generation(self._priority)

    def _set_ahead(self, ahead: bool) -> None:
        if ahead is not self._is_ahead:
            self._is_ahead = ahead
            self._admission.count_ahead(self._priority, 1 if ahead else -1)


class _GenerationScope(AbstractContextManager[None]):
    """Calls two functions at the beginning and the end of a generation."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *_: object) -> None:
        self._end()


def _of_at_least(priority: int, counts: Mapping[int, int]) -> int:
    return sum(number for other, number in counts.items() if other >= priority)


def _with_queue(generations: float) -> float:
    """Return the number of generations and a quarter more, which queue for them."""
    return generations if generations == math.inf else generations + math.ceil(generations / 4)


def _max_owners(spec: ResourceSpec[Any], scope: Scope) -> float:
    """Return how many owners can hold a resource of a spec at a time."""
    if scope is not Scope.GLOBAL:
        return spec.capacity
    return math.inf if spec.max_owners is None else spec.replicas * spec.max_owners
