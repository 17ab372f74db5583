"""OwnThread: runs each function on a thread of its own, that nobody waits for."""

from __future__ import annotations

import asyncio
import functools
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

        name = getattr(getattr(fn, "func", fn), "__qualname__", "call")
        threading.Thread(target=work, name=f"agentfly {name}", daemon=True).start()
        return future


async def on_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function that may block gives. If the caller is cancelled, the function goes on, and nobody hears of it.

    In place of `asyncio.to_thread`, whose threads any number of sync tools may hold, and whose work the end of the
    process waits for.
    """
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(OwnThread(), call)
