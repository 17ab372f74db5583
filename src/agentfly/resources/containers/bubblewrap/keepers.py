"""Keepers: the processes that a sandbox's shell consists of, beside process 1, as the host knows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from agentfly.resources.containers.bubblewrap.children import Children
from agentfly.resources.containers.bubblewrap.launcher import Launcher
from agentfly.resources.containers.bubblewrap.processes import ProcessNamespace
from agentfly.resources.processes import children

_FEW = 16  # children among which one is looked for at once; among more, on another thread
_LOOKS = 3
_REST = 3  # times as long as a look took, until the next one


@dataclass(frozen=True)
class _Said:
    """What was reported, and nobody has looked into: process ids inside.

    Args:
        session: of the session, and the command that the one before had been asked and did not begin.
        starter: of what starts commands in processes of their own.
    """

    session: tuple[int, int] | None = None
    starter: int | None = None


@dataclass(frozen=True)
class _Seen:
    """What a look has shown: process ids of the host.

    Args:
        session: of the session that was reported; None if it is no more.
        starter: of the starter that was reported; None if it is no more.
        starter_lived: whether the one before is still there, so that the report is not heeded.
        alone: the ids inside of the children of process 1, once the starter was reported.
    """

    session: int | None
    starter: int | None
    starter_lived: bool
    alone: set[int]


class Keepers:
    """The session, and the starter of commands that have processes of their own.

    A process says who it is inside. To find it on the host takes a look at each child of process 1, of which there may
    be thousands, and a process that means ill may say so any number of times. So only the last report of each is looked
    into; where children are many that is done on another thread, for a small share of its time.

    Attributes:
        session: the host's process id; None while there is none.
        starter: the same.
    """

    def __init__(
        self,
        processes: ProcessNamespace,
        launcher: Launcher,
        *,
        session_began: Callable[[int], None],
        starter_began: Callable[[set[int]], None],
    ) -> None:
        """Begin with none.

        Args:
            processes: those of the sandbox.
            launcher: has the other thread.
            session_began: called when a session is there, with the command that the one before was asked, and did not
                begin.
            starter_began: called when a starter has taken the place of one that ended, with the ids inside of the
                processes that process 1 has now.
        """
        self.session: int | None = None
        self.starter: int | None = None
        self._processes, self._launcher = processes, launcher
        self._session_began, self._starter_began = session_began, starter_began
        self._below_first = Children(processes.first)
        self._below_session: Children | None = None
        self._said = _Said()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def both(self) -> set[int]:
        """The host's ids of those that are there."""
        return {pid for pid in (self.session, self.starter) if pid is not None}

    def children(self, *, of_session: bool) -> frozenset[int]:
        """The children of process 1, and with them those of the session if they are asked for."""
        found = self._below_first.pids()
        return found | self._below_session.pids() if of_session and self._below_session is not None else found

    @property
    def session_lives(self) -> bool:
        """Whether the session is there, and has not ended."""
        return self.session is not None and self.session in self._below_first.pids()

    def session_reported(self, inside: int, asked: int) -> None:
        """A session has said that it is ready."""
        self._said = _Said((inside, asked), self._said.starter)
        self._look_into()

    def starter_reported(self, inside: int) -> None:
        """A starter has said that it is ready."""
        self._said = _Said(self._said.session, inside)
        self._look_into()

    def session_ended(self) -> None:
        """The session is no more, nor is one that has just been reported."""
        self.session = None
        self._said = _Said(None, self._said.starter)
        if self._below_session is not None:
            self._below_session.close()
            self._below_session = None

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self._below_first.close()
        if self._below_session is not None:
            self._below_session.close()

    def _look_into(self) -> None:
        """Find out who has just reported, at once if there are few who it can be."""
        if self._looking is not None:
            return  # who looks will go on to this one
        if len(self._below_first.pids()) <= _FEW:
            said = self._said
            self._take_up(said, self._look(said))
        else:
            self._looking = asyncio.create_task(self._look_aside())

    async def _look_aside(self) -> None:
        try:
            while not self._closed and (said := self._said) != _Said():
                began = time.monotonic()
                self._take_up(said, await self._launcher.aside(self._look, said))
                await asyncio.sleep(_REST * (time.monotonic() - began))  # the thread is for all sandboxes
        finally:
            self._looking = None

    def _look(self, said: _Said) -> _Seen:
        session = starter = None
        lived, alone = False, set[int]()
        if said.session is not None:
            session = self._child(said.session[0])
        if said.starter is not None:
            first = self._processes.first
            lived = self.starter is not None and self.starter in children(first)
            if not lived:
                starter = self._child(said.starter)
                alone = self._processes.ids_inside(first)
        return _Seen(session, starter, lived, alone)

    def _child(self, inside: int) -> int | None:
        """The host's id of a child of process 1. Looked for more than once: while others end, one may be left out."""
        tries = (self._processes.find(inside, self._processes.first) for _ in range(_LOOKS))
        return next((pid for pid in tries if pid is not None), None)

    def _take_up(self, said: _Said, seen: _Seen) -> None:
        """Take up what a look has shown, as far as nothing else was said meanwhile."""
        if self._closed:
            return
        if said.starter is not None and said.starter == self._said.starter:
            self._said = _Said(self._said.session)
            if not seen.starter_lived:
                self.starter = seen.starter
                self._starter_began(seen.alone)
        if said.session is not None and said.session is self._said.session:
            self._said = _Said(None, self._said.starter)
            if seen.session is not None:  # else it has ended since, which will be reported
                self.session = seen.session
                self._below_session = Children(seen.session)
                self._session_began(said.session[1])
