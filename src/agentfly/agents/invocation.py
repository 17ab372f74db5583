"""Invocation: how a user's function is called, so that it can neither block the event loop nor end the process."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from agentfly.agents.transient_errors import is_retryable
from agentfly.contexts.context import Context
from agentfly.core.errors import UsageError, describe_error, error_message
from agentfly.core.signals import should_propagate
from agentfly.core.threads.call import ThreadExit
from agentfly.core.threads.pool import THREAD_POOL

T = TypeVar("T")


class ThreadCaller(Protocol):
    """Calls functions that may block, on threads: `Threads`, or a `DedicatedThread`."""

    async def call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Call a function with arguments by name, and return what it returns."""
        ...


FIRST_RETRY_DELAY_S = 0.5
"""The longest pause before the second try of a function; it doubles with each further one, up to `MAX_RETRY_DELAY_S`."""

MAX_RETRY_DELAY_S = 8.0

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.02  # while a function waits for a resource its time stands still, and is looked at this often


class FunctionTimeout(Exception):
    """A function took longer than it may."""


class FunctionFailed(Exception):
    """A function raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error_message(error))
        self.error = error

    def reraise_for(self, function: str) -> NoReturn:
        """Raise what ``function`` raised, or a UsageError where that would end more than a rollout."""
        if isinstance(self.error, Exception):
            raise self.error from self.error.__cause__
        raise UsageError(
            f"{function[:1].upper()}{function[1:]} raised {describe_error(self.error)}, which would end more than one rollout. "
            "Raise an Exception."
        ) from self.error


async def call_user_function(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    timeout_s: float | None,
    context: Context,
    retries: int = 0,
    caller: ThreadCaller = THREAD_POOL,
) -> Any:
    """Call a sync or async function and wait for what it returns.

    A sync function runs on a thread, with the caller's context variables. When it overruns or the caller is cancelled,
    it is left alone: a thread cannot be stopped, but nobody waits for it, at exit neither. An async one is cancelled;
    one that takes no notice of that and returns all the same has overrun nevertheless.

    Args:
        function: what to call.
        arguments: its arguments, by name.
        timeout_s: seconds that the function may take with all its tries, what it waits for resources not counted; None
            for any time.
        context: the call's context, whose `Context.waits` are this call's alone.
        retries: how often it is called again after failures that may pass (see `is_retryable`), after pauses of random
            length.
        caller: calls sync functions.

    Raises:
        Overrun: the function took longer than ``timeout_s``.
        FunctionFailed: the function raised; ``error`` says what. An attempt to end the process, and a cancellation
            that nobody asked for, count as failures of the function.
    """
    limit = None if timeout_s is None else asyncio.timeout(None)
    task = asyncio.current_task()
    asked = _requests_to_end(task)
    result, failure = None, None
    try:
        if limit is None or timeout_s is None:
            result = await _call_until_it_works(function, arguments, retries, caller)
        else:
            async with limit, _TimeoutExcludingWaits(limit, timeout_s, context):
                with context.waits.count_all():
                    result = await _call_until_it_works(function, arguments, retries, caller)
    except BaseException as error:  # SystemExit, and what other languages' bindings raise, too
        if should_propagate(error, task):
            raise
        failure = error
    if isinstance(failure, asyncio.CancelledError) and _requests_to_end(task) > asked:
        raise failure
    if limit is not None and limit.expired():  # whatever the function has made of being cancelled
        raise FunctionTimeout
    if failure is not None:
        raise FunctionFailed(failure.error if isinstance(failure, ThreadExit) else failure)
    return result


def _requests_to_end(task: asyncio.Task[Any] | None) -> int:
    return 0 if task is None else task.cancelling()


async def _call_until_it_works(
    function: Callable[..., Any], arguments: Mapping[str, Any], retries: int, caller: ThreadCaller
) -> Any:
    for retry in range(retries):
        try:
            return await call_once(function, arguments, caller)
        except Exception as error:
            if not is_retryable(error):
                raise
            logger.info(
                "%s failed with %s; it is tried again.", getattr(function, "__name__", function), describe_error(error)
            )
        await asyncio.sleep(random.uniform(0.5, 1) * min(FIRST_RETRY_DELAY_S * 2**retry, MAX_RETRY_DELAY_S))
    return await call_once(function, arguments, caller)


async def call_once(function: Callable[..., Any], arguments: Mapping[str, Any], caller: ThreadCaller) -> Any:
    """What a function returns, called once: an async one in the event loop, a sync one by ``caller``."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        result = await function(**arguments)
    else:
        result = await caller.call(function, arguments)
    return await result if inspect.isawaitable(result) else result  # as of `return box.run(command)`


class _TimeoutExcludingWaits:
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
