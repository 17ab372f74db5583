"""Decisions of the scheduler, to be carried out in order, and the errors of rejected requests.

Each error says who requested what, why it failed, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentfly.core.errors import (
    AcquireTimeout,
    AgentFlyError,
    ConfigError,
    EngineClosed,
    ResourceDied,
    ResourceError,
    ResourceStartError,
    describe_error,
    error_message,
)
from agentfly.resources.scheduler.pool import AcquireRequest, Hold, Instance, InstancePool, InstanceState, Waiter
from agentfly.resources.spec import ResourceSpec


@dataclass(frozen=True, slots=True)
class StartInstance:
    """Start a new instance; report `started` or `start_failed`."""

    instance: str
    spec: ResourceSpec[Any]


@dataclass(frozen=True, slots=True)
class GrantRequest:
    """Answer a request with a hold. If no one waits for it any more, report `declined`.

    When the first request of a hold is answered, report `delivered`. If the instance is then found dead, report `died`:
    the hold is void, with all its grants that are not yet carried out.
    """

    request: int
    holding: Hold


@dataclass(frozen=True, slots=True)
class RejectRequest:
    """Answer a request with an error."""

    request: int
    error: AgentFlyError


@dataclass(frozen=True, slots=True)
class EndHold:
    """A hold has ended; revoke its leases."""

    holding: Hold


@dataclass(frozen=True, slots=True)
class ResetInstance:
    """Reset an instance and check its health; report `reset_done` or `reset_failed`."""

    instance: str
    spec: ResourceSpec[Any]


@dataclass(frozen=True, slots=True)
class CheckInstance:
    """Check the health of an instance, which may be in use; report `died` if it is broken."""

    instance: str
    spec: ResourceSpec[Any]


@dataclass(frozen=True, slots=True)
class StopInstance:
    """Cancel operations on an instance and remove it; report `stopped` once it is gone, or `stuck`."""

    instance: str
    spec: ResourceSpec[Any]


@dataclass(frozen=True, slots=True)
class BackOffStarts:
    """Starts of a spec fail and pause for some seconds, while requests keep waiting. Report it.

    Args:
        spec: the spec.
        error: the latest failure.
        seconds: time until the next try.
        rounds: rounds of failures since the last success.
        full_disk: whether a disk is full.
    """

    spec: ResourceSpec[Any]
    error: BaseException
    seconds: float
    rounds: int
    full_disk: bool


Decision = (
    StartInstance
    | GrantRequest
    | RejectRequest
    | EndHold
    | ResetInstance
    | CheckInstance
    | StopInstance
    | BackOffStarts
)


MAX_LISTED = 8
"""Maximum number of holders and waiters that a message names."""


def exceeds_budget(request: AcquireRequest, excess: str) -> ConfigError:
    """Return the error for a request that exceeds the whole budget."""
    each = " each" if len(request.specs) > 1 else ""
    return ConfigError(
        f"{request.owner} requested {request.label}, but one instance{each} exceeds the engine's whole budget: "
        f"{excess}. Lower it in the spec, or give the engine a larger Budget."
    )


def engine_closed(owner: str, label: str) -> EngineClosed:
    """Return the error for a request to a closed engine."""
    return EngineClosed(
        f"{owner} requested {label}, but the resource engine is closed. Acquire inside its `async with` block."
    )


def owner_ended(owner: str, label: str) -> ResourceError:
    """Return the error for a waiting request whose owner was released."""
    return ResourceError(
        f"{owner} waited for {label} when all resources of {owner} were released. "
        "Acquire before the rollout ends, or under another owner."
    )


def instance_died(holding: Hold) -> ResourceDied:
    """Return the error for an owner whose instance died."""
    death = holding.death_error
    assert death is not None  # only called for dead instances
    error = ResourceDied(
        f"{holding.instance.name}, held by {holding.owner}, is gone with everything in it: {describe_error(death)}. "
        f"The work of {holding.owner} in it is lost, so it cannot continue. A rollout fails as infrastructure, is not "
        "scored, and can be retried."
    )
    error.__cause__ = death
    return error


def start_failed_error(instance: Instance, cause: BaseException, now: float) -> ResourceStartError:
    """Return the error for a request whose instance failed to start."""
    backoff = instance.pool.backoff
    label = instance.pool.spec.label
    what = instance.name if instance.name.startswith(label) else f"{label} {instance.name}"
    why = (
        error_message(cause) if isinstance(cause, AgentFlyError) else describe_error(cause)
    )  # AgentFly's own messages are complete
    complete = isinstance(cause, ResourceStartError) and "did not start" in why.partition(": ")[0]
    again = ""
    if backoff.rounds > 1 and backoff.blocks_waiters:
        again = f" It was tried {backoff.rounds} times, at growing intervals, within {now - backoff.since:.1f} s."
    error = ResourceStartError((why if complete else f"{what} did not start: {why}") + again)
    error.__cause__ = cause
    return error


def acquire_timed_out(partners: Sequence[Waiter], holdings: Sequence[list[Hold]], now: float) -> AcquireTimeout:
    """Return the error for a request that timed out, for its waiters that are still unserved."""
    first = partners[0]
    wanted = " and ".join(waiter.pool.spec.label for waiter in partners)
    found = " ".join(_shortage(waiter, held, now) for waiter, held in zip(partners, holdings, strict=True))
    return AcquireTimeout(
        f"{first.owner} waited {now - first.since:.1f} s for {wanted} (scope {first.scope.value}) and got none. "
        f"{found} Raise the capacity or the budget, or wait longer."
    )


def _shortage(waiter: Waiter, holdings: Iterable[Hold], now: float) -> str:
    """Describe the holders of a pool's instances, with times, and the other waiters."""
    pool = waiter.pool
    oldest = sorted(holdings, key=lambda holding: holding.since)
    holders = [
        f"{holding.owner} has had {holding.instance.name} for {now - holding.since:.1f} s"
        for holding in oldest[:MAX_LISTED]
    ]
    queue = [f"{one.owner} for {now - one.since:.1f} s" for one in islice(pool.queue, MAX_LISTED)]
    return (
        f"{pool.spec.label}: capacity {_occupancy(pool, now)}. "
        f"Holders: {_listed(holders, len(oldest))}. "
        f"Queue, first to last, {len(pool.queue)} waiting: {_listed(queue, len(pool.queue))}."
    )


def _listed(shown: list[str], number: int) -> str:
    more = [f"and {number - len(shown)} more"] if number > len(shown) else []
    return ", ".join(shown + more) or "none"


def _occupancy(pool: InstancePool, now: float) -> str:
    states = ", ".join(f"{pool.counts[state]} {state.value}" for state in InstanceState if pool.counts[state])
    if (error := pool.backoff.error) is not None:
        room = f"; its starts have failed for {now - pool.backoff.since:.1f} s with {describe_error(error)}"
    elif len(pool.instances) < pool.spec.capacity:
        room = "; the budget allows no more starts at present"
    else:
        room = ""
    return f"{pool.spec.capacity}, {states or 'none alive'}{room}"
