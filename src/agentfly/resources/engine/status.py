"""EngineSnapshot: the instances of an engine, their holders and the queue at one moment, for listings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from agentfly.core.errors import describe_error
from agentfly.resources.engine.instances import LiveInstances
from agentfly.resources.engine.usage import InstanceUsage, Occupancy
from agentfly.resources.scheduler.pool import Instance
from agentfly.resources.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class InstanceSnapshot:
    """The state of an instance.

    Attributes:
        name: its name.
        state: starting, idle, leased, resetting, stopping or stuck.
        owners: its owners.
        state_seconds: time in this state.
        age_seconds: time since its start.
        uses: number of owners so far.
        frozen: whether its processes are stopped, because no call uses it.
        held_seconds: total time with a lease.
        busy_seconds: total time in which a call of an owner ran in it.
    """

    name: str
    state: str
    owners: tuple[str, ...]
    state_seconds: float
    age_seconds: float
    uses: int
    frozen: bool
    held_seconds: float
    busy_seconds: float


@dataclass(frozen=True)
class QueuedRequestSnapshot:
    """An entry of a pool's queue."""

    owner: str
    scope: str
    priority: int
    waited_seconds: float


@dataclass(frozen=True)
class PoolSnapshot:
    """A pool.

    Attributes:
        label: the short name of its spec.
        spec: the whole spec as text.
        capacity: its maximum number of instances.
        instances: its instances.
        queue: its waiting requests, in order.
        failing: the error of its starts, if they fail.
    """

    label: str
    spec: str
    capacity: int
    instances: tuple[InstanceSnapshot, ...]
    queue: tuple[QueuedRequestSnapshot, ...]
    failing: str | None = None


@dataclass(frozen=True)
class EngineSnapshot:
    """Every pool of an engine."""

    pools: tuple[PoolSnapshot, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as a JSON-able mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> EngineSnapshot:
        """Parse the JSON form of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: the text is not a snapshot of this version.
        """
        return cls(tuple(_pool(pool) for pool in json.loads(text)["pools"]))


def take_snapshot(scheduler: Scheduler, live: LiveInstances, now: float) -> EngineSnapshot:
    """Return the current state of a scheduler and its live instances."""
    return EngineSnapshot(
        tuple(
            PoolSnapshot(
                label=pool.spec.label,
                spec=repr(pool.spec),
                capacity=pool.spec.capacity,
                instances=tuple(
                    _instance(instance, live.usage(instance.name), now) for instance in pool.instances.values()
                ),
                queue=tuple(
                    QueuedRequestSnapshot(waiter.owner, waiter.scope.value, waiter.priority, now - waiter.since)
                    for waiter in pool.queue
                ),
                failing=None if pool.backoff.error is None else describe_error(pool.backoff.error),
            )
            for pool in scheduler.pools
        )
    )


def _instance(instance: Instance, usage: InstanceUsage | None, now: float) -> InstanceSnapshot:
    occupancy = Occupancy() if usage is None else usage.occupancy
    return InstanceSnapshot(
        name=instance.name,
        state=instance.state.value,
        owners=tuple(holding.owner for holding in instance.holdings.values()),
        state_seconds=now - instance.since,
        age_seconds=now - instance.started,
        uses=instance.uses,
        frozen=usage is not None and usage.frozen,
        held_seconds=occupancy.held_seconds,
        busy_seconds=occupancy.busy_seconds,
    )


def _pool(fields: dict[str, Any]) -> PoolSnapshot:
    instances = tuple(
        InstanceSnapshot(**instance | {"owners": tuple(instance["owners"])}) for instance in fields["instances"]
    )
    return PoolSnapshot(
        **fields | {"instances": instances, "queue": tuple(QueuedRequestSnapshot(**w) for w in fields["queue"])}
    )
