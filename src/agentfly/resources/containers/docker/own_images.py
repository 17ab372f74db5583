"""OwnImages: the images that this process has made in an engine. They end with it."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from agentfly.errors import AgentFlyError, ResourceError
from agentfly.resources.cleanup_record import CleanupRecord
from agentfly.resources.containers.docker.client import calling, connect, is_missing
from agentfly.resources.containers.docker.labels import OWNER, owner_label, owner_of

if TYPE_CHECKING:
    from aiodocker import Docker

logger = logging.getLogger(__name__)

REPOSITORY = "agentfly-made"
_LONGEST_COMMIT_S = 600.0
_REMOVE_IMAGES = f"{__name__}:reap_images"


class OwnImages:
    """Images committed by this process: those that were prepared, and snapshots of containers.

    They are labelled with whose they are, so that what a dead process left is found and removed by the next.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._made: dict[str, str] = {}  # the engine's address, by image
        self._records: dict[str, CleanupRecord] = {}  # by the engine's address
        self._dropped: deque[str] = deque()

    async def commit(self, client: Docker, address: str, container: str) -> str:
        """Make an image of a container's files, apart from those in memory; its name.

        Raises:
            ResourceError: the engine has no room for it, or the container is gone.
        """
        if not self._made:
            atexit.register(self._remove_all, os.getpid())
        tag = f"{os.getpid()}-{os.urandom(4).hex()}-{next(self._numbers)}"
        name = f"{REPOSITORY}:{tag}"
        if address not in self._records:
            self._records[address] = CleanupRecord("images", _REMOVE_IMAGES, {"address": address})
        self._made[name] = address
        async with calling(f"Making an image of the container {container}", _LONGEST_COMMIT_S):
            await client.containers.container(container).commit(
                repository=REPOSITORY, tag=tag, config={}, changes=[f"LABEL {OWNER}={owner_label()}"]
            )
        return name

    def drop(self, name: str) -> None:
        """Note that an image is of no more use. It may be called anywhere, on any thread."""
        self._dropped.append(name)

    async def remove_dropped(self, client: Docker) -> None:
        """Remove the images of no more use. Those that cannot be removed yet are tried again later."""
        left: list[str] = []
        try:
            while (name := self._next_dropped()) is not None:  # others may be removing some meanwhile
                left.append(name)
                try:
                    await remove_image(client, name)
                except ResourceError as error:
                    logger.debug("%s", error)  # a container still uses it
                else:
                    left.pop()
                    self._made.pop(name, None)
        finally:
            self._dropped.extend(left)

    def _next_dropped(self) -> str | None:
        try:
            return self._dropped.popleft()
        except IndexError:
            return None

    def _remove_all(self, pid: int) -> None:
        if pid != os.getpid():  # a fork that comes to its end, whose parent needs them still
            return
        for address in set(self._made.values()):
            names = [name for name, where in self._made.items() if where == address]
            try:
                asyncio.run(_remove(address, names))
            except AgentFlyError as error:
                logger.info("Images made for containers are left: %s", error)
            else:
                self._records.pop(address).close()


async def remove_image(client: Docker, name: str) -> None:
    """Remove an image. Fine if it is not there.

    Raises:
        ResourceError: it is still there.
    """
    try:
        async with calling(f"Removing the image {name}"):
            await client.images.delete(name, force=True)
    except ResourceError as error:
        if not is_missing(error):
            raise


async def remove_those_of_the_dead(client: Docker) -> None:
    """Remove the images that processes which are certainly dead have made."""
    async with calling("Asking for images that were left"):
        images = await client.images.list(filters={"label": [OWNER]})
    for image in images:
        owner = owner_of((image.get("Labels") or {}).get(OWNER, ""))
        if owner is not None and owner.is_dead():
            try:
                await remove_image(client, image["Id"])
            except ResourceError as error:
                logger.debug("%s", error)  # a container that was left too uses it; the next one comes by


def reap_images(traces: dict[str, Any]) -> None:
    """Remove the images that dead processes have made in an engine.

    Raises:
        ResourceUnreachable: nothing listens at the engine's address.
        ResourceError: the engine does not answer.
    """

    async def remove() -> None:
        async with connect(traces["address"]) as client:
            await remove_those_of_the_dead(client)

    asyncio.run(remove())


async def _remove(address: str, names: list[str]) -> None:
    async with connect(address) as client:
        for name in names:
            await remove_image(client, name)
