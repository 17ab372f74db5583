"""Docker and Podman: containers through the API that both engines implement."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from agentfly.core.errors import AgentFlyError, ResourceError, ResourceStartError
from agentfly.core.threads.pool import THREAD_POOL
from agentfly.resources.containers.backend import Backend
from agentfly.resources.containers.docker.container_config import ContainerConfig
from agentfly.resources.containers.docker.engine import (
    EngineCapabilities,
    capabilities_from_info,
    connect,
    docker_address,
    engine_call,
    podman_address,
    reap_labelled,
)
from agentfly.resources.containers.docker.images import (
    CommittedImages,
    ImageInspection,
    inspect_image,
    pull_if_missing,
    remove_orphaned_images,
)
from agentfly.resources.containers.docker.sandbox import EngineSandbox
from agentfly.resources.containers.spec import ContainerSpec, SnapshotImage, snapshot_name

_PROBE_S = 15.0
_Key = tuple[str, str, str, str]
"""An engine's address, an image, a workdir and a runtime."""


class Docker(Backend):
    """Containers of dockerd.

    Args:
        address: where it listens; by default ``DOCKER_HOST`` or one of its usual sockets.
    """

    name: ClassVar[str] = "docker"
    _cure: ClassVar[str] = (
        "Install and start Docker, see that this user may use its socket (group docker), or set DOCKER_HOST."
    )

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._found: EngineCapabilities | None = None
        self._inspections: dict[_Key, ImageInspection] = {}
        # by event loop, because a lock belongs to one
        self._preparing: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, asyncio.Lock]] = WeakKeyDictionary()
        self._own = CommittedImages()

    @property
    def address(self) -> str | None:
        """Address of the engine's service; None if unknown."""
        return self._address or docker_address()

    def probe(self) -> EngineCapabilities:
        """See `Backend.probe`. After a failure the next call tries again."""
        address = self.address
        if self._found is not None and self._found.address == address:
            return self._found
        if address is None:
            return self._unavailable(f"No socket of {self.name} is there.")
        try:
            # on another thread, because this one may be running an event loop
            self._found = THREAD_POOL.submit(asyncio.run, self._query_engine(address)).result()
        except AgentFlyError as error:
            return self._unavailable(str(error))
        return self._found

    async def prepare(self, spec: ContainerSpec) -> None:
        """See `Backend.prepare`. The image is pulled if the engine has not got it, and looked into."""
        found = self.probe()
        key = self._key(spec, found)
        if key not in self._inspections:
            if spec.image_kind == "snapshot":
                raise ResourceStartError(
                    f"The snapshot {spec.image!r} is not in the engine at {found.address}: it was made by another "
                    "process or engine, or nobody holds the spec that fork() returned."
                )
            locks = self._preparing.setdefault(asyncio.get_running_loop(), {})
            async with locks.setdefault(key, asyncio.Lock()):
                if key not in self._inspections:
                    self._inspections[key] = await self._prepare(spec, found)
        if spec.user == "agent" and self._inspections[key].files_in_workdir:
            raise ResourceStartError(
                f"ContainerSpec(workdir={spec.workdir!r}): the image {spec.image!r} has files there, which the private "
                "directory of the user 'agent' would hide. Name another directory, or set user='root' to work on them."
            )

    async def _prepare(self, spec: ContainerSpec, found: EngineCapabilities) -> ImageInspection:
        async with connect(found.address, found.api_version) as client:
            await remove_orphaned_images(client)
            await pull_if_missing(client, spec.image, self.name)
            return await inspect_image(client, spec.image, spec, self._own, found.address)

    def sandbox(self, spec: ContainerSpec, instance: str) -> EngineSandbox:
        """See `Backend.sandbox`."""
        found = self.probe()
        facts = self._inspections.get(self._key(spec, found))
        if facts is None:
            raise ResourceStartError(
                f"ContainerSpec(image={spec.image!r}) is not prepared in the engine at {found.address}, which was "
                "another one a moment ago. Try again."
            )

        def forked(facts: ImageInspection) -> SnapshotImage:
            return self._register_fork(facts, found.address)

        return EngineSandbox(ContainerConfig(spec, facts), instance, engine=found, own=self._own, forked=forked)

    def _register_fork(self, facts: ImageInspection, address: str) -> SnapshotImage:
        """Name the image of a fork, as the image of others."""
        name = facts.base_image
        key = (address, name, "", "")

        def drop() -> None:
            self._inspections.pop(key, None)
            self._own.schedule_removal(name)

        self._inspections[key] = facts
        return SnapshotImage(self.name, name, drop)

    def traces(self, spec: ContainerSpec, instance: str) -> dict[str, Any]:
        """The engine's address, and the label of everything that belongs to the instance."""
        return {"address": self.address, "instance": instance}

    def reap(self, traces: dict[str, Any]) -> None:
        """See `Backend.reap`."""
        reap_labelled(traces)

    async def _query_engine(self, address: str) -> EngineCapabilities:
        async with connect(address) as client, engine_call(f"Asking the engine at {address} for its version", _PROBE_S):
            try:
                version = await client.version()
                info = await client.system.info()
                return capabilities_from_info(self.name, address, dict(version), dict(info))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise ResourceError(f"What answers at {address} is no container engine ({error!r}).") from error

    def _unavailable(self, why: str) -> EngineCapabilities:
        return EngineCapabilities(backend=self.name, available=False, missing=(f"{why} {self._cure}",))

    def _key(self, spec: ContainerSpec, found: EngineCapabilities) -> _Key:
        """Return the key for the inspection of a spec's image."""
        if (name := snapshot_name(spec.image, self.name)) is not None:
            return (found.address, name, "", "")
        return (found.address, spec.image, spec.workdir, spec.runtime)


class Podman(Docker):
    """Containers of podman, by its service.

    Args:
        address: where it listens; by default ``CONTAINER_HOST`` or one of its usual sockets.
    """

    name: ClassVar[str] = "podman"
    _cure: ClassVar[str] = (
        "Install podman and start its service ('systemctl --user start podman.socket', or 'podman system service "
        "--time=0'), or set CONTAINER_HOST."
    )

    @property
    def address(self) -> str | None:
        """Address of the engine's service; None if unknown."""
        return self._address or podman_address()
