"""Waits: how long a rollout has waited for resources."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Waits:
    """Adds up the time that a rollout's calls wait, also while they do."""

    def __init__(self) -> None:
        self._ended_seconds = 0.0
        self._started: dict[object, float] = {}

    @property
    def seconds(self) -> float:
        """How long they have waited together, those that wait now included."""
        now = time.perf_counter()
        return self._ended_seconds + sum(now - started for started in self._started.values())

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count the block as a wait."""
        wait = object()
        self._started[wait] = time.perf_counter()
        try:
            yield
        finally:
            self._ended_seconds += time.perf_counter() - self._started.pop(wait)
