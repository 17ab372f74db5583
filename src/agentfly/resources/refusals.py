"""The errors with which the scheduler refuses a request. Each says who asked, what stood in the way, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from agentfly.errors import (
    AcquireTimeout,
    ConfigError,
    EngineClosed,
    ResourceDied,
    ResourceError,
    ResourceStartError,
)
from agentfly.resources.pool import Holding, Instance, InstanceState, Pool, Request, Waiter

SHOWN = 8
"""Holders that a message names."""


def too_large(request: Request, excess: str) -> ConfigError:
    """The spec can never be met."""
    return ConfigError(
        f"{request.owner} asked for {request.spec.label}, of which one instance takes more than the engine's whole "
        f"budget: {excess}. Lower it in the spec, or give the engine a larger Budget."
    )


def closed(owner: str, label: str) -> EngineClosed:
    """The engine was closed."""
    return EngineClosed(
        f"{owner} asked for {label}, but the resource engine is closed. Acquire inside its `async with` block."
    )


def owner_ended(owner: str, label: str) -> ResourceError:
    """Everything of the owner was released while it waited."""
    return ResourceError(
        f"{owner} was waiting for {label} when everything of {owner} was released, so it gets none. "
        "Acquire before the rollout ends, or under another owner."
    )


def died(holding: Holding) -> ResourceDied:
    """The owner's instance is gone, with what the owner had in it."""
    death = holding.death
    assert death is not None  # only asked about those
    error = ResourceDied(
        f"{holding.instance.name}, held by {holding.owner}, is gone with everything in it: {say(death)}. What "
        f"{holding.owner} did in it is lost, so that it cannot go on. A rollout is failed as infrastructure, is not "
        "scored, and can be retried."
    )
    error.__cause__ = death
    return error


def not_started(instance: Instance, cause: BaseException) -> ResourceStartError:
    """An instance did not start."""
    error = ResourceStartError(f"{instance.pool.spec.label} {instance.name} did not start: {say(cause)}")
    error.__cause__ = cause
    return error


def timed_out(waiter: Waiter, now: float, holdings: Iterable[Holding]) -> AcquireTimeout:
    """Nothing came free in time."""
    pool = waiter.pool
    oldest = sorted(holdings, key=lambda holding: holding.since)
    holders = [
        f"{holding.owner} has {holding.instance.name} since {now - holding.since:.1f} s" for holding in oldest[:SHOWN]
    ]
    if len(oldest) > SHOWN:
        holders.append(f"and {len(oldest) - SHOWN} more")
    return AcquireTimeout(
        f"{waiter.owner} waited {now - waiter.since:.1f} s for {pool.spec.label} (scope {waiter.scope.value}) and got "
        f"none. {_occupancy(pool)} Holders: {', '.join(holders) or 'none'}. Queue: {len(pool.queue)} waiting. "
        "Raise the capacity or the budget, or wait longer."
    )


def _occupancy(pool: Pool) -> str:
    states = ", ".join(f"{pool.counts[state]} {state.value}" for state in InstanceState if pool.counts[state])
    room = "" if len(pool.instances) >= pool.spec.capacity else "; no more can start within the budget just now"
    return f"Of a capacity of {pool.spec.capacity}: {states or 'none alive'}{room}."


def say(error: BaseException) -> str:
    """An error for people."""
    return f"{type(error).__name__}: {error}"
