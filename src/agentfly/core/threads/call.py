"""ThreadCall: one call made on a thread, and the delivery of its result to an event loop or future."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class ThreadExit(Exception):
    """A function on a thread raised ``error``, which would end more than this call if it reached the event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class FutureLike(Protocol[T_contra]):
    """A future, of asyncio or of threads."""

    def done(self) -> bool:
        """Whether it already has a result or an exception."""
        ...

    def set_result(self, result: T_contra, /) -> None:
        """Set the result of the call."""
        ...

    def set_exception(self, exception: BaseException, /) -> None:
        """Set the exception of the call."""
        ...


class CompletionSink(Protocol):
    """Delivers the results of calls that threads have made."""

    def put(self, call: ThreadCall[Any]) -> None:
        """Schedule the delivery of a finished call. Runs on any thread."""
        ...


class ThreadCall(Generic[T]):
    """A call to be made on a thread, with the context variables of the task that requests it.

    Args:
        sink: delivers the result to the requester.
        outcome: the future that gets the result.
        function: the function to call with ``arguments`` and ``keywords``.
        counts_toward_limit: whether the thread that makes the call counts toward the limit.

    Attributes:
        counted: whether its thread counts as working.
        counted_as_abandoned: whether its thread counts as abandoned: no one waits for the call any more.
        started: whether a thread has taken it.
        abandoned: whether no one waits for it any more.
        ended: whether it has returned or raised.
    """

    __slots__ = (
        "_arguments",
        "_error",
        "_function",
        "_keywords",
        "_outcome",
        "_result",
        "_sink",
        "_variables",
        "abandoned",
        "counted",
        "counted_as_abandoned",
        "counts_toward_limit",
        "ended",
        "started",
    )

    def __init__(
        self,
        sink: CompletionSink,
        outcome: FutureLike[T],
        function: Callable[..., T],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        *,
        counts_toward_limit: bool = False,
    ) -> None:
        self._sink = sink
        self._function = function
        self._arguments = arguments
        self._keywords = keywords
        self._variables = contextvars.copy_context()
        self._result: Any = None
        self._error: BaseException | None = None
        self._outcome = outcome
        self.counts_toward_limit = counts_toward_limit
        self.counted = self.counted_as_abandoned = self.started = self.abandoned = self.ended = False

    @property
    def name(self) -> str:
        """The qualified name of the function."""
        function = getattr(self._function, "func", self._function)
        return str(getattr(function, "__qualname__", type(function).__name__))

    def run(self) -> None:
        """Make the call. Runs on the thread."""
        try:
            self._result = self._variables.run(self._function, *self._arguments, **self._keywords)
        except BaseException as error:
            self._error = error
        self.ended = True

    def publish(self) -> None:
        """Pass the finished call to its sink. Runs on the thread."""
        self._sink.put(self)

    def reject(self, error: Exception) -> None:
        """Fail the call without making it. Runs on any thread."""
        self._error = error
        self._sink.put(self)

    def settle(self) -> None:
        """Set the result or exception of the future. Runs where the future lives."""
        outcome, error, result = self._outcome, self._error, self._result
        self._error = self._result = None
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            outcome.set_exception(error)
        else:
            outcome.set_exception(ThreadExit(error))


class LoopCompletionSink:
    """Delivers results to one event loop, which is woken once for all pending results."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ended: deque[ThreadCall[Any]] = deque()
        self._woken = False

    def put(self, call: ThreadCall[Any]) -> None:
        """Have the loop settle a call. Runs on any thread."""
        self._ended.append(call)
        if self._woken:
            return
        self._woken = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._settle)
        except RuntimeError:  # the loop is closed, so no one waits any more
            self._woken = False
            self._ended.clear()

    def _settle(self) -> None:
        self._woken = False
        while self._ended:
            self._ended.popleft().settle()


class InlineCompletionSink:
    """Settles calls on the threads that made them, for callers without an event loop."""

    def put(self, call: ThreadCall[Any]) -> None:
        """Settle a call."""
        call.settle()
