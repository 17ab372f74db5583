"""Sandbox: one container on one backend, as far as backends differ."""

from __future__ import annotations

from abc import ABC, abstractmethod

from agentfly.errors import PrerequisiteError
from agentfly.resources.containers.command import Command, Outcome
from agentfly.resources.containers.snapshot import SnapshotImage
from agentfly.resources.containers.spec import ContainerSpec

FLOODED = (
    "The sandbox was ended, because processes in it flooded the channels of its shell. No command can be run in it any "
    "more, and its files are lost."
)
"""What is said of a sandbox that was ended for that."""


class Sandbox(ABC):
    """What a backend makes of a spec. `Container` drives it, and calls one of start, reset, end, freeze, thaw and fork
    at a time; freeze, thaw, fork and port only where the backend's capabilities say that it can.

    A backend never fails a command for what the command does: that is its outcome. What it raises is infrastructure's,
    but for `SandboxEnded`: then processes inside have brought it to its end.
    """

    def __init__(self, spec: ContainerSpec, instance: str) -> None:
        """Make a handle; nothing is started yet.

        Args:
            spec: what to start.
            instance: its name, unique on the machine.
        """
        self.spec = spec
        self.instance = instance

    @abstractmethod
    async def start(self) -> None:
        """Bring it up, with an empty private layer, inside its limits, with a session that takes commands.

        It may fail or be cancelled at any point; `end` then removes whatever had been made.

        Raises:
            ResourceStartError: it did not come up; the message has the backend's words.
            PrerequisiteError: the machine cannot do what the spec asks.
        """

    async def reset(self) -> None:
        """Come back to the state after `start`: no process and no file of the one before.

        Raises:
            ResourceStartError: as `start` does.
        """
        await self.end()
        await self.start()

    @abstractmethod
    async def end(self) -> None:
        """Kill every process, frozen ones too, and remove every trace; return when all are gone. Safe to call again,
        and at any time.

        Raises:
            OSError: something of it cannot be removed.
        """

    @property
    def workdir(self) -> str:
        """Where the shell starts, as it is called inside."""
        return self.spec.workdir

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it takes commands, or would if it were not frozen, as far as is known.

        One that was ended for what its processes did counts as alive: who has it is told so by each call, and a reset
        makes it new.
        """

    @abstractmethod
    async def run(self, command: Command, timeout: float) -> Outcome:
        """Run a command and wait for its end, for at most ``timeout`` seconds; then it is killed with all it started.

        Those that do not ask for a process of their own run in the session, one after the other. Processes that a
        command left behind never hold the call open. Time during which it is frozen does not count.

        Raises:
            ResourceDied: the sandbox ended before the command did.
            SandboxEnded: it was ended for what its processes did.
            ResourceError: the backend has no room for the command's input.
        """

    async def freeze(self) -> None:
        """Stop every process where it is; return when all are. Fine if they are."""
        raise self._cannot("freeze")

    async def thaw(self) -> None:
        """Let every process go on; return when they do. Fine if they do."""
        raise self._cannot("thaw")

    async def fork(self) -> SnapshotImage:
        """Make a snapshot of all files, as of one moment, while the sandbox and its processes live on.

        Raises:
            ToolError: the files are more, or lie deeper, than can be copied.
            ResourceError: there is no room for it.
            ResourceDied: the sandbox is gone.
        """
        raise self._cannot("fork")

    async def port(self, inside: int) -> tuple[str, int]:
        """Host and port by which this machine reaches a TCP port inside, one of the spec's ``ports``, until the end.

        Raises:
            ResourceDied: the sandbox is gone.
        """
        raise self._cannot("reach a port of")

    def _cannot(self, what: str) -> PrerequisiteError:
        return PrerequisiteError(f"The backend of {self.instance} cannot {what} a container here.")
