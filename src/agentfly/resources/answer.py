"""Answer: what a request for resources comes to."""

from __future__ import annotations

import asyncio
from typing import Any

from agentfly.errors import AgentFlyError
from agentfly.resources.lease import Lease
from agentfly.resources.spec import ResourceSpec


class Answer:
    """A lease for each spec that a request was for, or an error.

    Args:
        specs: what was asked for; no two are equal.
        loop: where it is waited for.

    Attributes:
        taken: the leases so far.
    """

    def __init__(self, specs: tuple[ResourceSpec[Any], ...], loop: asyncio.AbstractEventLoop) -> None:
        self._specs = specs
        self.taken: list[Lease[Any]] = []
        self._complete: asyncio.Future[None] = loop.create_future()

    async def leases(self) -> tuple[Lease[Any], ...]:
        """The leases, in the order of the specs, as soon as all are there.

        Raises:
            AgentFlyError: the error that the request was refused with.
        """
        await self._complete
        if len(self._specs) == 1:
            return (self.taken[0],)
        by_spec = {lease.spec: lease for lease in self.taken}
        return tuple(by_spec[spec] for spec in self._specs)

    @property
    def is_settled(self) -> bool:
        """Whether everything is there, or an error, or nobody waits any more."""
        return self._complete.done()

    def take(self, lease: Lease[Any]) -> bool:
        """Take a lease. False if nobody waits for it any more."""
        if self.is_settled:
            return False
        self.taken.append(lease)
        if len(self.taken) == len(self._specs):
            self._complete.set_result(None)
        return True

    def refuse(self, error: AgentFlyError) -> None:
        """Answer with an error, if there is no answer yet."""
        if not self.is_settled:
            self._complete.set_exception(error)
