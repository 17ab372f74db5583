"""Images of an engine: pulled, inspected, committed by this process, and snapshots with the files kept in memory."""

from __future__ import annotations

import asyncio
import atexit
import io
import itertools
import logging
import os
import tarfile
import tempfile
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from agentfly.core.errors import AgentFlyError, ResourceError, ResourceStartError, ToolError
from agentfly.core.threads.pool import run_in_thread
from agentfly.resources.containers.docker.engine import (
    OWNER,
    REMOVE_CONTAINER,
    EngineStream,
    connect,
    engine_call,
    is_not_found,
    owner_label,
    owner_of,
    remove_container,
)
from agentfly.resources.containers.spec import ContainerSpec
from agentfly.resources.containers.stream_shell.channels import Stream
from agentfly.resources.process.ledger import CleanupRecord

if TYPE_CHECKING:
    from aiodocker import Docker


logger = logging.getLogger(__name__)

REPOSITORY = "agentfly-made"
_LONGEST_COMMIT_S = 600.0
_REMOVE_IMAGES = f"{__name__}:reap_images"


class CommittedImages:
    """Images committed by this process: prepared images, and snapshots of containers.

    Labels name their owner, so that the next process can find and remove the images of a dead one.
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
        async with engine_call(f"Making an image of the container {container}", _LONGEST_COMMIT_S):
            await client.containers.container(container).commit(
                repository=REPOSITORY, tag=tag, config={}, changes=[f"LABEL {OWNER}={owner_label()}"]
            )
        return name

    def schedule_removal(self, name: str) -> None:
        """Note that an image is of no more use. It may be called anywhere, on any thread."""
        self._dropped.append(name)

    async def remove_scheduled(self, client: Docker) -> None:
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
                asyncio.run(_remove_images(address, names))
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
        async with engine_call(f"Removing the image {name}"):
            await client.images.delete(name, force=True)
    except ResourceError as error:
        if not is_not_found(error):
            raise


async def remove_orphaned_images(client: Docker) -> None:
    """Remove the images that processes which are certainly dead have made."""
    async with engine_call("Asking for images that were left"):
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
            await remove_orphaned_images(client)

    asyncio.run(remove())


async def _remove_images(address: str, names: list[str]) -> None:
    async with connect(address) as client:
        for name in names:
            await remove_image(client, name)


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
class ImageInspection:
    """Facts about an image that decide how its containers are created.

    Args:
        base_image: the image derived from it, from which containers are created.
        supports_privileged_server: whether it has the programs that a privileged server needs.
        files_in_workdir: whether the workdir holds files in the image.
    """

    base_image: str
    supports_privileged_server: bool
    files_in_workdir: bool


async def pull_if_missing(client: Docker, image: str, engine: str) -> None:
    """See that the engine has an image; pull it if it has not.

    Raises:
        ResourceStartError: it is not there and cannot be pulled.
    """
    if await has_image(client, image):
        return
    logger.info("Pulling the image %s ...", image)
    try:
        last = ""
        async for line in client.images.pull(image, stream=True, timeout=None):
            if error := line.get("error"):
                raise _image_not_found(engine, image, error)
            status = str(line.get("status", ""))
            if status != last and not line.get("progressDetail"):
                logger.info("%s: %s", image, status)
            last = status
    except Exception as error:
        if isinstance(error, ResourceStartError):
            raise
        raise _image_not_found(engine, image, str(error)) from error
    if not await has_image(client, image):
        raise _image_not_found(engine, image, "it is not there after it was pulled")


async def has_image(client: Docker, image: str) -> bool:
    """Whether the engine has an image."""
    try:
        async with engine_call(f"Looking for the image {image}"):
            await client.images.inspect(image)
    except ResourceError as error:
        if is_not_found(error):
            return False
        raise
    return True


async def inspect_image(
    client: Docker, image: str, spec: ContainerSpec, own: CommittedImages, address: str
) -> ImageInspection:
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
        said = await _run_to_end(client, name, body)
        prepared = await own.commit(client, address, name)
    except ResourceError as error:
        raise ResourceStartError(
            f"No bash could be started in the image {image!r}: {error} Containers need /bin/bash in their image; "
            "in Alpine, for instance, it is had by 'apk add bash'."
        ) from error
    finally:
        await asyncio.shield(_remove_inspection_container(client, name, record))
    lines = said.splitlines()
    return ImageInspection(
        base_image=prepared,
        supports_privileged_server=not any(line.startswith("lacks") for line in lines),
        files_in_workdir="files 0" not in lines,
    )


async def _run_to_end(client: Docker, name: str, body: dict[str, Any]) -> str:
    """Run a container that ends by itself, and return its output."""
    async with engine_call(f"Running the container {name}"):
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


async def _remove_inspection_container(client: Docker, name: str, record: CleanupRecord) -> None:
    try:
        await remove_container(client, name)
    except ResourceError as error:  # it stays written down, for a later process
        logger.warning("%s", error)
    else:
        record.close()


def _image_not_found(engine: str, image: str, why: str) -> ResourceStartError:
    return ResourceStartError(
        f"{engine} has no image {image!r}: {why}. Check its name, log in to its registry, or make it on this machine "
        f"('{engine} build', '{engine} import'), and list what there is with '{engine} images'."
    )


ARCHIVE = ".agentfly.tar"
"""Name of the archive in the container's root directory, where the server finds it."""
_LIMIT_S = 120.0
_ROOM = 256 * 2**20  # for names, of which files in memory may have very many
# All processes stand still meanwhile, so that it is of one moment.
_PACK = """
kill -STOP -1
command -p tar -C / --sparse --numeric-owner --one-file-system --exclude=./.agentfly.tar -cf - -- "$@"
code=$?
kill -CONT -1
printf 'ended %s' "$code" >&2
"""


