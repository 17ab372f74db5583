"""RateLimiter: admits the calls of one `ModelAPI` in order, within the limits of its endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass

from agentfly.core.errors import AcquireTimeout, APIRefused
from agentfly.core.shared_file import FileLocked
from agentfly.resources.model_api.shared_usage import SharedUsage, wakeups
from agentfly.resources.model_api.usage_window import AdmissionDelay, CallOutcome, RateLimits, UsageWindow
from agentfly.resources.process.procfs import ProcessIdentity

POLL_S = 0.05
"""Seconds between two checks for changes by other processes, in case their notification is lost."""

MAX_POLL_S = 1.0
"""Maximum seconds between two checks, which also keep the position in the queue."""

LOCK_RETRY_S = 0.003
CALL_END_MARGIN_S = 5.0
"""Seconds after its deadline when a call of a dead process has certainly ended."""


@dataclass(frozen=True)
class EndpointUse:
    """The current use of an endpoint by all processes of this host.

    Attributes:
        open_calls: running calls.
        allowed_calls: maximum number of concurrent calls: ``max_concurrency``, or less if the server asked for less.
        requests: requests that count in the window.
        tokens: tokens that count in the window, including those reserved for running calls.
        paused_s: seconds for which the server does not want further calls.
        waiting: calls of this instance that wait for their turn.
    """

    open_calls: int
    allowed_calls: int
    requests: int
    tokens: int
    paused_s: float
    waiting: int


class Permit:
    """Permission for one call. The caller reports its outcome; an outcome that is not reported counts as unknown."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.outcome: CallOutcome = "failed"
        self.tokens: int | None = None
        self.pause_s: float | None = None
        self.was_sent = True


