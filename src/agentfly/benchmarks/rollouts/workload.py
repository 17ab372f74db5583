"""A seeded batch of rollouts whose calls have known latencies, and the optimal wall time for it."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol


class Latency(Protocol):
    """A distribution of seconds."""

    def draw(self, generator: random.Random) -> float:
        """Seconds of one call."""
        ...


@dataclass(frozen=True)
class Uniform:
    """A uniform distribution from ``low`` to ``high`` seconds."""

    low: float
    high: float

    def draw(self, generator: random.Random) -> float:
        """Seconds of one call."""
        return generator.uniform(self.low, self.high)


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution around ``median`` seconds, with a few much longer calls, limited to ``cap``.

    Args:
        median: half of the calls are shorter, in seconds.
        cap: the longest, in seconds.
        spread: standard deviation of the logarithm. 1 puts one call in a hundred above ten times the median.
    """

    median: float
    cap: float
    spread: float = 1.0

    def draw(self, generator: random.Random) -> float:
        """Seconds of one call."""
        return min(generator.lognormvariate(math.log(self.median), self.spread), self.cap)


@dataclass(frozen=True)
class RolloutPlan:
    """One rollout of a workload.

    Attributes:
        generations: seconds of each generation; each but the last is followed by a tool call.
        tools: seconds of each tool call.
        sync: whether each of them is a sync function, which runs on a thread.
        reward: seconds of the reward.
    """

    generations: tuple[float, ...]
    tools: tuple[float, ...]
    sync: tuple[bool, ...]
    reward: float

    @property
    def seconds(self) -> float:
        """The optimal duration of the rollout."""
        return sum(self.generations) + sum(self.tools) + self.reward


@dataclass(frozen=True)
class SandboxPool:
    """Sandboxes that the rollouts share: each holds one from its first tool call to its end.

    Attributes:
        capacity: maximum number of sandboxes.
        start_seconds: duration of a start. A used sandbox serves the next rollout immediately.
    """

    capacity: int
    start_seconds: float


@dataclass(frozen=True)
class Workload:
    """A seeded batch of rollouts.

    Attributes:
        name: the workload's letter.
        rollouts: number of concurrent rollouts.
        turns: the fewest and the most generations of a rollout.
        model, tools, rewards: how long a call takes.
        target: the efficiency that is aimed at.
        sync_share: share of the tool calls that go to a sync function.
        pool: the sandboxes that tools need; None where they need none.
    """

    name: str
    rollouts: int
    turns: tuple[int, int]
    model: Latency
    tools: Latency
    rewards: Latency
    target: float
    sync_share: float = 0.0
    pool: SandboxPool | None = None
    seed: int = 0

    def plans(self) -> list[RolloutPlan]:
        """The rollouts, always the same."""
        generator = random.Random(self.seed)
        return [self._plan(generator) for _ in range(self.rollouts)]

    def _plan(self, generator: random.Random) -> RolloutPlan:
        turns = generator.randint(*self.turns)
        return RolloutPlan(
            generations=tuple(self.model.draw(generator) for _ in range(turns)),
            tools=tuple(self.tools.draw(generator) for _ in range(turns - 1)),
            sync=tuple(generator.random() < self.sync_share for _ in range(turns - 1)),
            reward=self.rewards.draw(generator),
        )

    def best_seconds(self, plans: Sequence[RolloutPlan]) -> float:
        """The optimal time for the whole batch.

        Without a pool, it is the duration of the longest rollout. With a pool, it is the end of the schedule that
        serves requests in order, as early as possible and without any overhead.
        """
        if self.pool is None:
            return max(plan.seconds for plan in plans)
        return _served_in_order(plans, self.pool)


def _served_in_order(plans: Sequence[RolloutPlan], pool: SandboxPool) -> float:
    """Return the end of the last rollout if sandboxes start on request and are reused in order of release."""
    asking = sorted((plan.generations[0], plan.seconds - plan.generations[0]) for plan in plans if plan.tools)
    ends = [plan.seconds for plan in plans if not plan.tools]
    back: list[float] = []  # when each sandbox comes back, the earliest first
    started = 0
    for asked, held in asking:
        if back and back[0] <= asked:
            begins = max(asked, heapq.heappop(back))
        elif started < pool.capacity:
            started += 1
            begins = asked + pool.start_seconds
        else:
            begins = heapq.heappop(back)
        heapq.heappush(back, begins + held)
        ends.append(begins + held)
    return max(ends)


_A = Workload("A", 64, (1, 9), Uniform(0.1, 0.1), Uniform(0.005, 0.05), Uniform(0.005, 0.02), target=0.97)
_E = Workload("E", 1024, (1, 9), Uniform(1, 2), LogNormal(0.3, cap=20), Uniform(0.05, 0.2), target=0.95)

WORKLOADS = (
    _A,
    replace(_A, name="B", rollouts=256),
    replace(_A, name="C", model=Uniform(0.1, 0.2), tools=LogNormal(0.03, cap=5), target=0.98),
    replace(_A, name="D", rollouts=128, turns=(1, 3), tools=Uniform(0.5, 1.5), target=0.98),
    _E,
    replace(_E, name="F", pool=SandboxPool(128, 0.5), sync_share=0.5),
)
"""The workloads of ``agentfly bench rollouts``."""
