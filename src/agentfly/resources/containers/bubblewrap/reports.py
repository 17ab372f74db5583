"""Reports: what the shell of a sandbox says of itself, read with bounded work whatever is written there."""

from __future__ import annotations

import asyncio
import os
import re
import select
from collections import deque
from collections.abc import Callable

from agentfly.resources.containers.allowance import Allowance

AT_ONCE = 1024
"""Bytes that are read before others get their turn. What fills it is no shell of ours."""
LOOKUPS_AT_ONCE = 4
"""Reports of a process, which is then looked for, that are heeded before others get their turn."""

_PAUSE_S = 0.005
_OF_A_PROCESS = b"efh"
_LOOKUP = 1024  # what such a report uses up, in bytes
_LEAST, _PER_SECOND, _PER_REQUEST = 64 * 1024, 16 * 1024, 16 * 1024  # bytes; traps of the session may print there, too
_LONGEST = 256
_REPORT = re.compile(rb"([bdefh]) ([\d ]{1,64})$")  # what precedes it on the line, a trap of the session has printed

Report = Callable[[bytes, list[int]], None]


class Reports:
    """The host's end of the pipe on which a shell reports, a line each.

    Any process of the sandbox can write there. So each turn of the event loop takes a bounded number of bytes and of
    reports, and who writes more than a shell has to say is told off: `flooded` is called, once, and nothing is read
    after that.
    """

    def __init__(
        self, descriptor: int, *, report: Report, ended: Callable[[], None], flooded: Callable[[], None]
    ) -> None:
        """Begin to read.

        Args:
            descriptor: the pipe, which does not block, and is closed by somebody else after `close`.
            report: called with the word and the numbers of each report.
            ended: called when nobody can write there any more.
            flooded: called when far more was written than a shell writes.
        """
        self._descriptor = descriptor
        self._report, self._ended, self._flooded = report, ended, flooded
        self._loop = asyncio.get_running_loop()
        self._allowance = Allowance(_LEAST, per_second=_PER_SECOND, per_request=_PER_REQUEST)
        self._rest = b""  # of a line
        self._lines: deque[bytes] = deque()  # that were read and not heeded yet
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._loop.add_reader(descriptor, self._readable)

    def asked(self) -> None:
        """The shell was asked for something, and will report on it."""
        self._allowance.asked()

    def look(self) -> None:
        """Read what there is by now, without waiting for the event loop to notice."""
        if self._pause is None and not self._closed and self._poll.poll(0):
            self._readable()

    def close(self) -> None:
        """Read no more."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._descriptor)

    def _readable(self) -> None:
        try:
            chunk = os.read(self._descriptor, AT_ONCE)
        except BlockingIOError:
            return
        if not chunk:
            self.close()
            self._ended()
            return
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()[-_LONGEST:]
        self._lines.extend(lines)
        if self._used_up(len(chunk)):
            return
        self._heed()
        if not self._closed and (self._lines or len(chunk) == AT_ONCE):
            self._loop.remove_reader(self._descriptor)
            self._pause = self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._heed()
        if self._closed:
            return
        if self._lines:
            self._pause = self._loop.call_later(_PAUSE_S, self._go_on)
        else:
            self._pause = None
            self._loop.add_reader(self._descriptor, self._readable)

    def _heed(self) -> None:
        """Pass reports on, as many as may be before others get their turn."""
        lookups = 0
        while self._lines and not self._closed:
            found = _REPORT.search(self._lines[0])
            if found is not None and found[1] in _OF_A_PROCESS:
                lookups += 1
                if lookups > LOOKUPS_AT_ONCE or self._used_up(_LOOKUP):
                    return
            self._lines.popleft()
            if found is not None:
                self._report(found[1], [int(number) for number in found[2].split()])

    def _used_up(self, amount: int) -> bool:
        if self._allowance.take(amount):
            return False
        self.close()
        self._flooded()
        return True
