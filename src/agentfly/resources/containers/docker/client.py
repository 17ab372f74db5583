"""A client of a container engine's service, with a deadline on every call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentfly.errors import PrerequisiteError, ResourceError, ResourceUnreachable
from agentfly.installation import install_command

if TYPE_CHECKING:
    from aiodocker import Docker

CALL_PATIENCE_S = 60.0
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
    timeout = ClientTimeout(total=CALL_PATIENCE_S, sock_connect=10)
    try:
        return Docker(url=address, api_version=api_version, timeout=timeout)
    except (DockerError, ValueError, RuntimeError, OSError) as error:
        raise PrerequisiteError(
            f"No engine can be reached at {address!r}: {error}. Give an address as 'unix:///var/run/docker.sock' or "
            "'tcp://host:2376'. An engine behind ssh can be given a local socket: "
            "'ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock user@host', and then 'unix:///tmp/docker.sock'."
        ) from error


@asynccontextmanager
async def calling(what: str, patience_s: float = CALL_PATIENCE_S) -> AsyncIterator[None]:
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


def is_missing(error: BaseException | None) -> bool:
    """Whether an engine said that what was asked about is not there."""
    from aiodocker.exceptions import DockerError

    cause = error.__cause__ if isinstance(error, ResourceError) else error
    return isinstance(cause, DockerError) and cause.status == 404
