"""Virtual time: run asyncio code whose sleeps and time-outs take no time, always in the same order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever there is nothing else to do."""

    def __init__(self) -> None:
        self._virtual_time = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds since the loop was made, on its own clock."""
        return self._virtual_time

    def advance(self, seconds: float) -> None:
        """Let the clock jump."""
        self._virtual_time += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._loop.advance(timeout)
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as `asyncio.run` does, in a `VirtualTimeLoop`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
