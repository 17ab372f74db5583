"""Concurrency: how many rollouts run at a time, and what holds back those that wait to begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

MOST_ROLLOUTS = 4096
"""How many rollouts run at a time at most, where nobody says so and memory allows it."""

ROLLOUT_BYTES = 2**20
"""What a rollout is taken to hold: its tokens, with their log-probs, and its messages. 32,000 tokens take 0.8 MB."""

MEMORY_SHARE = 0.5
"""The share of the memory that is free which rollouts may be taken to hold."""


class Obstacle(StrEnum):
    """What keeps the next rollout from beginning."""

    LIMIT = "limit"  # as many run as may
    POLICY = "policy"  # it makes as many generations as it can
    RESOURCES = "resources"  # rollouts wait for them already


@dataclass(frozen=True)
class Concurrency:
    """How many rollouts ran, over some time.

    Attributes:
        seconds: how long that was.
        rollout_seconds: the seconds of all rollouts together that ran in it.
        generation_seconds: the seconds of all generations together, waiting for the policy included.
        held_seconds: by obstacle, how long it kept rollouts from beginning that waited to.
    """

    seconds: float = 0.0
    rollout_seconds: float = 0.0
    generation_seconds: float = 0.0
    held_seconds: Mapping[Obstacle, float] = field(default_factory=dict)

    def __sub__(self, before: Concurrency) -> Concurrency:
        return Concurrency(
            self.seconds - before.seconds,
            self.rollout_seconds - before.rollout_seconds,
            self.generation_seconds - before.generation_seconds,
            {one: seconds - before.held_seconds.get(one, 0.0) for one, seconds in self.held_seconds.items()},
        )

    def held_share(self, obstacle: Obstacle) -> float:
        """The share of the time in which an obstacle kept rollouts from beginning."""
        return self.held_seconds.get(obstacle, 0.0) / self.seconds if self.seconds > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """Means over the time, and the shares of it in which rollouts were held back, by what."""
        if self.seconds <= 0:
            return {}
        return {
            "concurrency/rollouts": self.rollout_seconds / self.seconds,
            "concurrency/generations": self.generation_seconds / self.seconds,
            "concurrency/held_by_limit": self.held_share(Obstacle.LIMIT),
            "concurrency/held_by_policy": self.held_share(Obstacle.POLICY),
            "concurrency/held_by_resources": self.held_share(Obstacle.RESOURCES),
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
        self._obstacle: Obstacle | None = None
        self._rollout_seconds = 0.0
        self._generation_times = 0.0  # those of ends less those of begins
        self._held = dict.fromkeys(Obstacle, 0.0)
        self.most = 0
        """How many rollouts ran at a time at most."""

    def begin_generation(self) -> None:
        """A generation begins."""
        self._generation_times -= self._clock()
        self._generations += 1

    def end_generation(self) -> None:
        """A generation has ended."""
        self._generation_times += self._clock()
        self._generations -= 1

    def note(self, rollouts: int, obstacle: Obstacle | None) -> None:
        """From now on so many rollouts run, and the next is kept from beginning by this."""
        self._add_up()
        self._rollouts, self._obstacle = rollouts, obstacle
        if rollouts > self.most:
            self.most = rollouts

    def read(self) -> Concurrency:
        """What came together so far."""
        self._add_up()
        generation_seconds = self._generation_times + self._generations * self._last
        return Concurrency(self._last - self._began, self._rollout_seconds, generation_seconds, dict(self._held))

    def _add_up(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        self._rollout_seconds += passed * self._rollouts
        if self._obstacle is not None:
            self._held[self._obstacle] += passed


def limit_by_memory() -> int:
    """How many rollouts may run at a time where nobody says so: `MOST_ROLLOUTS`, or fewer where memory is short."""
    available = _available_bytes()
    if available is None:
        return MOST_ROLLOUTS
    return max(64, min(MOST_ROLLOUTS, int(available * MEMORY_SHARE) // ROLLOUT_BYTES))


def _available_bytes() -> int | None:
    """The memory that this process may still take: the machine's, or its control group's if that is less."""
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
