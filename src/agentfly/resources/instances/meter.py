"""Meter: for how long at least one of something went on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class Meter:
    """Adds up the seconds in which at least one of something goes on. Any thread may use it.

    Args:
        clock: the time in seconds.
        whole: a meter of which this one is a part: it runs while any of its parts does.
    """

    def __init__(self, clock: Callable[[], float], whole: Meter | None = None) -> None:
        self._clock = clock
        self._whole = whole
        self._lock: Lock = whole._lock if whole is not None else Lock()  # one for both, which change together
        self._under_way = 0
        self._since = 0.0
        self._seconds = 0.0
        self._stopped = False

    @property
    def seconds(self) -> float:
        """How long it has been in all, what goes on now included."""
        with self._lock:
            return self._seconds + (self._clock() - self._since if self._under_way else 0.0)

    def begin(self) -> None:
        """One more goes on."""
        with self._lock:
            self._one_more(self._clock())

    def end(self) -> None:
        """One of them is over."""
        with self._lock:
            self._one_less(self._clock())

    def stop(self) -> None:
        """Count nothing any more: neither what goes on still nor what begins."""
        with self._lock:
            if not self._stopped and self._under_way:
                self._under_way = 1
                self._one_less(self._clock())
            self._stopped = True

    def _one_more(self, now: float) -> None:
        if self._stopped:
            return
        self._under_way += 1
        if self._under_way == 1:
            self._since = now
            if self._whole is not None:
                self._whole._one_more(now)

    def _one_less(self, now: float) -> None:
        if self._stopped:
            return
        self._under_way -= 1
        if not self._under_way:
            self._seconds += now - self._since
            if self._whole is not None:
                self._whole._one_less(now)
