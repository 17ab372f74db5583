"""SteadyThread: does all the work of one object, whose parts may be bound to the thread they came from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


def on_new_thread(work: Work, name: str) -> None:
    """Have a thread of its own do some work. The end of the process does not wait for it.

    Raises:
        RuntimeError: the system refuses to start another thread.
    """
    threading.Thread(target=work, name=f"agentfly-{name}", daemon=True).start()


class SteadyThread:
    """Does works one after another, in the order in which they came. It is started by the first of them.

    A work that hangs keeps the thread, and what comes after it waits; but not the end of the process.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[Work | None] = SimpleQueue()
        self._started = False

    def __call__(self, work: Work, name: str) -> None:
        """Have some work done, which raises nothing.

        Raises:
            RuntimeError: the system refuses to start another thread.
        """
        if not self._started:
            on_new_thread(self._run, name)
            self._started = True
        self._works.put(work)

    def end(self) -> None:
        """Let the thread end once it has done what it was given."""
        self._works.put(None)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()