def archive_command(directories: Iterable[str]) -> list[str]:
    """The command line, for root inside, of what writes the archive."""
    return ["/bin/bash", "-c", _PACK, "bash", *(path.lstrip("/") for path in directories)]


async def write_archive(stream: Stream, target: BinaryIO, most: int) -> None:
    """Write to a file what an engine unpacks to `ARCHIVE`, from the stream of `archive_command`.

    Args:
        stream: what the program writes.
        target: the file.
        most: bytes that the directories hold at most.

    Raises:
        ToolError: it is longer than that explains, as where the agent has made very many files.
        ResourceError: it could not be read in full.
    """
    most += _ROOM
    with tempfile.TemporaryFile() as inner:
        said = b""
        try:
            async with asyncio.timeout(_LIMIT_S):
                while (piece := await stream.read()) is not None:
                    output, data = piece
                    if output == 1:
                        await run_in_thread(inner.write, data)
                        if inner.tell() > most:
                            raise ToolError(
                                f"fork(): the private files of the container take more than {most} bytes to be copied, "
                                "names and all. Remove some."
                            )
                    else:
                        said = (said + data)[-4096:]
        except TimeoutError:
            said += f" (given up after {_LIMIT_S:g} s)".encode()
        finally:
            await stream.close()
        if not said.endswith((b"ended 0", b"ended 1")):  # 1: sockets were left out, which no archive has
            raise ResourceError(
                f"The files of a sandbox could not be copied for its fork: {said.decode(errors='replace')}"
            )
        size = inner.tell()
        inner.seek(0)
        await run_in_thread(_wrap, inner, size, target)


def _wrap(inner: BinaryIO, size: int, target: BinaryIO) -> None:
    entry = tarfile.TarInfo(ARCHIVE)
    entry.size, entry.mode = size, 0o600
    with tarfile.open(fileobj=target, mode="w") as outer:
        outer.addfile(entry, inner)
    target.seek(0, io.SEEK_SET)
