"""Backend and Sandbox: the contract of container backends, and the choice of one for a spec."""

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


class Sandbox(ABC):
    """One container on one backend, driven by `Container`.

    `Container` calls one of start, reset, stop, freeze, thaw and fork at a time. It calls freeze, thaw, fork and port
    only if the backend's capabilities allow them.

    A failed command is not an error of the backend: its outcome says how it ended. A backend raises errors for
    infrastructure failures, and `SandboxEnded` if processes inside caused the end of the sandbox.
    """

    def __init__(self, spec: ContainerSpec, instance: str) -> None:
        """Create a handle; nothing is started yet.

        Args:
            spec: the container to start.
            instance: its name, unique on the machine.
        """
        self.spec = spec
        self.instance = instance

    @abstractmethod
    async def start(self) -> None:
        """Start it with an empty private layer, its limits, and a session that takes commands.

        The start may fail or be cancelled at any point. `stop` then removes everything that was created.

        Raises:
            ResourceStartError: it did not start. The message has the backend's output.
            PrerequisiteError: the machine does not support the spec.
        """

    async def reset(self) -> None:
        """Return to the state after `start`: earlier processes and files are gone.

        Raises:
            ResourceStartError: under the same conditions as in `start`.
        """
        await self.stop()
        await self.start()

    @abstractmethod
    async def stop(self) -> None:
        """Kill every process, including frozen ones, and remove all resources. Return when they are gone. Idempotent.

        Raises:
            OSError: a part of it cannot be removed.
        """

    @property
    def workdir(self) -> str:
        """The directory, as a path inside, in which the shell starts."""
        return self.spec.workdir

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it takes commands, or would take them if thawed, as far as known.

        A sandbox that was stopped for flooding still counts as alive. Each call then raises `SandboxFlooded`, and a
        reset replaces the sandbox.
        """

    @abstractmethod
    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """Run a command and wait for it. After ``timeout`` seconds, kill it and every process it started.

        Commands without `new_process` run in the session, one at a time. Processes that a command leaves running do not
        delay the return. Time while the sandbox is frozen does not count.

        Raises:
            ResourceDied: the sandbox ended before the command did.
            SandboxEnded: processes inside caused the end of the sandbox.
            ResourceError: the backend has no room for the command's input.
        """

    async def freeze(self) -> None:
        """Suspend every process. Return when all are suspended. Idempotent."""
        raise self._unsupported("freeze")

    async def thaw(self) -> None:
        """Resume every process. Return when all run. Idempotent."""
        raise self._unsupported("thaw")

    async def fork(self) -> SnapshotImage:
        """Snapshot all files at one moment. The sandbox and its processes continue.

        Raises:
            ToolError: the files are too many, or nested too deeply, to copy.
            ResourceError: there is no room for the snapshot.
            ResourceDied: the sandbox is gone.
        """
        raise self._unsupported("fork")

    async def port(self, inside: int) -> tuple[str, int]:
        """Return the host and port by which this machine reaches a TCP port inside.

        They are valid until the sandbox ends.

        Args:
            inside: one of the spec's ``ports``.

        Raises:
            ResourceDied: the sandbox is gone.
        """
        raise self._unsupported("reach a port of")

    def _unsupported(self, what: str) -> PrerequisiteError:
        return PrerequisiteError(f"The backend of {self.instance} cannot {what} a container here.")


class Backend(ABC):
    """A program that isolates sandboxes, as used by this process.

    Attributes:
        name: its name in a spec.
        probed_in_pid: the id of the process in which `probe` succeeded and now returns at once; 0 for none.
    """

    name: ClassVar[str]
    probed_in_pid: int = 0

    @abstractmethod
    def probe(self) -> Capabilities:
        """Return its capabilities on this machine, found by one trial. The first call may block for a moment."""

    @abstractmethod
    async def prepare(self, spec: ContainerSpec) -> None:
        """Fetch or unpack a spec's image. Return at once if that was done before.

        It is called after a successful `probe` and before each start. Many sandboxes and processes may call it
        concurrently.

        Raises:
            ResourceStartError: the image does not exist or is not an image.
        """

    @abstractmethod
    def sandbox(self, spec: ContainerSpec, instance: str) -> Sandbox:
        """Return a sandbox that is not started. It is called after a successful `probe`."""

    @abstractmethod
    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """Return the data, as JSON values, with which `reap` removes an instance if this process dies.

        The data is known before the start.
        """

    @abstractmethod
    def reap(self, traces: dict[str, Any]) -> None:
        """Kill and remove exactly what the traces of an instance name. It may block.

        An instance that is already gone is not an error.

        Raises:
            Exception: a part of it may still exist.
        """


_loaded: dict[str, Backend] = {}
_loading = threading.Lock()


def get_backend(name: str) -> Backend:
    """Return the backend of this process with a name. This does not probe it."""
    with _loading:
        if name not in _loaded:
            _loaded[name] = import_object(BACKENDS[name].address)()
        return _loaded[name]


def candidate_backends(spec: ContainerSpec) -> list[str]:
    """Return the names of the backends that support a spec's kind of image, best first."""
    if spec.backend != "auto":
        return [spec.backend]
    return [name for name, entry in BACKENDS.items() if spec.image_kind in entry.image_kinds]


async def select_backend(spec: ContainerSpec) -> Backend:
    """Return the best backend that works on this machine and supports a spec. Later candidates are not imported.

    A backend with full isolation is preferred to one with weak isolation, even if the spec accepts weak isolation.

    Raises:
        PrerequisiteError: no backend supports the spec. The message says what each backend lacks.
    """
    first = _loaded.get(candidate_backends(spec)[0])
    if first is not None and first.probed_in_pid == os.getpid() and _fully_supports(first, spec):
        return first
    return await run_in_thread(_choose, spec)


def traces(spec: ContainerSpec, instance: str) -> dict[str, Any]:
    """Return, by backend name, the data with which each backend that may run an instance can remove it.

    Importing a backend would block the event loop. If the image was prepared, its backend is already loaded. All
    backends for the host image leave the same traces, so these need no import.
    """
    names = [name for name in candidate_backends(spec) if name in _loaded]
    if not names and spec.image_kind == "host":
        return {"bubblewrap": runtime_directory.traces(instance)}
    return {name: get_backend(name).traces(spec, instance) for name in names or candidate_backends(spec)}


def _fully_supports(candidate: Backend, spec: ContainerSpec) -> bool:
    """Return whether a backend supports a spec with full isolation."""
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
    """Return a hint about an image name that no backend accepts; empty for other kinds of image."""
    if spec.image_kind != "name" or spec.backend != "auto":
        return []
    here = Path(spec.image).absolute()
    if here.exists():
        return [f"ContainerSpec(image={spec.image!r}) is an image's name. If {here} is meant, write this whole path."]
    return [f"ContainerSpec(image={spec.image!r}): an image by name needs one of docker, podman and enroot."]


def reap(traces: dict[str, Any]) -> None:
    """Remove what a dead process left of a container, by the traces of each backend that may have run it.

    Raises:
        Exception: the first failure, after all backends were tried. It is `ResourceUnreachable` only if there was no
            other failure.
    """
    failures: list[Exception] = []
    for name, left in traces.items():
        try:
            get_backend(name).reap(left)
        except Exception as error:
            failures.append(error)
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, ResourceUnreachable))
