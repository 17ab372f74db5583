"""UsageWindow: the recent calls of one endpoint by all processes of this host, and whether one more may start. Pure.

Requests and tokens are counted in a sliding window. The count is never below the server's, whatever moment the server
counts a call at. A request counts from the time it is sent until one window after the response, or after
`MAX_TRANSIT_S`, by when it has arrived. Its tokens count until one window after the response.

The number of concurrent calls adapts to the server. It is halved when the server asks for less, and grows by one for
each round of successful calls (additive increase, multiplicative decrease; Chiu and Jain, 1989).

All times are seconds of one clock, which every process of the host reads alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from agentfly.resources.process.procfs import ProcessIdentity

MAX_TRANSIT_S = 5.0
"""Seconds after its sending by which a request has arrived at the far side."""

QUEUE_ENTRY_TTL_S = 2.0
"""Seconds for which a gate keeps its position in the queue without asking again."""

WINDOW_BUCKETS = 60
"""Number of parts of a window in which past usage is counted, each rounded up."""

CallOutcome = Literal["done", "slow down", "failed"]


@dataclass(frozen=True)
class RateLimits:
    """Limits on the use of an endpoint.

    Attributes:
        max_concurrency: maximum number of concurrent calls.
        requests: maximum number of requests per window; None for no limit.
        tokens: maximum number of prompt and answer tokens per window; None for no limit.
        window_s: length of a window in seconds.
    """

    max_concurrency: int
    requests: int | None = None
    tokens: int | None = None
    window_s: float = 60.0


@dataclass
class InFlightCall:
    """A running call: its owner, the tokens reserved for it, and the latest time of its end."""

    gate: str
    tokens: int
    sent: float
    ends: float


@dataclass(frozen=True)
class AdmissionDelay:
    """Why no further call may start now, and the seconds until one may; None if unknown."""

    why: str
    seconds: float | None = None


@dataclass
class UsageWindow:
    """The calls of one endpoint: running calls, and ended calls that still count.

    Attributes:
        open: the running calls, by id.
        requests, tokens: ended calls, as pairs of the time until which they count and their number.
        paused_until: time before which the server does not want further calls.
        allowance: number of concurrent calls that the server accepts; None if it never asked for fewer.
        lowered_at: time of the last reduction of the allowance.
        successes: successful calls since the last change of the allowance.
        line: the queue of waiting gates, each with the time until which its position is kept.
        processes: the processes of the gates, as JSON.
    """

    open: dict[str, InFlightCall] = field(default_factory=dict)
    requests: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    paused_until: float = 0.0
    allowance: int | None = None
    lowered_at: float = 0.0
    successes: int = 0
    line: dict[str, float] = field(default_factory=dict)
    processes: dict[str, Any] = field(default_factory=dict)

    def admit(
        self, limits: RateLimits, gate: str, call: str, tokens: int, now: float, ends: float
    ) -> AdmissionDelay | None:
        """Start a call, or return why it cannot start yet. A gate that has to wait keeps its position and asks again.

        Args:
            limits: the limits.
            gate: the gate of the call.
            call: the id of the call.
            tokens: number of tokens that it may use.
            now: the time.
            ends: latest time of its end, even if the caller disappears.
        """
        self._forget_the_past(limits, now)
        first = next(iter(self.line), gate)
        wait = self._why_not(limits, tokens, now) or (
            None if first == gate else AdmissionDelay("it is another process's turn")
        )
        if wait is not None:
            self.line[gate] = now + QUEUE_ENTRY_TTL_S
            return wait
        self.line.pop(gate, None)
        self.open[call] = InFlightCall(gate, tokens, now, ends)
        return None

    def settle(
        self,
        limits: RateLimits,
        call: str,
        now: float,
        *,
        outcome: CallOutcome,
        tokens: int | None = None,
        pause_s: float | None = None,
    ) -> None:
        """Record the end of a call.

        Args:
            limits: the limits.
            call: its id.
            now: the time.
            outcome: its implication for the server's load.
            tokens: number of tokens that it used; None if unknown.
            pause_s: seconds during which the server does not want further calls.
        """
        if pause_s is not None:
            self.paused_until = max(self.paused_until, now + pause_s)
        ended = self.open.pop(call, None)
        if ended is None:  # it counted as lost
            return
        self._count(limits, ended, now, ended.tokens if tokens is None else tokens)
        if outcome == "done":
            self._grow(limits)
        elif (
            outcome == "slow down" and ended.sent >= self.lowered_at
        ):  # other calls of the same burst give no new information
            most = self.allowed(limits)
            self.allowance, self.lowered_at, self.successes = max(1, min(most, len(self.open) + 1) // 2), now, 0

    def leave(self, gate: str) -> None:
        """A gate has left the queue."""
        self.line.pop(gate, None)

    def bury(self, limits: RateLimits, gates: Iterable[str], now: float) -> None:
        """The processes of some gates are dead, and so are their calls."""
        for gate in gates:
            self.line.pop(gate, None)
            for call in [id_ for id_, one in self.open.items() if one.gate == gate]:
                self.settle(limits, call, now, outcome="failed")

    def allowed(self, limits: RateLimits) -> int:
        """The allowed number of concurrent calls."""
        return limits.max_concurrency if self.allowance is None else min(self.allowance, limits.max_concurrency)

    def requests_in_window(self, limits: RateLimits, now: float) -> int:
        """Requests that count now."""
        counting = sum(1 for call in self.open.values() if call.sent + MAX_TRANSIT_S + limits.window_s > now)
        return counting + sum(count for until, count in self.requests if until > now)

    def tokens_in_window(self, now: float) -> int:
        """Tokens that count now, the reserved ones included."""
        reserved = sum(call.tokens for call in self.open.values())
        return reserved + sum(count for until, count in self.tokens if until > now)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON-able values."""
        calls = {id_: (call.gate, call.tokens, call.sent, call.ends) for id_, call in self.open.items()}
        return {**vars(self), "open": calls}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> UsageWindow:
        """Return the window that `to_json` described.

        Raises:
            TypeError, KeyError, ValueError, AttributeError: the value does not come from `to_json`.
        """
        traffic = cls(**saved)
        traffic.open = {id_: _open_call(*call) for id_, call in saved["open"].items()}
        traffic.requests = [(_time(until), _count(count)) for until, count in saved["requests"]]
        traffic.tokens = [(_time(until), _count(count)) for until, count in saved["tokens"]]
        traffic.line = {gate: _time(kept) for gate, kept in saved["line"].items()}
        traffic.processes = {gate: asdict(ProcessIdentity.from_json(one)) for gate, one in saved["processes"].items()}
        _time(traffic.paused_until)
        _time(traffic.lowered_at)
        _count(traffic.successes)
        if traffic.allowance is not None and _count(traffic.allowance) < 1:
            raise ValueError("no call is allowed")
        return traffic

    # --- what there may be ------------------------------------------------------------------------------------------

    def _why_not(self, limits: RateLimits, tokens: int, now: float) -> AdmissionDelay | None:
        if self.paused_until > now:
            return AdmissionDelay("the far side asked for a pause", self.paused_until - now)
        if (most := self.allowed(limits)) <= len(self.open):
            return AdmissionDelay(f"{len(self.open)} calls are open of the {most} allowed at a time")
        if limits.requests is not None and (used := self.requests_in_window(limits, now)) >= limits.requests:
            over = used + 1 - limits.requests
            return AdmissionDelay(
                f"{used} requests of {limits.requests} are made", _time_until(self.requests, over, now)
            )
        if limits.tokens is not None and (used := self.tokens_in_window(now)) + tokens > limits.tokens:
            over = used + tokens - limits.tokens
            return AdmissionDelay(
                f"{used} tokens of {limits.tokens} are used, and {tokens} wanted", _time_until(self.tokens, over, now)
            )
        return None

    def _grow(self, limits: RateLimits) -> None:
        if self.allowance is None or self.allowance >= limits.max_concurrency:
            return
        self.successes += 1
        if self.successes >= self.allowance:
            self.allowance, self.successes = self.allowance + 1, 0

    def _count(self, limits: RateLimits, call: InFlightCall, now: float, tokens: int) -> None:
        grain = limits.window_s / WINDOW_BUCKETS
        arrived = min(now, call.sent + MAX_TRANSIT_S)
        _add(self.requests, math.ceil((arrived + limits.window_s) / grain) * grain, 1)
        _add(self.tokens, math.ceil((now + limits.window_s) / grain) * grain, tokens)

    def _forget_the_past(self, limits: RateLimits, now: float) -> None:
        self.line = {gate: kept for gate, kept in self.line.items() if kept > now}
        for call in [id_ for id_, one in self.open.items() if one.ends <= now]:
            self.settle(limits, call, now, outcome="failed")
        self.requests = [(until, count) for until, count in self.requests if until > now]
        self.tokens = [(until, count) for until, count in self.tokens if until > now]
        at_work = {*self.line, *(call.gate for call in self.open.values())}
        self.processes = {gate: process for gate, process in self.processes.items() if gate in at_work}


_NUMBERS = (float, int)


def _open_call(gate: Any, tokens: Any, sent: Any, ends: Any) -> InFlightCall:
    if not isinstance(gate, str):
        raise TypeError(f"{gate!r:.100} is no name of a gate")
    return InFlightCall(gate, _count(tokens), _time(sent), _time(ends))


def _time(saved: Any) -> float:
    if type(saved) not in _NUMBERS or not math.isfinite(saved):
        raise TypeError(f"{saved!r:.100} is no time")
    return float(saved)


def _count(saved: Any) -> int:
    if type(saved) is not int or saved < 0:
        raise TypeError(f"{saved!r:.100} is no count")
    return saved


def _add(counts: list[tuple[float, int]], until: float, count: int) -> None:
    if not count:
        return
    for place, (other, so_far) in enumerate(counts):
        if other == until:
            counts[place] = (until, so_far + count)
            return
    counts.append((until, count))


def _time_until(counts: list[tuple[float, int]], over: int, now: float) -> float | None:
    """Return the seconds until this many ended calls or tokens expire; None if running calls must end first."""
    for until, count in sorted(counts):
        over -= count
        if over <= 0:
            return until - now
    return None
