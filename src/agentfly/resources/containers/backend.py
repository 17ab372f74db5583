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

FLOODED = (
    "The sandbox was ended, because processes in it flooded the channels of its shell. No command can be run in it any "
    "more, and its files are lost."
)
"""What is said of a sandbox that was ended for that."""


class Sandbox(ABC):
    """One container on one backend, driven by `Container`.

    `Container` calls one of start, reset, stop, freeze, thaw and fork at a time. It calls freeze, thaw, fork and port
    only
    if the backend's capabilities allow them. A backend never raises for what a command does: that is the command's
    outcome.
    It raises for infrastructure failures, and `SandboxEnded` if processes inside caused the end of the sandbox.
    """

    def __init__(self, spec: ContainerSpec, instance: str) -> None:
        """Create a handle; nothing is started yet.

        Args:
            spec: what to start.
            instance: its name, unique on the machine.
        """
        self.spec = spec
        self.instance = instance

    @abstractmethod
    async def start(self) -> None:
        """Start it with an empty private layer, its limits, and a session that takes commands.

        It may fail or be cancelled at any point; `stop` then removes what was created.

        Raises:
            ResourceStartError: it did not start; the message has the backend's output.
            PrerequisiteError: the machine cannot do what the spec asks.
        """

    async def reset(self) -> None:
        """Return to the state after `start`: earlier processes and files are gone.

        Raises:
            ResourceStartError: as `start` does.
        """
        await self.stop()
        await self.start()

    @abstractmethod
    async def stop(self) -> None:
        """Kill every process, frozen ones too, remove all resources, and return when they are gone. Idempotent.

        Raises:
            OSError: something of it cannot be removed.
        """

    @property
    def workdir(self) -> str:
        """Path inside of the directory in which the shell starts."""
        return self.spec.workdir

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it takes commands, or would if thawed, as far as known.

        A sandbox that was stopped for flooding still counts as alive: each call raises `SandboxFlooded`, and a reset
        replaces
        it.
        """

    @abstractmethod
    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """Run a command and wait for it. After ``timeout`` seconds, kill it and every process it started.

        Commands without `new_process` run in the session, one at a time. Processes that a command leaves behind never
        delay the
        return. Time while the sandbox is frozen does not count.

        Raises:
            ResourceDied: the sandbox ended before the command did.
            SandboxEnded: its processes caused its end.
            ResourceError: the backend has no room for the command's input.
        """

    async def freeze(self) -> None:
        """Stop every process; return when all are stopped. Idempotent."""
        raise self._unsupported("freeze")

    async def thaw(self) -> None:
        """Resume every process; return when all run. Idempotent."""
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
        """Host and port by which this machine reaches a TCP port inside, one of the spec's ``ports``, until the sandbox
        ends.

        Raises:
            ResourceDied: the sandbox is gone.
        """
        raise self._unsupported("reach a port of")

    def _unsupported(self, what: str) -> PrerequisiteError:
        return PrerequisiteError(f"The backend of {self.instance} cannot {what} a container here.")


class Backend(ABC):
    """An isolating program, as this process uses it.

    Attributes:
        name: its name in a spec.
        probed_in_pid: the process in which `probe` found that it works and now answers at once; 0 for none.
    """

    name: ClassVar[str]
    probed_in_pid: int = 0

    @abstractmethod
    def probe(self) -> Capabilities:
        """What it can do on this machine, found by one trial. The first call may block for a moment."""

    @abstractmethod
    async def prepare(self, spec: ContainerSpec) -> None:
        """Fetch or unpack a spec's image; return at once if that was done before.

        Called after a successful `probe`, before each start. Many sandboxes and many processes may call it at the same
        time.

        Raises:
            ResourceStartError: the image does not exist or is not an image.
        """

    @abstractmethod
    def sandbox(self, spec: ContainerSpec, instance: str) -> Sandbox:
        """A sandbox, not started. Called after a successful `probe`."""

    @abstractmethod
    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """The JSON-able data that `reap` needs to remove an instance if this process dies. Known before the start."""

    @abstractmethod
    def reap(self, traces: dict[str, Any]) -> None:
        """Kill and remove exactly what an instance's traces name. Fine if it is gone already. It may block.

        Raises:
            Exception: something of it may still exist.
        """


_loaded: dict[str, Backend] = {}
_loading = threading.Lock()


def get_backend(name: str) -> Backend:
    """The backend with a name, in this process. It is not probed yet."""
    with _loading:
        if name not in _loaded:
            _loaded[name] = import_object(BACKENDS[name].address)()
        return _loaded[name]


def candidate_backends(spec: ContainerSpec) -> list[str]:
    """The names of the backends that support a spec's kind of image, best first."""
    if spec.backend != "auto":
        return [spec.backend]
    return [name for name, entry in BACKENDS.items() if spec.image_kind in entry.image_kinds]


async def select_backend(spec: ContainerSpec) -> Backend:
    """The best backend that works on this machine and supports a spec. Backends after it are not imported.

    A backend with full isolation comes before one with weak isolation, even if the spec accepts that.

    Raises:
        PrerequisiteError: no backend supports the spec. The message says for each what is missing.
    """
    first = _loaded.get(candidate_backends(spec)[0])
    if first is not None and first.probed_in_pid == os.getpid() and _fully_supports(first, spec):
        return first
    return await run_in_thread(_choose, spec)


def traces(spec: ContainerSpec, instance: str) -> dict[str, Any]:
    """By backend name, what each backend that may get an instance needs to remove it.

    This imports no backend, because an import would block the event loop. A prepared image has a loaded backend
    already.
    Backends for the host image all leave the same traces.
    """
    names = [name for name in candidate_backends(spec) if name in _loaded]
    if not names and spec.image_kind == "host":
        return {"bubblewrap": runtime_directory.traces(instance)}
    return {name: get_backend(name).traces(spec, instance) for name in names or candidate_backends(spec)}


def _fully_supports(candidate: Backend, spec: ContainerSpec) -> bool:
    """Whether a backend supports a spec with full isolation."""
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
    """A hint about an image name that no backend takes; empty for other images."""
    if spec.image_kind != "name" or spec.backend != "auto":
        return []
    here = Path(spec.image).absolute()
    if here.exists():
        return [f"ContainerSpec(image={spec.image!r}) is an image's name. If {here} is meant, write this whole path."]
    return [f"ContainerSpec(image={spec.image!r}): an image by name needs one of docker, podman and enroot."]


def reap(traces: dict[str, Any]) -> None:
    """Remove what a dead process left of a container, by the traces of each backend that may have had it.

    Raises:
        Exception: the first failure, after all backends were tried. `ResourceUnreachable` only if no other failure is
            known.
    """
    failures: list[Exception] = []
    for name, left in traces.items():
        try:
            get_backend(name).reap(left)
        except Exception as error:
            failures.append(error)
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, ResourceUnreachable))
