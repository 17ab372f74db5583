"""StartBackoff: when a pool with failed starts retries, how many at once, and which requests a failed start fails."""

from __future__ import annotations

import errno
import math
from enum import Enum, auto

from agentfly.core.errors import (
    AgentFlyError,
    APIMalformed,
    APIRefused,
    EngineClosed,
    LeaseExpired,
    PrerequisiteError,
    TokenInvariantError,
    UsageError,
)

INITIAL_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
"""Seconds between two attempts: the first pause, which doubles with each round of failures, and the maximum."""

MIN_FAILING_S = 3.5
"""Seconds of failing starts after which another failed start also fails the request it was for."""

HOPELESS_AFTER_S, HOPELESS_AFTER_ROUNDS = 60.0, 4
"""Seconds and rounds of failures after which another failed start fails all waiting requests."""

DISK_FULL_TIMEOUT_S = 300.0
"""Seconds that requests wait for disk space while instances exist that may free some."""


class StartFailureCause(Enum):
    """Why a start failed, as far as it matters for the next start."""

    PERMANENT = auto()  # the next one would fail, too: a wrong spec, a missing prerequisite, an error in code
    TRANSIENT = auto()  # the next one may succeed
    DISK_FULL = auto()  # the next one may succeed once disk space is free


class FailureScope(Enum):
    """The requests that a failed start rejects."""

    NOBODY = auto()
    NEXT_SERVED = auto()  # the requests that the instance would have served
    ALL_WAITING = auto()  # all waiters of the pool for which no instance is coming


_PERMANENT_ERRORS = (
    UsageError,
    PrerequisiteError,
    APIRefused,
    APIMalformed,
    EngineClosed,
    LeaseExpired,
    TokenInvariantError,
)
_CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT)
_DISK_FULL_MESSAGES = (
    "No space left on device",
    "Disk quota exceeded",
    "no space left on device",
    "disk quota exceeded",
)
_DEPTH = 10
_WIDE = 64  # number of concurrent starts beyond which they are not counted


def cause_of(error: BaseException) -> StartFailureCause:
    """Return the cause of a failed start. Unknown causes count as temporary."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and len(chain) < _DEPTH:
        chain.append(one)
        one = one.__cause__
    if any(_is_full(one) for one in chain):
        return StartFailureCause.DISK_FULL
    if isinstance(error, AgentFlyError):
        wrapped = chain[1] if len(chain) > 1 else None
        slip = isinstance(wrapped, _CODE_ERRORS) and not isinstance(wrapped, OSError)
        return (
            StartFailureCause.PERMANENT
            if error.by_policy or isinstance(error, _PERMANENT_ERRORS) or slip
            else StartFailureCause.TRANSIENT
        )
    return StartFailureCause.PERMANENT if isinstance(error, _CODE_ERRORS) else StartFailureCause.TRANSIENT


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_FULL_CODES:
        return True
    return any(isinstance(part, str) and words in part for part in error.args for words in _DISK_FULL_MESSAGES)


class StartBackoff:
    """The backoff of one pool after failed starts.

    Failed starts are followed by a pause, which grows with each round of failures. Starts that ran concurrently are
    one round. After a pause a single start is tried. Each success allows one more concurrent start, so their number
    doubles in the time of a start, until it is unlimited. After a full disk the number grows by one in the time of a
    start, because the free space is unknown and all running starts fail when it is used up.
    """

    def __init__(self) -> None:
        self.rounds = 0  # of failures since the last success
        self.since = math.inf  # when the first failed start of these rounds began
        self.until = -math.inf  # when the pause ends
        self.blocks_prewarming = False  # no start without a waiter
        self.blocks_waiters = False  # no start for waiters either; permanent failures reject them instead
        self.cause = StartFailureCause.TRANSIENT
        self.error: BaseException | None = None
        self._concurrency: float | None = None  # maximum concurrent starts; None for no limit

    def allowed_starts(self, starting: int) -> float:
        """The number of further starts allowed for waiters."""
        if self.blocks_waiters:
            return 0
        return math.inf if self._concurrency is None else max(0, int(self._concurrency) - starting)

    def failed(self, began: float, error: BaseException, now: float) -> None:
        """A start has failed."""
        self.cause, self.error = cause_of(error), error
        self.since = min(self.since, began)
        if self.rounds == 0 or now >= self.until:  # otherwise it ran already when the pause began
            self.until = now + min(INITIAL_BACKOFF_S * 2.0**self.rounds, MAX_BACKOFF_S)
            self.rounds += 1
        self.blocks_prewarming = True
        if self.cause is not StartFailureCause.PERMANENT:
            self._concurrency, self.blocks_waiters = 1, True

    def failure_scope(self, now: float, *, may_be_freed: bool) -> FailureScope:
        """The requests that fail with the latest failed start.

        Args:
            now: the time.
            may_be_freed: whether instances exist whose end would free disk space.
        """
        failing = now - self.since
        if self.cause is StartFailureCause.PERMANENT:
            return FailureScope.NEXT_SERVED
        if self.cause is StartFailureCause.DISK_FULL and may_be_freed:
            return FailureScope.NOBODY if failing < DISK_FULL_TIMEOUT_S else FailureScope.NEXT_SERVED
        if failing < MIN_FAILING_S:
            return FailureScope.NOBODY
        return (
            FailureScope.ALL_WAITING
            if failing >= HOPELESS_AFTER_S and self.rounds >= HOPELESS_AFTER_ROUNDS
            else FailureScope.NEXT_SERVED
        )

    def succeeded(self) -> None:
        """A start has succeeded."""
        self.rounds, self.since, self.until, self.error = 0, math.inf, -math.inf, None
        self.blocks_prewarming = self.blocks_waiters = False
        if self._concurrency is not None:
            step = 1 / self._concurrency if self.cause is StartFailureCause.DISK_FULL else 1.0
            self._concurrency = self._concurrency + step if self._concurrency < _WIDE else None

    def space_freed(self, now: float) -> None:
        """An instance is gone, which may have freed space on a full disk."""
        if self.cause is StartFailureCause.DISK_FULL and self.rounds:
            self.since, self.blocks_prewarming, self.blocks_waiters = now, False, False

    def resume(self, now: float) -> None:
        """End the pause if its time has passed."""
        if now >= self.until:
            self.blocks_prewarming = self.blocks_waiters = False
