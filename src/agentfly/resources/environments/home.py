"""Home: where a simulator lives. One implementation for each value of ``EnvironmentSpec.runs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Home(Protocol):
    """A place that makes a simulator, carries calls to it and ends it.

    An `Environment` owns one. It gives every call its deadline and, where ``serial``, makes one call at a time. A
    start or call is cancelled halfway only by its deadline or a release, after which only `stop` follows.

    What the simulator gives is awaited if it is awaitable. If it calls ``sys.exit``, that is an error like any other
    (`agentfly.resources.environments.simulator.as_exception`): the simulator lives on, and so does what surrounds it.
    """

    serial: bool
    """Whether one call must have ended before the next begins."""

    async def start(self) -> bool:
        """Make the simulator; say whether it has a ``reset`` that can be called without arguments."""
        ...

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the simulator; what it returns or raises comes back.

        Raises:
            ResourceDied: the simulator's place is gone.
        """
        ...

    async def stop(self, *, within_s: float, close: bool) -> None:
        """End the simulator; return when it is gone. Safe to call twice and after any failure.

        Args:
            within_s: seconds that it may take to end by itself.
            close: whether to call its own ``close``; False where it is in no state to be asked.

        Raises:
            ResourceError: it is not gone, and cannot be ended.
        """
        ...

    @property
    def death(self) -> str | None:
        """Why the place can no longer be used, or None while it can."""
        ...

    @property
    def has_hung_up(self) -> bool:
        """Whether it shows at once that the place is gone, perhaps before `death` can say how."""
        ...

    @property
    def traces(self) -> dict[str, Any]:
        """What outlives this process and how to find it."""
        ...
