"""A container engine's service: address, calls with a deadline, streams, capabilities, labels, container removal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfly.core.errors import PrerequisiteError, ResourceError, ResourceUnreachable
from agentfly.core.installation import install_command
from agentfly.resources.containers.capabilities import Capabilities
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.containers.stream_shell.channels import Stream
from agentfly.resources.process.procfs import ProcessIdentity

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.stream import Stream as AttachedStream


def docker_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """``DOCKER_HOST``, or the first of dockerd's usual sockets that is there; None if none is."""
    if host := environment.get("DOCKER_HOST"):
        return host
    return _first([Path("/var/run/docker.sock"), Path(environment.get("HOME", "/"), ".docker/run/docker.sock")])


def podman_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """``CONTAINER_HOST``, or the first of the usual sockets of ``podman system service`` that is there."""
    if host := environment.get("CONTAINER_HOST"):
        return host
    own = [Path(runtime, "podman/podman.sock")] if (runtime := environment.get("XDG_RUNTIME_DIR")) else []
    return _first([*own, Path("/run/podman/podman.sock")])


def _first(sockets: list[Path]) -> str | None:
    return next((f"unix://{path}" for path in sockets if _is_socket(path)), None)


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:  # in a directory that this user may not look into, such as the home of another
        return False


CALL_TIMEOUT_S = 60.0
"""Seconds that one call may take. The longest, a start on a machine under load, takes some of them."""


def connect(address: str, api_version: str = "auto") -> Docker:
    """A client for the running event loop; close it.

    Args:
        address: a URL as ``DOCKER_HOST`` has it. ``DOCKER_TLS_VERIFY`` and ``DOCKER_CERT_PATH`` count for ``tcp``.
        api_version: what the service speaks; by default it is asked.

    Raises:
        PrerequisiteError: the client's package is missing, or the address is none that it can reach.
    """
    try:
        from aiodocker import Docker
        from aiodocker.exceptions import DockerError
        from aiohttp import ClientTimeout
    except ImportError as error:
        raise PrerequisiteError(
            f"Containers of docker and podman need the package aiodocker ({error}): {install_command('docker')}."
        ) from error
    timeout = ClientTimeout(total=CALL_TIMEOUT_S, sock_connect=10)
    try:
        return Docker(url=address, api_version=api_version, timeout=timeout)
    except (DockerError, ValueError, RuntimeError, OSError) as error:
        raise PrerequisiteError(
            f"No engine can be reached at {address!r}: {error}. Give an address as 'unix:///var/run/docker.sock' or "
            "'tcp://host:2376'. An engine behind ssh can be given a local socket: "
            "'ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock user@host', and then 'unix:///tmp/docker.sock'."
        ) from error


@asynccontextmanager
async def engine_call(what: str, patience_s: float = CALL_TIMEOUT_S) -> AsyncIterator[None]:
    """Say of every failure of a call what it was for, and give it up after a while.

    Raises:
        ResourceUnreachable: nothing listens at the engine's address.
        ResourceError: the engine refused, did not answer in time, or the connection broke.
    """
    from aiodocker.exceptions import DockerError
    from aiohttp import ClientConnectorError, ClientError

    try:
        async with asyncio.timeout(patience_s):
            yield
    except DockerError as error:
        if isinstance(error.__context__, ClientConnectorError):
            raise ResourceUnreachable(f"{what} failed: {error.message}") from error
        raise ResourceError(f"{what} failed: {error.message} (status {error.status})") from error
    except TimeoutError as error:
        raise ResourceError(f"{what} took longer than {patience_s:g} s, so it was given up.") from error
    except ClientConnectorError as error:
        raise ResourceUnreachable(f"{what} failed: nothing answers there ({error})") from error
    except (ClientError, OSError) as error:
        raise ResourceError(f"{what} failed: the way to the engine is broken ({error!r})") from error


