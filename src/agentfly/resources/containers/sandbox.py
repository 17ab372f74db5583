"""Sandbox: one container on one backend, as far as backends differ."""

from __future__ import annotations

from abc import ABC, abstractmethod

from agentfly.resources.containers.command import Command, Outcome
from agentfly.resources.containers.spec import ContainerSpec


class Sandbox(ABC):
    """What a backend makes of a spec. `Container` drives it, and calls one of start, reset and end at a time.

    A backend never fails a command for what the command does: that is its outcome. What it raises is infrastructure's.
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
        """Kill every process and remove every trace; return when all are gone. Safe to call again, and at any time.

        Raises:
            OSError: something of it cannot be removed.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it takes commands, as far as is known."""

    @abstractmethod
    async def run(self, command: Command, timeout: float) -> Outcome:
        """Run a command and wait for its end, for at most ``timeout`` seconds; then it is killed with all it started.

        Those that do not ask for a process of their own run in the session, one after the other. Processes that a
        command left behind never hold the call open.

        Raises:
            ResourceDied: the sandbox ended before the command did.
            ResourceError: the backend has no room for the command's input.
        """