class RateLimiter:
    """Lets calls through one at a time, in order. It belongs to the event loop that it is used in.

    Args:
        account: the traffic of the endpoint.
        limits: the limits of the endpoint.
        name: the name of the endpoint, for messages.
        clock: seconds of a clock that all processes of the host read alike.
    """

    def __init__(
        self, account: SharedUsage, limits: RateLimits, name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._account = account
        self._limits = limits
        self._name = name
        self._clock = clock
        self.limiter_id = uuid.uuid4().hex[:16]
        self._process = asdict(ProcessIdentity.current())
        self._loop = asyncio.get_running_loop()
        # Order of the calls; asyncio's locks are fair. New calls take the first lock as well, so that a retried call
        # waits for at most one of them.
        self._new, self._head = asyncio.Lock(), asyncio.Lock()
        self._changed = asyncio.Event()
        self._waiting = 0
        self._dead_checked_at = 0.0
        self._last_wait: AdmissionDelay | None = None
        account.listen(self)

    @asynccontextmanager
    async def permit(self, tokens: int, *, wait_s: float, call_s: float, again: bool = False) -> AsyncIterator[Permit]:
        """Wait until a call may start. It counts as running until the block ends.

        Args:
            tokens: maximum number of tokens of the call.
            wait_s: seconds to wait at most.
            call_s: time limit of the call in seconds.
            again: whether it is a retry. Its deadline is running, so it precedes new calls.

        Raises:
            AcquireTimeout: its turn did not come in time.
            APIRefused: it needs more tokens than the limit allows.
        """
        if self._limits.tokens is not None and tokens > self._limits.tokens:
            raise APIRefused(
                f"A call of {self._name} may take {tokens} tokens (its prompt and max_tokens), and tokens_per_minute "
                f"is {self._limits.tokens}. Shorten the prompt or lower max_tokens, or raise the limit."
            )
        passage = Permit()
        self._waiting += 1
        try:
            async with asyncio.timeout(wait_s), nullcontext() if again else self._new, self._head:
                await self._wait_for_admission(passage.id, tokens, call_s)
        except TimeoutError:
            raise self._overdue(wait_s) from None
        finally:
            self._waiting -= 1
        try:
            yield passage
        finally:
            self._leave(lambda traffic: self._settle(traffic, passage))

    def usage(self) -> EndpointUse:
        """Return the current use of the endpoint."""
        with contextlib.suppress(FileLocked):
            return self._account.change(self._read)
        return self._read(self._account.last_read)

    def changed(self) -> None:
        """Another call of this process has changed the usage, perhaps on another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no call waits
            self._loop.call_soon_threadsafe(self._changed.set)

    def _overdue(self, wait_s: float) -> AcquireTimeout:
        why = "" if self._last_wait is None else f": {self._last_wait.why}"
        return AcquireTimeout(
            f"A call of {self._name} waited {wait_s:g} s for its turn{why}. {self._waiting - 1} other calls wait "
            "with it. Raise the limits of its spec if the endpoint allows more, wait longer (wait_timeout_s), or run "
            "fewer rollouts at a time."
        )

    async def _wait_for_admission(self, call: str, tokens: int, call_s: float) -> None:
        self._last_wait = None
        try:
            wait, shared = await self._try_admit(call, tokens, call_s)
            if wait is not None:
                with wakeups(self.limiter_id, self._changed.set):
                    while wait is not None:
                        self._changed.clear()
                        wait, shared = await self._try_admit(call, tokens, call_s)
                        if wait is not None:
                            self._last_wait = wait
                            await self._wait_for_change(_poll_interval(wait, shared))
        except BaseException:
            self._leave(lambda traffic: traffic.leave(self.limiter_id))
            raise
        if shared:
            self._account.tell()

    async def _try_admit(self, call: str, tokens: int, call_s: float) -> tuple[AdmissionDelay | None, bool]:
        while True:
            with contextlib.suppress(FileLocked):
                return self._account.change(lambda traffic: self._ask(traffic, call, tokens, call_s))
            await asyncio.sleep(LOCK_RETRY_S)

    async def _wait_for_change(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _ask(self, traffic: UsageWindow, call: str, tokens: int, call_s: float) -> tuple[AdmissionDelay | None, bool]:
        """Return whether to wait, and whether another process uses the endpoint too."""
        now = self._clock()
        ends = now + call_s + CALL_END_MARGIN_S
        wait = traffic.admit(self._limits, self.limiter_id, call, tokens, now, ends)
        traffic.processes[self.limiter_id] = self._process
        if wait is not None and now - self._dead_checked_at > MAX_POLL_S:
            self._dead_checked_at = now
            if dead := [gate for gate, process in traffic.processes.items() if _is_dead(process)]:
                traffic.bury(self._limits, dead, now)
                wait = traffic.admit(self._limits, self.limiter_id, call, tokens, now, ends)
        return wait, len(traffic.processes) > 1

    def _leave(self, function: Callable[[UsageWindow], object]) -> None:
        """Have the traffic changed as soon as that can be, without waiting for it."""
        self._account.leave(function)
        self._catch_up()

    def _catch_up(self) -> None:
        if not self._account.catch_up():
            self._loop.call_later(LOCK_RETRY_S, self._catch_up)

    def _settle(self, traffic: UsageWindow, passage: Permit) -> None:
        if not passage.was_sent:
            traffic.open.pop(passage.id, None)
            return
        traffic.settle(
            self._limits,
            passage.id,
            self._clock(),
            outcome=passage.outcome,
            tokens=passage.tokens,
            pause_s=passage.pause_s,
        )

    def _read(self, traffic: UsageWindow) -> EndpointUse:
        now, limits = self._clock(), self._limits
        return EndpointUse(
            open_calls=len(traffic.open),
            allowed_calls=traffic.allowed(limits),
            requests=traffic.requests_in_window(limits, now),
            tokens=traffic.tokens_in_window(now),
            paused_s=max(0.0, traffic.paused_until - now),
            waiting=self._waiting,
        )


def _poll_interval(wait: AdmissionDelay, shared: bool) -> float:
    """Return the seconds until the next check without a notification."""
    if wait.seconds is not None:
        return min(max(wait.seconds, 0.001), MAX_POLL_S)
    return POLL_S if shared else MAX_POLL_S


def _is_dead(process: dict[str, object]) -> bool:
    return process["pid"] != os.getpid() and ProcessIdentity(**process).is_dead()  # type: ignore[arg-type]
