"""Removal of containers, and of what dead processes left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from agentfly.errors import ResourceError
from agentfly.resources.containers.docker.client import calling, connect, is_missing
from agentfly.resources.containers.docker.labels import by_instance

if TYPE_CHECKING:
    from aiodocker import Docker

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
            async with calling(f"Removing the container {name}", _TRY_S):
                await client.containers.container(name).delete(force=True, v=True)
        except ResourceError as error:
            if is_missing(error):
                return
            if attempt == _TRIES:
                raise
            await asyncio.sleep(_PAUSE_S * attempt)
        else:
            break
    await _gone(client, name)


async def _gone(client: Docker, name: str) -> None:
    """Wait until a container whose removal was accepted is not there any more.

    Raises:
        ResourceError: it stays.
    """
    async with calling(f"The removal of the container {name}", _GONE_PATIENCE_S):
        while True:
            try:
                async with calling(f"Asking for the container {name}"):
                    await client.containers.container(name).show()
            except ResourceError as error:
                if is_missing(error):
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


def reap(traces: dict[str, Any]) -> None:
    """Remove the containers and images of an instance, as their labels say. Fine if they are gone.

    Raises:
        ResourceError: the engine does not answer, or something may still be there.
    """
    if traces.get("address"):
        asyncio.run(_reap(traces["address"], traces["instance"]))


async def _reap(address: str, instance: str) -> None:
    async with connect(address) as client:
        async with calling(f"Asking the engine at {address} for what is left of {instance}"):
            found = await client.containers.list(all=True, filters=by_instance(instance))
        for container in found:
            await remove_container(client, container.id)
        async with calling(f"Asking the engine at {address} for images of {instance}"):
            images = await client.images.list(filters=by_instance(instance))
        for image in images:
            async with calling(f"Removing the image {image['Id']}"):
                await client.images.delete(image["Id"], force=True)
