"""Images of an engine: fetched once, and looked into once."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentfly.errors import ResourceError, ResourceStartError
from agentfly.resources.cleanup_record import CleanupRecord
from agentfly.resources.containers.docker.client import calling, is_missing
from agentfly.resources.containers.docker.own_images import OwnImages
from agentfly.resources.containers.docker.removal import REMOVE_CONTAINER, remove_container
from agentfly.resources.containers.docker.stream import EngineStream
from agentfly.resources.containers.spec import ContainerSpec

if TYPE_CHECKING:
    from aiodocker import Docker

logger = logging.getLogger(__name__)

_LOOK = """
for program in setpriv chown chmod rm; do command -pv "$program" >/dev/null || echo "lacks $program"; done
(
    shopt -s nullglob dotglob
    files=("$1"/*)
    echo "files ${#files[@]}"
)
for file in passwd group; do
    case $file in passwd) line=$2 ;; group) line=$3 ;; esac
    before=
    [[ ! -e /etc/$file ]] || before=$(</etc/$file)
    printf '%s\\n%s\\n' "$line" "$before" >"/etc/$file"
done
"""
_PASSWD = "agent:x:1000:1000::/home/agent:/bin/bash"
_GROUP = "agent:x:1000:"
_LONGEST_WORDS = 4096


@dataclass(frozen=True)
class ImageFacts:
    """What an image has that decides how its containers are made.

    Args:
        prepared: the image made of it, which containers are made of.
        can_guard: whether it has the programs that a guarded keeper needs.
        files_in_workdir: whether the directory that is to be the workdir holds files in the image.
    """

    prepared: str
    can_guard: bool
    files_in_workdir: bool


async def fetch(client: Docker, image: str, engine: str) -> None:
    """See that the engine has an image; pull it if it has not.

    Raises:
        ResourceStartError: it is not there and cannot be pulled.
    """
    if await present(client, image):
        return
    logger.info("Pulling the image %s ...", image)
    try:
        last = ""
        async for line in client.images.pull(image, stream=True, timeout=None):
            if error := line.get("error"):
                raise _missing(engine, image, error)
            status = str(line.get("status", ""))
            if status != last and not line.get("progressDetail"):
                logger.info("%s: %s", image, status)
            last = status
    except Exception as error:
        if isinstance(error, ResourceStartError):
            raise
        raise _missing(engine, image, str(error)) from error
    if not await present(client, image):
        raise _missing(engine, image, "it is not there after it was pulled")


async def present(client: Docker, image: str) -> bool:
    """Whether the engine has an image."""
    try:
        async with calling(f"Looking for the image {image}"):
            await client.images.inspect(image)
    except ResourceError as error:
        if is_missing(error):
            return False
        raise
    return True


async def look(client: Docker, image: str, spec: ContainerSpec, own: OwnImages, address: str) -> ImageFacts:
    """Look into an image by a container that ends at once, and make one of it that knows the user ``agent``.

    Raises:
        ResourceStartError: no bash can be started in it.
    """
    name = f"agentfly-look-{uuid.uuid4().hex[:12]}"
    record = CleanupRecord("container", REMOVE_CONTAINER, {"address": address, "name": name})
    host: dict[str, Any] = {"NetworkMode": "none", "CapDrop": ["ALL"], "LogConfig": {"Type": "none"}}
    host["Ulimits"] = [{"Name": limit, "Soft": 1024, "Hard": 1024} for limit in ("nofile", "nproc")]
    if spec.runtime:
        host["Runtime"] = spec.runtime
    body: dict[str, Any] = {
        "Image": image,
        "Entrypoint": [],
        "Cmd": ["/bin/bash", "-c", _LOOK, "bash", spec.workdir, _PASSWD, _GROUP],
        "User": "0:0",
        "AttachStdout": True,
        "HostConfig": host,
    }
    try:
        said = await _say(client, name, body)
        prepared = await own.commit(client, address, name)
    except ResourceError as error:
        raise ResourceStartError(
            f"No bash could be started in the image {image!r}: {error} Containers need /bin/bash in their image; "
            "in Alpine, for instance, it is had by 'apk add bash'."
        ) from error
    finally:
        await asyncio.shield(_remove(client, name, record))
    lines = said.splitlines()
    return ImageFacts(
        prepared=prepared,
        can_guard=not any(line.startswith("lacks") for line in lines),
        files_in_workdir="files 0" not in lines,
    )


async def _say(client: Docker, name: str, body: dict[str, Any]) -> str:
    """What a container that ends by itself prints."""
    async with calling(f"Running the container {name}"):
        await client.containers.create(body, name=name)
        container = client.containers.container(name)
        stream = await EngineStream.open(container.attach(stdout=True, stderr=True, stdin=False))
        try:
            await container.start()
            said = b""
            while (piece := await stream.read()) is not None and len(said) < _LONGEST_WORDS:
                said += piece[1]
        finally:
            await stream.close()
        await container.wait()
    return said.decode(errors="replace")


async def _remove(client: Docker, name: str, record: CleanupRecord) -> None:
    try:
        await remove_container(client, name)
    except ResourceError as error:  # it stays written down, for a later process
        logger.warning("%s", error)
    else:
        record.close()


def _missing(engine: str, image: str, why: str) -> ResourceStartError:
    return ResourceStartError(
        f"{engine} has no image {image!r}: {why}. Check its name, log in to its registry, or make it on this machine "
        f"('{engine} build', '{engine} import'), and list what there is with '{engine} images'."
    )
