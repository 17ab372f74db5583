"""Backend: one way to run containers, and the choice among those that there are."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from agentfly.errors import PrerequisiteError, ResourceUnreachable
from agentfly.resources.containers.bubblewrap import scratch
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.sandbox import Sandbox
from agentfly.resources.containers.spec import BACKENDS, ContainerSpec
from agentfly.resources.registry import load
from agentfly.threads.pool import on_thread


class Backend(ABC):
    """A program that isolates, as this process uses it.

    Attributes:
        name: what a spec calls it.
        works_in: the process in which `probe` has found that it works, and answers at once by now; 0 for none.
    """

    name: ClassVar[str]
    works_in: int = 0

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


def backend(name: str) -> Backend:
    """The backend of a name in this process; nothing is tried yet."""
    with _loading:
        if name not in _loaded:
            _loaded[name] = load(BACKENDS[name].address)()
        return _loaded[name]


def candidates(spec: ContainerSpec) -> list[str]:
    """The names of the backends that may serve a spec, best first: those that take its kind of image."""
    if spec.backend != "auto":
        return [spec.backend]
    return [name for name, entry in BACKENDS.items() if spec.image_kind in entry.takes]


async def choose(spec: ContainerSpec) -> Backend:
    """The best backend that works on this machine and does what a spec asks. No other one after it is loaded.

    One that isolates fully comes before one that does not, though the spec may allow that.

    Raises:
        PrerequisiteError: there is none. The message says for each what is missing.
    """
    first = _loaded.get(candidates(spec)[0])
    if first is not None and first.works_in == os.getpid() and _serves(first, spec):
        return first
    return await on_thread(_choose, spec)


def traces(spec: ContainerSpec, instance: str) -> dict[str, Any]:
    """For each backend that may come to have an instance, by name, what it needs to remove it.

    Nothing is loaded for it, which would hold up the event loop: an image that is prepared is so by a backend that was
    chosen for it, and those that serve an image without preparation, the host's, leave the same traces.
    """
    names = [name for name in candidates(spec) if name in _loaded]
    if not names and spec.image_kind == "host":
        return {"bubblewrap": scratch.traces(instance)}
    return {name: backend(name).traces(spec, instance) for name in names or candidates(spec)}


def _serves(candidate: Backend, spec: ContainerSpec) -> bool:
    """Whether a backend does what a spec asks, and isolates fully."""
    found = candidate.probe()
    try:
        found.check(spec)
    except PrerequisiteError:
        return False
    return not found.not_isolated


def _choose(spec: ContainerSpec) -> Backend:
    complaints = []
    weak = None
    for candidate in map(backend, candidates(spec)):
        found = candidate.probe()
        try:
            found.check(spec)
        except PrerequisiteError as error:
            complaints.append(str(error))
        else:
            candidate.works_in = os.getpid()
            if not found.not_isolated:
                return candidate
            weak = weak or candidate
    if weak is not None:
        return weak
    raise PrerequisiteError("\n".join([*_about_a_name(spec), *complaints]))


def _about_a_name(spec: ContainerSpec) -> list[str]:
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
            backend(name).reap(left)
        except Exception as error:
            failures.append(error)
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, ResourceUnreachable))
