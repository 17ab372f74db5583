"""OwnThread: runs each function on a thread of its own, that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OwnThread(Executor):
    """For ``loop.run_in_executor``, where the loop's shared threads may all be busy with what users do.

    The end of the process does not wait for these threads, so that one that hangs holds up nobody.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a thread that calls ``fn``.

        Raises:
            RuntimeError: the system refuses to start another thread.
        """
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        name = getattr(fn, "__qualname__", "call")
        threading.Thread(target=work, name=f"agentfly {name}", daemon=True).start()
        return future