def is_not_found(error: BaseException | None) -> bool:
    """Whether the engine answered that the object does not exist."""
    from aiodocker.exceptions import DockerError

    cause = error.__cause__ if isinstance(error, ResourceError) else error
    return isinstance(cause, DockerError) and cause.status == 404


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities(Capabilities):
    """Capabilities of a container engine that was asked.

    Args:
        address: where its service listens.
        api_version: which version of the API it speaks, such as ``"v1.41"``.
        runtimes: the runtimes that it knows by name; empty if it does not say.
    """

    address: str = ""
    api_version: str = ""
    runtimes: tuple[str, ...] = ()

    def check(self, spec: ContainerSpec) -> None:
        """See `Capabilities.check`."""
        super().check(spec)
        if spec.disk and spec.user == "root":
            raise PrerequisiteError(
                f"ContainerSpec(disk={spec.disk!r}, user='root') asks for a limit on private files, which "
                f"{self.backend} has for the user 'agent' alone: root may write everywhere in the image. Leave disk at "
                "0, or user at 'agent'."
            )
        if spec.runtime and self.runtimes and spec.runtime not in self.runtimes:
            raise PrerequisiteError(
                f"ContainerSpec(runtime={spec.runtime!r}): {self.backend} knows {', '.join(self.runtimes)}. "
                f"Install that one and name it in the engine's configuration, or name one of these."
            )


def capabilities_from_info(
    backend: str, address: str, version: dict[str, Any], info: dict[str, Any]
) -> EngineCapabilities:
    """Return the capabilities that follow from an engine's description of itself.

    Args:
        backend: its name.
        address: address of its service.
        version: its answer to ``/version``.
        info: its answer to ``/info``.
    """
    missing = []
    limits = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "processor time"}
    absent = [words for field, words in limits.items() if not info.get(field)]
    if absent:
        missing.append(
            f"{backend} cannot limit {', '.join(absent)} here, as without root on control groups of version 1: use "
            "version 2 with delegation, or run the engine as root."
        )
    driver, system = info.get("Driver", "?"), info.get("OperatingSystem", "?")
    seccomp = any("seccomp" in option for option in info.get("SecurityOptions") or ())
    return EngineCapabilities(
        backend=backend,
        available=True,
        description=f"{version.get('Version', '?')} at {address}, {driver} on {system}",
        images=("name", "snapshot"),
        memory="cgroup" if info.get("MemoryLimit") else "none",
        pids="cgroup" if info.get("PidsLimit") else "none",
        cpus=bool(info.get("CpuCfsQuota")),
        disk=True,
        network_off=True,
        seccomp_filter=seccomp,
        writable_system=False,
        multiple_users=True,
        ports=True,
        freeze="cgroup",
        fork=True,
        cores=int(info["NCPU"]),
        total_memory=int(info["MemTotal"]),
        named_runtimes=True,
        missing=tuple(missing),
        address=address,
        api_version=f"v{version['ApiVersion']}",
        runtimes=tuple(info.get("Runtimes") or ()),
    )


class EngineStream(Stream):
    """A connection that was upgraded to carry a program's input and outputs."""

    def __init__(self, attached: AttachedStream) -> None:
        """Make a handle of a connection that `open` opens."""
        self._attached = attached
        self._ended = False

    @classmethod
    async def open(cls, attached: AttachedStream) -> EngineStream:
        """Open a connection. Nothing of it is left if that fails or is cancelled."""
        stream = cls(attached)
        try:
            await attached.__aenter__()
        except BaseException:
            await stream.close()
            raise
        return stream

    async def read(self) -> tuple[int, bytes] | None:
        """See `Stream.read`."""
        from aiohttp import ClientError

        try:
            message = await self._attached.read_out()
        except ClientError as error:
            await self.close()
            raise ConnectionResetError(str(error)) from error
        if message is None:
            await self.close()
            return None
        return message.stream, message.data

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        from aiohttp import ClientError

        if self._ended:
            raise BrokenPipeError("the stream has ended")
        try:
            await self._attached.write_in(data)
        except (ClientError, RuntimeError, AssertionError, AttributeError) as error:  # what its library raises then
            raise BrokenPipeError(f"the stream is closed ({error!r})") from error

    async def end_input(self) -> None:
        """See `Stream.end_input`."""
        response = self._attached._resp
        transport = response.connection.transport if response is not None and response.connection else None
        if transport is None or not transport.can_write_eof():
            raise BrokenPipeError("the stream is closed, or cannot be closed on one side")
        transport.write_eof()

    async def close(self) -> None:
        """See `Stream.close`."""
        self._ended = True
        try:
            async with asyncio.timeout(1):
                await self._attached.close()
        except (TimeoutError, AssertionError):
            if (response := self._attached._resp) is not None:
                response.close()  # the other side has closed it, which its library takes for done


