"""The errors with which the scheduler refuses a request. Each says who asked, what stood in the way, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from agentfly.errors import (
    AcquireTimeout,
    AgentFlyError,
    ConfigError,
    EngineClosed,
    ResourceDied,
    ResourceError,
    ResourceStartError,
    message_of,
    say,
)
from agentfly.resources.scheduler.pool import Holding, Instance, InstanceState, Pool, Request, Waiter

SHOWN = 8
"""Holders, and those who wait, that a message names."""


def too_large(request: Request, excess: str) -> ConfigError:
    """The spec can never be met."""
    each = " each" if len(request.specs) > 1 else ""
    return ConfigError(
        f"{request.owner} asked for {request.label}, of which one instance{each} takes more than the engine's whole "
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


def not_started(instance: Instance, cause: BaseException, now: float) -> ResourceStartError:
    """An instance did not start."""
    backoff = instance.pool.backoff
    label = instance.pool.spec.label
    what = instance.name if instance.name.startswith(label) else f"{label} {instance.name}"
    why = message_of(cause) if isinstance(cause, AgentFlyError) else say(cause)  # AgentFly's own say all themselves
    told = isinstance(cause, ResourceStartError) and "did not start" in why.partition(": ")[0]
    again = ""
    if backoff.rounds > 1 and backoff.holds:
        again = f" It was tried {backoff.rounds} times, at growing intervals, in {now - backoff.since:.1f} s."
    error = ResourceStartError((why if told else f"{what} did not start: {why}") + again)
    error.__cause__ = cause
    return error


def timed_out(partners: Sequence[Waiter], holdings: Sequence[list[Holding]], now: float) -> AcquireTimeout:
    """Nothing came free in time, for those who waited together and still lack something."""
    first = partners[0]
    wanted = " and ".join(waiter.pool.spec.label for waiter in partners)
    found = " ".join(_shortage(waiter, held, now) for waiter, held in zip(partners, holdings, strict=True))
    return AcquireTimeout(
        f"{first.owner} waited {now - first.since:.1f} s for {wanted} (scope {first.scope.value}) and got none. "
        f"{found} Raise the capacity or the budget, or wait longer."
    )


def _shortage(waiter: Waiter, holdings: Iterable[Holding], now: float) -> str:
    """Why there was nothing for a waiter: who has it, for how long, and who else waits."""
    pool = waiter.pool
    oldest = sorted(holdings, key=lambda holding: holding.since)
    holders = [
        f"{holding.owner} has {holding.instance.name} since {now - holding.since:.1f} s" for holding in oldest[:SHOWN]
    ]
    queue = [f"{one.owner} since {now - one.since:.1f} s" for one in islice(pool.queue, SHOWN)]
    return (
        f"{pool.spec.label}: of a capacity of {_occupancy(pool, now)}. "
        f"Holders: {_listed(holders, len(oldest))}. "
        f"Queue, first to last, {len(pool.queue)} waiting: {_listed(queue, len(pool.queue))}."
    )


def _listed(shown: list[str], number: int) -> str:
    more = [f"and {number - len(shown)} more"] if number > len(shown) else []
    return ", ".join(shown + more) or "none"


def _occupancy(pool: Pool, now: float) -> str:
    states = ", ".join(f"{pool.counts[state]} {state.value}" for state in InstanceState if pool.counts[state])
    if (error := pool.backoff.error) is not None:
        room = f"; its starts fail, for {now - pool.backoff.since:.1f} s now, with {say(error)}"
    elif len(pool.instances) < pool.spec.capacity:
        room = "; no more can start within the budget just now"
    else:
        room = ""
    return f"{pool.spec.capacity}, {states or 'none alive'}{room}"
