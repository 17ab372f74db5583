"""ThreadCall: a call that is made on a thread, and how what comes of it gets to an event loop."""

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
    """A function on a thread raised ``error``, which in an event loop would end more than the call of this function."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class FutureLike(Protocol[T_contra]):
    """A future, of asyncio or of threads."""

    def done(self) -> bool:
        """Whether nothing can be told to it any more."""
        ...

    def set_result(self, result: T_contra, /) -> None:
        """Tell what came of the call."""
        ...

    def set_exception(self, exception: BaseException, /) -> None:
        """Tell why nothing came of it."""
        ...


class CompletionSink(Protocol):
    """Where threads tell what came of calls."""

    def put(self, call: ThreadCall[Any]) -> None:
        """Have a call settled. Runs on any thread."""
        ...


class ThreadCall(Generic[T]):
    """A call to be made on a thread, with the context variables of the task that asks for it.

    Args:
        mailbox: of the one who asks.
        outcome: what is to be told what comes of it.
        function: what is called, with ``arguments`` and ``keywords``.
        counts_toward_limit: whether the thread that makes it counts against a limit.

    Attributes:
        counted: whether its thread counts as working.
        counted_as_abandoned: whether its thread counts as lost, because nobody waits for the call any more and it has not returned.
        started: whether a thread has it.
        abandoned: whether nobody waits for it any more.
        ended: whether it has returned or raised.
    """

    __slots__ = (
        "_arguments",
        "_error",
        "_function",
        "_keywords",
        "_mailbox",
        "_outcome",
        "_result",
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
        mailbox: CompletionSink,
        outcome: FutureLike[T],
        function: Callable[..., T],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        *,
        bounded: bool = False,
    ) -> None:
        self._mailbox = mailbox
        self._function = function
        self._arguments = arguments
        self._keywords = keywords
        self._variables = contextvars.copy_context()
        self._result: Any = None
        self._error: BaseException | None = None
        self._outcome = outcome
        self.counts_toward_limit = bounded
        self.counted = self.counted_as_abandoned = self.started = self.abandoned = self.ended = False

    @property
    def name(self) -> str:
        """What the function calls itself."""
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
        """Tell what came of it. Runs on the thread."""
        self._mailbox.put(self)

    def reject(self, error: Exception) -> None:
        """It will not be made. Runs on any thread."""
        self._error = error
        self._mailbox.put(self)

    def settle(self) -> None:
        """Hand over what came of it. Runs where the outcome lives."""
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
    """What threads have to tell to one event loop, which is woken once for all that has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ended: deque[ThreadCall[Any]] = deque()
        self._woken = False

    def put(self, call: ThreadCall[Any]) -> None:
        """Have a call settled by the loop. Runs on any thread."""
        self._ended.append(call)
        if self._woken:
            return
        self._woken = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._settle)
        except RuntimeError:  # the loop was closed meanwhile, so nobody waits any more
            self._woken = False
            self._ended.clear()

    def _settle(self) -> None:
        self._woken = False
        while self._ended:
            self._ended.popleft().settle()


class InlineCompletionSink:
    """Settles calls on the threads that made them, for those who wait without an event loop."""

    def put(self, call: ThreadCall[Any]) -> None:
        """Settle a call."""
        call.settle()
