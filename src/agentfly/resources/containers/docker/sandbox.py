"""EngineSandbox: a container of an engine, and the shell in it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentfly.core.errors import ResourceDied, ResourceError, ResourceStartError
from agentfly.resources.containers.backend import Sandbox
from agentfly.resources.containers.command import Command, CommandOutcome
from agentfly.resources.containers.docker.container_config import AGENT, ROOT, ContainerConfig, drop_privileges_command
from agentfly.resources.containers.docker.engine import (
    EngineCapabilities,
    EngineStream,
    connect,
    engine_call,
    instance_labels,
    remove_container,
)
from agentfly.resources.containers.docker.images import CommittedImages, ImageInspection, archive_command, write_archive
from agentfly.resources.containers.port_forwarding import PortForwarder, relay
from agentfly.resources.containers.spec import SnapshotImage
from agentfly.resources.containers.stream_shell.protocol import SERVER_COMMAND, ShellScripts
from agentfly.resources.containers.stream_shell.shell import StreamShell

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

logger = logging.getLogger(__name__)

RegisterFork = Callable[[ImageInspection], SnapshotImage]
"""Makes an image that a fork has made known."""
_RESET_PATIENCE_S = 10.0
_SHELL_PATIENCE_S = 10.0
_FILES_OF_OTHERS = 1000


class EngineSandbox(Sandbox):
    """A sandbox of dockerd or podman.

    With a privileged server, a reset kills all processes inside and empties the agent's writable directories, within
    milliseconds. Otherwise a reset starts a new container, and the old one is removed in the background.
    """

    def __init__(
        self,
        plan: ContainerConfig,
        instance: str,
        *,
        engine: EngineCapabilities,
        own: CommittedImages,
        forked: RegisterFork,
    ) -> None:
        """Make a handle; nothing is started yet.

        Args:
            plan: what to start.
            instance: its name, unique on the machine.
            engine: what starts it.
            own: the images that this process has made.
            forked: makes the image of a fork known.
        """
        super().__init__(plan.spec, instance)
        self._plan = plan
        self._engine, self._own, self._forked = engine, own, forked
        self._client: Docker | None = None
        self._numbers = itertools.count()
        self._name = ""  # of the container in use
        self._container_names: set[str] = set()  # names of containers that may be there
        self._background: set[asyncio.Task[None]] = set()  # what must not be cut short, or goes on in the background
        self._shells: dict[str, StreamShell] = {}  # by user
        self._beginning = asyncio.Lock()  # of a shell for another user than the spec's
        self._ports = self._new_ports()
        self._scripts = ShellScripts("")
        self._paused = False

    async def start(self) -> None:
        """See `Sandbox.start`."""
        self._client = connect(self._engine.address, self._engine.api_version)
        await self._own.remove_scheduled(self._client)
        await self._create_and_start()

    async def reset(self) -> None:
        """See `Sandbox.reset`."""
        await self.thaw()
        shell = self._shells.pop(self.spec.user, None)
        await self._close_others()
        self._ports = self._new_ports()
        if shell is not None:
            if self._plan.privileged_server and await shell.reset(self._plan.reset_directories, _RESET_PATIENCE_S):
                self._shells[self.spec.user] = shell
                return
            await shell.close()
        old = self._name
        await self._kill(old)
        await self._create_and_start()
        self._in_background(self._remove(old))

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        for shell in self._shells.values():
            await shell.close()
        self._shells.clear()
        await self._close_others()
        if self._client is None:
            return
        while self._background:  # a container may just be coming into being
            await asyncio.wait(set(self._background))
        if self._paused:
            with contextlib.suppress(ResourceError):
                await self.thaw()
        for name in list(self._container_names):
            await self._remove(name)
        await self._own.remove_scheduled(self._client)
        await self._client.close()
        self._client = None

    @property
    def alive(self) -> bool:
        """See `Sandbox.alive`."""
        shell = self._shells.get(self.spec.user)
        return shell is not None and (shell.own_doing is not None or not shell.dead)

    async def run(self, command: Command, timeout: float) -> CommandOutcome:
        """See `Sandbox.run`."""
        return await (await self._shell_of(command.user or self.spec.user)).run(command, timeout)

    async def freeze(self) -> None:
        """See `Sandbox.freeze`."""
        if not self._paused:
            self._paused = True
            for shell in list(self._shells.values()):
                await shell.pause()
            async with engine_call(f"Pausing the container {self._name}"):
                await self._container().pause()

    async def thaw(self) -> None:
        """See `Sandbox.thaw`."""
        if self._paused:
            state = await self._state()
            if state.get("Paused"):
                async with engine_call(f"Unpausing the container {self._name}"):
                    await self._container().unpause()
            for shell in self._shells.values():
                shell.resume()
            self._paused = False

    async def port(self, inside: int) -> tuple[str, int]:
        """See `Sandbox.port`."""
        return await self._ports.open(inside)

    async def fork(self) -> SnapshotImage:
        """See `Sandbox.fork`. Writable directories are in memory, and are added to the image as an archive."""
        assert self._client is not None
        container = self._name
        if self._plan.tmpfs_sizes:
            container = f"{self._name}-fork-{next(self._numbers)}"
            self._container_names.add(container)
            with tempfile.TemporaryFile() as archive:
                stream = await self._open(archive_command(self._plan.tmpfs_sizes), "root")
                await write_archive(stream, archive, sum(self._plan.tmpfs_sizes.values()))
                body = {"Image": self._plan.image, "Cmd": SERVER_COMMAND, "Labels": instance_labels(self.instance)}
                await self._run_to_completion(self._create(container, body))
                async with engine_call(f"Filling the container {container}"):
                    await self._client.containers.container(container).put_archive("/", archive)  # type: ignore[no-untyped-call]
        name = await self._own.commit(self._client, self._engine.address, container)
        if container != self._name:
            await self._remove(container)
        return self._forked(replace(self._plan.inspection, base_image=name))

    # --- bringing up ------------------------------------------------------------------------------------------------

    async def _create_and_start(self) -> None:
        name = self._name = f"agentfly-{self.instance}-{next(self._numbers)}"
        self._container_names.add(name)
        self._scripts = ShellScripts(secrets.token_hex(12))
        body = self._plan.request_body(instance_labels(self.instance))
        try:
            await self._run_to_completion(self._create(name, body))
            async with engine_call(f"Starting the container {name}"):
                container = self._container()
                stream = await EngineStream.open(container.attach(stdin=True, stdout=True, stderr=True))
                try:
                    await container.start()
                except BaseException:
                    await stream.close()
                    raise
            shell = self._shells[self.spec.user] = StreamShell(
                stream,
                self._scripts,
                self._open_as_agent,
                workdir=self.spec.workdir,
                describe_end=self._describe_end,
            )
            await shell.start(self._plan.server_source(self._scripts))
        except ResourceError as error:
            raise ResourceStartError(f"The sandbox {self.instance} did not come up. {error}") from error

    async def _create(self, name: str, body: dict[str, Any]) -> None:
        assert self._client is not None
        async with engine_call(f"Creating the container {name}"):
            await self._client.containers.create(body, name=name)

    async def _shell_of(self, user: str) -> StreamShell:
        """The shell of a user; one for another user than the spec's is started when it is needed."""
        if user == self.spec.user:
            if user not in self._shells:
                raise ResourceDied(f"The sandbox {self.instance} is not running.")
            return self._shells[user]
        async with self._beginning:
            shell = self._shells.get(user)
            if shell is None or (shell.dead and shell.own_doing is None):
                if shell is not None:
                    await shell.close()
                shell = self._shells[user] = await self._begin_shell(user)
            return shell

    async def _begin_shell(self, user: str) -> StreamShell:
        """Start a shell for another user than the spec's."""
        scripts = ShellScripts(secrets.token_hex(12))

        async def open_stream(words: Sequence[str]) -> EngineStream:
            return await self._open(words, user)

        shell = StreamShell(
            await open_stream(SERVER_COMMAND),
            scripts,
            open_stream,
            workdir=self.spec.workdir,
            describe_end=self._describe_end,
            is_init=False,
            first_file_number=_FILES_OF_OTHERS,
        )
        try:
            async with asyncio.timeout(_SHELL_PATIENCE_S):
                await shell.start(scripts.server())
        except TimeoutError:
            await shell.close()
            raise ResourceError(
                f"A shell for {user!r} in the container {self._name} did not begin within {_SHELL_PATIENCE_S:g} s."
            ) from None
        except BaseException:
            await shell.close()
            raise
        return shell

    def _new_ports(self) -> PortForwarder:
        return PortForwarder(self.instance, relay(self._open_as_agent))

    async def _open_as_agent(self, words: Sequence[str]) -> EngineStream:
        return await self._open(words, self.spec.user)

    async def _open(self, words: Sequence[str], user: str) -> EngineStream:
        """Run a program in the container with a stream, as a user without any capability."""
        guarded_root = self._plan.privileged_server and user == "root"
        command = [*(drop_privileges_command(ROOT) if guarded_root else []), *words]
        async with engine_call(f"Running a program in the container {self._name}"):
            execution = await self._container().exec(
                command, stdin=True, user=ROOT if user == "root" else AGENT, workdir=self.spec.workdir
            )
            return await EngineStream.open(execution.start(detach=False))

    # --- ending -----------------------------------------------------------------------------------------------------

    async def _kill(self, name: str) -> None:
        """Kill what runs in a container. Fine if nothing does."""
        assert self._client is not None
        with contextlib.suppress(ResourceError):
            async with engine_call(f"Killing the container {name}"):
                await self._client.containers.container(name).kill()

    async def _remove(self, name: str) -> None:
        assert self._client is not None
        await remove_container(self._client, name)
        self._container_names.discard(name)

    async def _close_others(self) -> None:
        """Let go of what is there beside the shell of the spec's user."""
        await self._ports.close()
        others = [user for user in self._shells if user != self.spec.user]
        for user in others:
            await self._shells.pop(user).close()

    async def _describe_end(self) -> str:
        state = await self._state()
        if not state:
            return f"its container {self._name} was removed"
        if state.get("Running"):
            return f"the stream to its container {self._name} broke"
        if state.get("OOMKilled"):
            return f"it was killed whole over its memory limit of {self.spec.memory_limit} bytes"
        return f"its container {self._name} ended with exit code {state.get('ExitCode')} {state.get('Error') or ''}"

    async def _state(self) -> dict[str, Any]:
        async with engine_call(f"Asking for the container {self._name}"):
            shown = await self._container().show()
        state: dict[str, Any] = shown.get("State", {})
        return state

    # --- the engine -------------------------------------------------------------------------------------------------

    def _container(self) -> DockerContainer:
        if self._client is None:
            raise ResourceDied(f"The sandbox {self.instance} is not running.")
        return self._client.containers.container(self._name)

    async def _run_to_completion(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work whose outcome must be known. If the caller is cancelled, the work continues."""
        task = self._in_background(work)
        await asyncio.shield(task)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("%s: %s", self.instance, error)
