"""IdleFreezer: freezes an instance while no one uses it, and thaws it for the next use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from agentfly.core.async_tasks import cancel_and_wait, wait_at_most
from agentfly.core.errors import ResourceDied, describe_error
from agentfly.resources.resource import Resource

logger = logging.getLogger(__name__)

FREEZE_AFTER_S = 0.05
"""Seconds between the last use of an instance and its freezing, so that consecutive uses cause no freezes."""

CHANGE_TIMEOUT_S = 10.0
"""Seconds that a freeze or a thaw may take."""


class IdleFreezer:
    """Freezes and thaws one instance, one change at a time, in the background.

    A use begins with `begin_use`, waits for `wait_running`, and ends with `end_use`. An instance counts as frozen from
    before a freeze begins until a thaw has succeeded. A use that begins meanwhile waits for the freeze and then thaws.

    Args:
        resource: the instance.
        is_quiet: whether no one is about to use it; called before a freeze.
        lost: called if it cannot be thawed.
    """

    def __init__(self, resource: Resource, is_quiet: Callable[[], bool], lost: Callable[[Exception], None]) -> None:
        self._resource = resource
        self._is_quiet = is_quiet
        self._report_lost = lost
        self._uses = 0
        self._used_until = 0.0  # by the event loop's clock
        self._frozen = False
        self._change: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost: Exception | None = None
        self._disabled = False  # no further freezes: one failed, or removal has begun
        self._closing = False

    @property
    def frozen(self) -> bool:
        """Whether it is frozen, or may be."""
        return self._frozen

    def begin_use(self) -> None:
        """A use begins."""
        self._uses += 1

    async def wait_running(self) -> None:
        """Return when the instance runs. It keeps running until the use ends.

        Raises:
            ResourceDied: it cannot be thawed.
        """
        while self._frozen:
            if self._lost is not None:
                raise ResourceDied(f"{self._resource.instance} could not be thawed: {describe_error(self._lost)}")
            if self._closing:
                raise ResourceDied(f"{self._resource.instance} is being removed.")
            if self._change is None or self._change.done():  # still set though done: it was cancelled with the loop
                self._change = self._spawn(self._thaw(), "thaw")
            await asyncio.wait({self._change})

    def end_use(self) -> None:
        """A use ends."""
        self._uses -= 1
        self._used_until = asyncio.get_running_loop().time()
        self.maybe_freeze()

    def maybe_freeze(self) -> None:
        """Schedule a freeze if the instance is unused. A new use prevents it."""
        if not (self._uses or self._frozen or self._disabled or self._timer):
            self._schedule_freeze(FREEZE_AFTER_S)

    async def close(self, within_s: float) -> None:
        """Thaw the instance for its removal, because frozen processes may not die, and freeze it no more.

        If it cannot be thawed in time, that is logged and its removal must cope. Nothing is tried twice.
        """
        if self._closing:
            return
        self._disabled = self._closing = True
        self._drop_timer()
        if self._change is not None:
            await cancel_and_wait(self._change)
        if self._frozen:
            try:
                await wait_at_most(self._resource.thaw(), within_s, f"thaw() of {self._resource.instance}")
            except Exception as error:
                logger.warning(
                    "%s is removed though it could not be thawed: %s", self._resource.instance, describe_error(error)
                )
            else:
                self._frozen = False

    def _schedule_freeze(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._freeze_if_idle)

    def _freeze_if_idle(self) -> None:
        self._timer = None
        left = self._used_until + FREEZE_AFTER_S - asyncio.get_running_loop().time()
        if left > 0:  # it was used since; a use sets no timer, because uses are frequent
            self._schedule_freeze(left)
        elif not (self._uses or self._frozen or self._disabled) and self._is_quiet():
            self._frozen = True
            self._change = self._spawn(self._freeze(), "freeze")

    async def _freeze(self) -> None:
        try:
            await wait_at_most(self._resource.freeze(), CHANGE_TIMEOUT_S, f"freeze() of {self._resource.instance}")
        except Exception as error:
            self._disabled = True
            logger.warning(
                "%s could not be frozen and runs on while idle: %s", self._resource.instance, describe_error(error)
            )
            await self._thaw()
        finally:
            self._change = None

    async def _thaw(self) -> None:
        try:
            await wait_at_most(self._resource.thaw(), CHANGE_TIMEOUT_S, f"thaw() of {self._resource.instance}")
        except Exception as error:
            self._lost = error
            self._report_lost(error)
        else:
            self._frozen = False
        finally:
            self._change = None
        self.maybe_freeze()  # the use it was thawed for may have ended

    def _spawn(self, change: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(change, name=f"{what} {self._resource.instance}")

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
