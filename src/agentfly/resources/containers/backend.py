"""Sandbox: one container on one backend, as far as backends differ.

Backend: one way to run containers, and the choice among those that there are.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from agentfly.core.errors import PrerequisiteError, ResourceUnreachable
from agentfly.core.threads.pool import run_in_thread
from agentfly.resources.containers import runtime_directory
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.command import Command, CommandOutcome
from agentfly.resources.containers.spec import BACKENDS, ContainerSpec, SnapshotImage
from agentfly.resources.kind import import_object

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
        await self.stop()
        await self.start()

    @abstractmethod
    async def stop(self) -> None:
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
    async def run(self, command: Command, timeout: float) -> CommandOutcome:
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
        raise self._unsupported("freeze")

    async def thaw(self) -> None:
        """Let every process go on; return when they do. Fine if they do."""
        raise self._unsupported("thaw")

    async def fork(self) -> SnapshotImage:
        """Make a snapshot of all files, as of one moment, while the sandbox and its processes live on.

        Raises:
            ToolError: the files are more, or lie deeper, than can be copied.
            ResourceError: there is no room for it.
            ResourceDied: the sandbox is gone.
        """
        raise self._unsupported("fork")

    async def port(self, inside: int) -> tuple[str, int]:
        """Host and port by which this machine reaches a TCP port inside, one of the spec's ``ports``, until the end.

        Raises:
            ResourceDied: the sandbox is gone.
        """
        raise self._unsupported("reach a port of")

    def _unsupported(self, what: str) -> PrerequisiteError:
        return PrerequisiteError(f"The backend of {self.instance} cannot {what} a container here.")


class Backend(ABC):
    """A program that isolates, as this process uses it.

    Attributes:
        name: what a spec calls it.
        probed_in_pid: the process in which `probe` has found that it works, and answers at once by now; 0 for none.
    """

    name: ClassVar[str]
    probed_in_pid: int = 0

    @abstractmethod
    def probe(self) -> Capabilities:
        """What it can do on this machine, found by trying, once. It may block for a moment."""

    @abstractmethod
    async def prepare(self, spec: ContainerSpec) -> None:
        """Fetch or unpack a spec's image, where that is to be done, and come back at once where it has been.

        Called after `probe` has found that the backend works, before the start of each sandbox; for many sandboxes at
        the same time, and from many processes.

        Raises:
            ResourceStartError: the image is not there, or is none.
        """

    @abstractmethod
    def sandbox(self, spec: ContainerSpec, instance: str) -> Sandbox:
        """A sandbox, not started. Called after `probe` has found that the backend works."""

    @abstractmethod
    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """What `reap` needs to remove an instance should this process die; JSON-able, and known before its start."""

    @abstractmethod
    def reap(self, traces: dict[str, Any]) -> None:
        """Kill and remove exactly what the traces of an instance name. Fine if it is gone already. It may block.

        Raises:
            Exception: something of it may still be there.
        """


_loaded: dict[str, Backend] = {}
_loading = threading.Lock()


def get_backend(name: str) -> Backend:
    """The backend of a name in this process; nothing is tried yet."""
    with _loading:
        if name not in _loaded:
            _loaded[name] = import_object(BACKENDS[name].address)()
        return _loaded[name]


def candidate_backends(spec: ContainerSpec) -> list[str]:
    """The names of the backends that may serve a spec, best first: those that take its kind of image."""
    if spec.backend != "auto":
        return [spec.backend]
    return [name for name, entry in BACKENDS.items() if spec.image_kind in entry.image_kinds]


async def select_backend(spec: ContainerSpec) -> Backend:
    """The best backend that works on this machine and does what a spec asks. No other one after it is loaded.

    One that isolates fully comes before one that does not, though the spec may allow that.

    Raises:
        PrerequisiteError: there is none. The message says for each what is missing.
    """
    first = _loaded.get(candidate_backends(spec)[0])
    if first is not None and first.probed_in_pid == os.getpid() and _fully_supports(first, spec):
        return first
    return await run_in_thread(_choose, spec)


def traces(spec: ContainerSpec, instance: str) -> dict[str, Any]:
    """For each backend that may come to have an instance, by name, what it needs to remove it.

    Nothing is loaded for it, which would hold up the event loop: an image that is prepared is so by a backend that was
    chosen for it, and those that serve an image without preparation, the host's, leave the same traces.
    """
    names = [name for name in candidate_backends(spec) if name in _loaded]
    if not names and spec.image_kind == "host":
        return {"bubblewrap": runtime_directory.traces(instance)}
    return {name: get_backend(name).traces(spec, instance) for name in names or candidate_backends(spec)}


def _fully_supports(candidate: Backend, spec: ContainerSpec) -> bool:
    """Whether a backend does what a spec asks, and isolates fully."""
    found = candidate.probe()
    try:
        found.check(spec)
    except PrerequisiteError:
        return False
    return not found.isolation_gaps


def _choose(spec: ContainerSpec) -> Backend:
    complaints = []
    weak = None
    for candidate in map(get_backend, candidate_backends(spec)):
        found = candidate.probe()
        try:
            found.check(spec)
        except PrerequisiteError as error:
            complaints.append(str(error))
        else:
            candidate.probed_in_pid = os.getpid()
            if not found.isolation_gaps:
                return candidate
            weak = weak or candidate
    if weak is not None:
        return weak
    raise PrerequisiteError("\n".join([*_image_name_hint(spec), *complaints]))


def _image_name_hint(spec: ContainerSpec) -> list[str]:
    """What there is to say of an image by its name where nothing takes it; nothing of other images."""
    if spec.image_kind != "name" or spec.backend != "auto":
        return []
    here = Path(spec.image).absolute()
    if here.exists():
        return [f"ContainerSpec(image={spec.image!r}) is an image's name. If {here} is meant, write this whole path."]
    return [f"ContainerSpec(image={spec.image!r}): an image by name needs one of docker, podman and enroot."]


def reap(traces: dict[str, Any]) -> None:
    """Remove what a dead process left of a container, by the traces of each backend that may have had it.

    Raises:
        Exception: what the first backend that failed raised, after all have been tried. `ResourceUnreachable` only
            where no other failure is known.
    """
    failures: list[Exception] = []
    for name, left in traces.items():
        try:
            get_backend(name).reap(left)
        except Exception as error:
            failures.append(error)
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, ResourceUnreachable))
