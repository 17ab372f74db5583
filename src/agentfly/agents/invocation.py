"""Calls of user functions that can neither block the event loop nor end the process."""

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
    """Calls functions that may block, on threads: a `ThreadPool` or a `DedicatedThread`."""

    async def call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """Call a function with keyword arguments, and return its result."""
        ...


FIRST_RETRY_DELAY_S = 0.5
"""Maximum delay before the first retry, in seconds. It doubles with each retry, up to `MAX_RETRY_DELAY_S`."""

MAX_RETRY_DELAY_S = 8.0

logger = logging.getLogger(__name__)

_POLL_S = 0.02  # how often the timeout is checked again while a wait for a resource stops its clock


class FunctionTimeout(Exception):
    """A function exceeded its timeout."""


class FunctionFailed(Exception):
    """A function raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error_message(error))
        self.error = error

    def reraise_for(self, function: str) -> NoReturn:
        """Raise the error of ``function``, or a UsageError if that error would end more than one rollout."""
        if isinstance(self.error, Exception):
            raise self.error from self.error.__cause__
        raise UsageError(
            f"{function[:1].upper()}{function[1:]} raised {describe_error(self.error)}, which would end more than one "
            "rollout. Raise an Exception."
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
    """Call a sync or async function and wait for its result.

    A sync function runs on a thread, with the caller's context variables. A thread cannot be stopped: after a timeout
    or a cancellation of the caller the thread is abandoned, and nothing waits for it, not even the exit of the process.
    An async function is cancelled. One that ignores the cancellation and returns has timed out nevertheless.

    Args:
        function: the function.
        arguments: its arguments, by name.
        timeout_s: time limit in seconds for all tries together, without waiting for resources; None for no limit.
        context: the call's context, whose `Context.waits` belong to this call alone.
        retries: number of retries after transient failures (see `is_retryable`), with random delays.
        caller: calls sync functions.

    Raises:
        FunctionTimeout: the function took longer than ``timeout_s``.
        FunctionFailed: the function raised ``error``. An attempt to end the process, and a cancellation that nobody
            requested, count as failures of the function.
    """
    limit = None if timeout_s is None else asyncio.timeout(None)
    task = asyncio.current_task()
    cancels_before = _cancel_requests(task)
    result, failure = None, None
    try:
        if limit is None or timeout_s is None:
            result = await _call_with_retries(function, arguments, retries, caller)
        else:
            async with limit, _TimeoutExcludingWaits(limit, timeout_s, context):
                with context.waits.count_all():
                    result = await _call_with_retries(function, arguments, retries, caller)
    except BaseException as error:  # also SystemExit, and exceptions of bindings to other languages
        if should_propagate(error, task):
            raise
        failure = error
    if isinstance(failure, asyncio.CancelledError) and _cancel_requests(task) > cancels_before:
        raise failure
    if limit is not None and limit.expired():  # however the function reacted to its cancellation
        raise FunctionTimeout
    if failure is not None:
        raise FunctionFailed(failure.error if isinstance(failure, ThreadExit) else failure)
    return result


def _cancel_requests(task: asyncio.Task[Any] | None) -> int:
    return 0 if task is None else task.cancelling()


async def _call_with_retries(
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
    """Call a function once: an async one in the event loop, a sync one by ``caller``."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        result = await function(**arguments)
    else:
        result = await caller.call(function, arguments)
    return await result if inspect.isawaitable(result) else result  # a sync function may `return box.run(command)`


class _TimeoutExcludingWaits:
    """Expires ``limit`` after ``timeout_s`` seconds, not counting time spent waiting for resources."""

    def __init__(self, limit: asyncio.Timeout, timeout_s: float, context: Context) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._context = context
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> None:
        self._started = self._loop.time() - self._context.waited_seconds
        self._timer = self._loop.call_later(self._timeout_s, self._check)

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        spent = self._loop.time() - self._context.waited_seconds - self._started
        left = self._timeout_s - spent
        if left > 0:
            self._timer = self._loop.call_later(max(left, _POLL_S), self._check)
        else:
            self._limit.reschedule(self._loop.time())
