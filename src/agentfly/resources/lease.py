"""Lease: the right of an owner to use a resource for a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentfly.resources.resource import Resource
from agentfly.resources.scope import Scope
from agentfly.resources.spec import ResourceSpec

R = TypeVar("R", bound=Resource)


@dataclass(frozen=True, slots=True)
class Lease(Generic[R]):
    """What `ResourceEngine.acquire` returns.

    An owner that asks again for the same spec and scope gets this same lease (except with scope ``call``, where
    each request gets a lease of its own), and the first release ends it for all who have it.

    Attributes:
        resource: stands for the live resource until the lease ends. Using it after that raises `LeaseOver`.
        owner: who has it.
        spec: what was asked for.
        scope: how long it lasts.
        instance: the instance's name.
        id: the lease's number in its engine.
    """

    resource: R = field(compare=False)
    owner: str
    spec: ResourceSpec[R]
    scope: Scope
    instance: str
    id: int = field(repr=False)
