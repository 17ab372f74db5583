"""Whether the other side of a descriptor is gone, asked of the kernel at once."""

from __future__ import annotations

import select

_GONE = select.POLLHUP | select.POLLRDHUP | select.POLLERR


def hung_up(descriptor: int) -> bool:
    """Whether the other end of a socket has been closed, though nobody has read as far as that. A microsecond's work.

    The end of a process closes its sockets, so this shows it before any event of a loop does.
    """
    return _polled(descriptor, _GONE)


def has_exited(pidfd: int) -> bool:
    """Whether a process has ended, by a pidfd (pidfd_open(2))."""
    return _polled(pidfd, select.POLLIN)


def _polled(descriptor: int, events: int) -> bool:
    polling = select.poll()
    polling.register(descriptor, events)
    return any(found & (events | select.POLLNVAL) for _, found in polling.poll(0))