INSTANCE = "agentfly.instance"
OWNER = "agentfly.owner"


def instance_labels(instance: str) -> dict[str, str]:
    """Return the labels of everything that belongs to an instance."""
    return {INSTANCE: instance, OWNER: owner_label()}


def instance_filter(instance: str) -> dict[str, list[str]]:
    """A filter of what belongs to an instance, for listings."""
    return {"label": [f"{INSTANCE}={instance}"]}


def owner_label() -> str:
    """Return the label by which later processes recognise this process."""
    return "|".join(str(value) for value in asdict(ProcessIdentity.current()).values())


def owner_of(label: str) -> ProcessIdentity | None:
    """The process that a label names; None if it names none."""
    words: list[Any] = label.split("|")
    if len(words) != len(fields(ProcessIdentity)) or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    return ProcessIdentity(int(words[0]), int(words[1]), *words[2:])


REMOVE_CONTAINER = f"{__name__}:reap_container"
"""The address of the function that removes one container, by ``{"address": …, "name": …}``."""
_TRIES = 3
_TRY_S = 20.0  # on a connection that is silently broken, before another is tried
_PAUSE_S = 0.2
_GONE_PATIENCE_S = 30.0


async def remove_container(client: Docker, name: str) -> None:
    """Kill and remove a container; return when it is gone. Fine if it is not there.

    Raises:
        ResourceError: it may still be there.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            async with engine_call(f"Removing the container {name}", _TRY_S):
                await client.containers.container(name).delete(force=True, v=True)
        except ResourceError as error:
            if is_not_found(error):
                return
            if attempt == _TRIES:
                raise
            await asyncio.sleep(_PAUSE_S * attempt)
        else:
            break
    await _wait_until_removed(client, name)


async def _wait_until_removed(client: Docker, name: str) -> None:
    """Wait until a container is gone after its removal was accepted.

    Raises:
        ResourceError: it stays.
    """
    async with engine_call(f"The removal of the container {name}", _GONE_PATIENCE_S):
        while True:
            try:
                async with engine_call(f"Asking for the container {name}"):
                    await client.containers.container(name).show()
            except ResourceError as error:
                if is_not_found(error):
                    return
                raise
            await asyncio.sleep(0.05)


def reap_container(traces: dict[str, Any]) -> None:
    """Remove a container by its name. Fine if it is gone.

    Raises:
        ResourceError: the engine does not answer, or it may still be there.
    """

    async def remove() -> None:
        async with connect(traces["address"]) as client:
            await remove_container(client, traces["name"])

    asyncio.run(remove())


def reap_labelled(traces: dict[str, Any]) -> None:
    """Remove the containers and images of an instance, as their labels say. Fine if they are gone.

    Raises:
        ResourceError: the engine does not answer, or something may still be there.
    """
    if traces.get("address"):
        asyncio.run(_reap(traces["address"], traces["instance"]))


async def _reap(address: str, instance: str) -> None:
    async with connect(address) as client:
        async with engine_call(f"Asking the engine at {address} for what is left of {instance}"):
            found = await client.containers.list(all=True, filters=instance_filter(instance))
        for container in found:
            await remove_container(client, container.id)
        async with engine_call(f"Asking the engine at {address} for images of {instance}"):
            images = await client.images.list(filters=instance_filter(instance))
        for image in images:
            async with engine_call(f"Removing the image {image['Id']}"):
                await client.images.delete(image["Id"], force=True)
