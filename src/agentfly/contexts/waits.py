"""Waits: how long calls wait for resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_counting: ContextVar[tuple[Waits, ...]] = ContextVar("counting", default=())


class Waits:
    """Measures the time during which at least one wait is under way. Waits at the same time count once.

    Args:
        clock: says the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._ended_seconds = 0.0

    @property
    def seconds(self) -> float:
        """The time until now, that of a wait under way included."""
        return self._ended_seconds + (self._clock() - self._since if self._running else 0.0)

    @contextmanager
    def count_all(self) -> Iterator[None]:
        """Count every wait that the code of the block begins, whichever context of the rollout it asks."""
        token = _counting.set((*_counting.get(), self))
        try:
            yield
        finally:
            _counting.reset(token)

    def begin(self) -> None:
        """A wait begins."""
        if not self._running:
            self._since = self._clock()
        self._running += 1

    def end(self) -> None:
        """A wait has ended."""
        self._running -= 1
        if not self._running:
            self._ended_seconds += self._clock() - self._since


@contextmanager
def waiting(*counters: Waits) -> Iterator[None]:
    """Count the block as a wait in each of ``counters``, and in those that count all waits of this code."""
    told = dict.fromkeys((*counters, *_counting.get()))
    for counter in told:
        counter.begin()
    try:
        yield
    finally:
        for counter in told:
            counter.end()
