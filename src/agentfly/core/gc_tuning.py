"""Garbage collection while many rollouts run: long-lived objects are skipped, and new ones are scanned less often.

Imported modules, mainly those of PyTorch, and the model are hundreds of thousands of long-lived objects. Running
rollouts have as many. A full collection scans all of them and stops all rollouts while it does.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

GEN0_THRESHOLD = 10_000
"""Number of additional objects before a collection of new ones. Python's default is 700 or 2,000."""

INTERPRETER_FREEZES = 10_000
"""Upper bound for the objects that the interpreter itself freezes at its start: some hundreds in Python 3.12."""

COLLECT_EVERY_S = 60.0
"""Minimum seconds between two full collections before runs that follow one another quickly."""


class _GCTuning:
    """Counts the users of the tuning in this process, which has one garbage collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._frozen = False
        self._before: tuple[int, int, int] | None = None
        self._collected: float | None = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._freeze()
                before = gc.get_threshold()
                if 0 < before[0] < GEN0_THRESHOLD:  # 0 means that the program has disabled collections
                    self._before = before
                    gc.set_threshold(GEN0_THRESHOLD, *before[1:])

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._frozen:
                self._frozen = False
                gc.unfreeze()
            if self._before is not None and gc.get_threshold()[0] == GEN0_THRESHOLD:
                gc.set_threshold(*self._before)
            self._before = None

    def _freeze(self) -> None:
        if (
            gc.get_freeze_count() > INTERPRETER_FREEZES
        ):  # the program froze objects itself, and unfreezing would undo that
            return
        now = time.monotonic()
        if self._collected is None or now - self._collected > COLLECT_EVERY_S:
            gc.collect()  # so that garbage is not frozen run after run
            self._collected = now
        gc.freeze()
        self._frozen = True


_TUNING = _GCTuning()


@contextmanager
def tuned_gc() -> Iterator[None]:
    """Within the block, the garbage collector skips the objects that exist at its start, and runs less often.

    Enter it once imports and set-up are done. Blocks may be nested and may overlap in any order. The first one applies
    the tuning, and the end of the last one undoes it. The program's own settings stay: objects that it has frozen, a
    higher threshold, and disabled collection.
    """
    _TUNING.enter()
    try:
        yield
    finally:
        _TUNING.leave()


@contextmanager
def paused_gc() -> Iterator[None]:
    """Disable collection within the block, for code that creates many long-lived objects at once.

    Collections would scan them repeatedly while they are created. The block must not wait for anything.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
