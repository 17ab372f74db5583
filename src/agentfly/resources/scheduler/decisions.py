"""What the scheduler decides. Whoever drives it carries these out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentfly.errors import AgentFlyError
from agentfly.resources.scheduler.pool import Holding
from agentfly.resources.spec import ResourceSpec


@dataclass(frozen=True, slots=True)
class Start:
    """Start a new instance; report `started` or `start_failed`."""

    instance: str
    spec: ResourceSpec[Any]


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer a request with a holding. If nobody is there to take it any more, report `declined`.

    When the first of its requests gets a holding, report `handed_out`. Should the instance be seen to be dead then,
    report `died`: the holding is void, and so are all of its grants that are yet to be carried out.
    """

    request: int
    holding: Holding


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer a request with an error."""

    request: int
    error: AgentFlyError


@dataclass(frozen=True, slots=True)
class End:
    """A holding is over; what was given out for it is void."""

    holding: Holding


@dataclass(frozen=True, slots=True)
class Reset:
    """Bring an instance back to a clean and healthy state; report `reset_done` or `reset_failed`."""

    instance: str
    spec: ResourceSpec[Any]


@dataclass(frozen=True, slots=True)
class Check:
    """Ask an instance, which may be in use, for its health; report `died` if it is broken."""

    instance: str
    spec: ResourceSpec[Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """End whatever is under way with an instance and remove it; report `stopped` once it is gone, or `stuck`."""

    instance: str
    spec: ResourceSpec[Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Starts of a spec fail, so that none is tried for some seconds while those who wait go on waiting. Tell of it.

    Args:
        spec: the spec.
        error: what the latest failed with.
        seconds: until the next is tried.
        rounds: how often that was so, since a start succeeded.
        full_disk: whether a disk is full.
    """

    spec: ResourceSpec[Any]
    error: BaseException
    seconds: float
    rounds: int
    full_disk: bool


Decision = Start | Grant | Fail | End | Reset | Check | Stop | Pause
