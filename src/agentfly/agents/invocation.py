"""Invocation: how a user's function is called, so that it can neither block the event loop nor end the process."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from agentfly.agents.outage import may_pass
from agentfly.agents.steady_thread import on_new_thread
from agentfly.contexts.context import Context
from agentfly.errors import PrerequisiteError, UsageError, message_of, say

T = TypeVar("T")

Thread = Callable[[Callable[[], None], str], None]
"""Has a work done on some thread, which gets a name if it is new."""

FIRST_PAUSE_S = 0.5
"""The longest pause before the second try of a function; it doubles with each further one, up to `LONGEST_PAUSE_S`."""

LONGEST_PAUSE_S = 8.0

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.02  # while a function waits for a resource its time stands still, and is looked at this often


class Overrun(Exception):
    """A function took longer than it may."""


class FunctionFailed(Exception):
    """A function raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(message_of(error))
        self.error = error

    def raise_as_of(self, function: str) -> NoReturn:
        """Raise what ``function`` raised, or a UsageError where that would end more than a rollout."""
        if isinstance(self.error, Exception):
            raise self.error from self.error.__cause__
        raise UsageError(
            f"{function[:1].upper()}{function[1:]} raised {say(self.error)}, which would end more than one rollout. "
            "Raise an Exception."
        ) from self.error


async def invoke(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    timeout_s: float | None,
    context: Context,
    retries: int = 0,
    thread: Thread = on_new_thread,
) -> Any:
    """Call a sync or async function and wait for what it returns.

    A sync function runs on a thread of its own, with the caller's context variables. When it overruns or the caller is
    cancelled, it is left alone: a thread cannot be stopped, but nobody waits for it, at exit neither.

    Args:
        function: what to call.
        arguments: its arguments, by name.
        timeout_s: seconds that the function may take with all its tries, what it waits for resources not counted; None
            for any time.
        context: the rollout's context, which knows what was waited for.
        retries: how often it is called again after failures that may pass (see `may_pass`), after pauses of random
            length.
        thread: where a sync function runs.

    Raises:
        Overrun: the function took longer than ``timeout_s``.
        FunctionFailed: the function raised; ``error`` says what. An attempt to end the process, and a cancellation
            that nobody asked for, count as failures of the function.
        PrerequisiteError: no thread could be started for a sync function.
    """
    limit = None if timeout_s is None else asyncio.timeout(None)
    try:
        if limit is None or timeout_s is None:
            return await _call_until_it_works(function, arguments, retries, thread)
        async with limit, _Clock(limit, timeout_s, context):
            return await _call_until_it_works(function, arguments, retries, thread)
    except TimeoutError as error:
        if limit is not None and limit.expired():
            raise Overrun from None
        raise FunctionFailed(error) from None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise FunctionFailed(error) from None
    except _ThreadRefused as error:
        raise PrerequisiteError(
            f"No thread could be started for a sync function ({error}). The machine's limit on threads is reached: "
            "raise it (ulimit -u, or the container's limit on pids), run fewer rollouts at a time, or make it async."
        ) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit, and what other languages' bindings raise
        raise FunctionFailed(error) from None


async def run_in_thread(function: Callable[..., T], arguments: Mapping[str, Any], thread: Thread = on_new_thread) -> T:
    """Call a sync function on a thread and wait for what it returns, with the caller's context variables.

    One thread a call, because a pool of fewer threads than rollouts would make sync functions wait for one another.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    variables = contextvars.copy_context()

    def work() -> None:
        try:
            result = variables.run(function, **arguments)
        except StopIteration as error:  # a future cannot carry it
            report(outcome.set_exception, RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            report(outcome.set_exception, error)
        else:
            report(outcome.set_result, result)

    def report(settle: Callable[[Any], None], value: Any) -> None:
        try:
            loop.call_soon_threadsafe(lambda: None if outcome.done() else settle(value))
        except RuntimeError:  # the loop was closed meanwhile, so nobody waits any more
            return

    try:
        thread(work, getattr(function, "__name__", "call"))
    except RuntimeError as error:
        raise _ThreadRefused(str(error)) from error
    return await outcome


class _ThreadRefused(Exception):
    """The system refused to start another thread."""


async def _call_until_it_works(
    function: Callable[..., Any], arguments: Mapping[str, Any], retries: int, thread: Thread
) -> Any:
    for retry in range(retries):
        try:
            return await call(function, arguments, thread)
        except Exception as error:
            if not may_pass(error):
                raise
            logger.info("%s failed with %s; it is tried again.", getattr(function, "__name__", function), say(error))
        await asyncio.sleep(random.uniform(0.5, 1) * min(FIRST_PAUSE_S * 2**retry, LONGEST_PAUSE_S))
    return await call(function, arguments, thread)


async def call(function: Callable[..., Any], arguments: Mapping[str, Any], thread: Thread) -> Any:
    """What a function returns, called once: an async one in the event loop, a sync one on ``thread``."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        result = await function(**arguments)
    else:
        result = await run_in_thread(function, arguments, thread)
    return await result if inspect.isawaitable(result) else result  # as of `return box.run(command)`


class _Clock:
    """Lets ``limit`` expire once the time spent, without that spent waiting for resources, reaches ``timeout_s``."""

    def __init__(self, limit: asyncio.Timeout, timeout_s: float, context: Context) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._context = context
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> None:
        self._started = self._loop.time() - self._context.waited_seconds
        self._timer = self._loop.call_later(self._timeout_s, self._look)

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        spent = self._loop.time() - self._context.waited_seconds - self._started
        left = self._timeout_s - spent
        if left > 0:
            self._timer = self._loop.call_later(max(left, _LOOK_AGAIN_S), self._look)
        else:
            self._limit.reschedule(self._loop.time())
