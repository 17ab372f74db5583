"""Container: a sandbox as a resource, with a persistent shell and file transfer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from agentfly.core.errors import ResourceDied, ResourceStartError, ToolError, UsageError
from agentfly.core.numbers import is_duration
from agentfly.resources.containers import backend as backends
from agentfly.resources.containers.archives.unpacker import UnpackLimits
from agentfly.resources.containers.backend import Backend, Sandbox, select_backend
from agentfly.resources.containers.command import (
    Command,
    CommandOutcome,
    CommandResult,
    encode_shell_word,
    encode_text,
    require_type,
)
from agentfly.resources.containers.file_transfer import FileTransfer
from agentfly.resources.containers.spec import SHELL_MOUNT, ContainerSpec
from agentfly.resources.resource import Resource, Status

MAX_OUTPUT = 64 * 1024
_INSTANCE = re.compile(r"[\w.-]{1,100}")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_INTERNAL_SCRIPTS = re.compile(rf"^(?:{SHELL_MOUNT}|/\S+/\d+/shell)/(?:\d+\.(?:sh|cmd)|command): ", re.MULTILINE)


class Container(Resource):
    """A sandbox that runs commands: ``await box.run("python solve.py", timeout=60)``.

    Processes inside cannot reach outside the sandbox. They can reach each other, the shell and every file that they may
    write. Any of them can forge the exit code or output of a later command, and the content of a later `read_file`.

    Therefore do not grade in a container where processes of the agent still run, or whose programs the agent could
    replace. Copy the agent's files out with `read_file`, check them, and grade them in a new container.
    """

    spec: ContainerSpec
    can_freeze: ClassVar[bool] = True

    def __init__(self, spec: ContainerSpec, instance: str, *, backend: Backend | None = None) -> None:
        """Create a handle. `start` starts the sandbox.

        Args:
            spec: the container to start.
            instance: its name, unique on the machine: letters, digits, ``.``, ``_`` and ``-``.
            backend: the backend that starts it; by default the best one that supports the spec.
        """
        super().__init__(spec, instance)
        if not _INSTANCE.fullmatch(instance) or instance in (".", ".."):
            raise UsageError(f"{instance!r} cannot be the name of a container: use letters, digits, '.', '_' and '-'.")
        self._backend = backend
        self._sandbox: Sandbox | None = None
        self._changing = asyncio.Lock()  # one of start, reset and release at a time
        self._change: asyncio.Task[None] | None = None  # the start or reset in progress
        self._up = False
        self._resetting = False
        self._released = False
        self._frozen = False

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the sandbox and run the spec's setup commands.

        Raises:
            PrerequisiteError: the machine does not support the spec. The message says what to do.
            ResourceStartError: the sandbox did not start, or a setup command failed.
        """
        await self._alone(self._bring_up)

    async def reset(self) -> None:
        """Return to the state after `start`: an empty private layer, no process but the shell, setup commands run.

        Raises:
            ResourceStartError: under the same conditions as in `start`.
            ResourceDied: the container was released before or during the reset.
        """
        await self._alone(self._begin_again)

    async def status(self) -> Status:
        """Return whether the sandbox is alive or is being reset."""
        return self.quick_status()

    def quick_status(self) -> Status:
        """Return the same as `status`, without waiting. The end of a sandbox is noticed without asking it."""
        alive = self._up and self._sandbox is not None and self._sandbox.alive
        return Status.HEALTHY if alive or self._resetting else Status.BROKEN

    async def release(self) -> None:
        """Kill every process inside, hidden ones too, and remove every trace of the sandbox.

        A released container cannot be started again.

        Raises:
            OSError: a part of it cannot be removed. A second call tries again.
        """
        self._released = True
        if self._change is not None:
            self._change.cancel()
        async with self._changing:
            self._up = self._frozen = False
            if self._sandbox is not None:
                await self._sandbox.stop()
                self._sandbox = None

    async def freeze(self) -> None:
        """Suspend every process inside. The time limits of running commands pause, and no command can be started.

        Raises:
            PrerequisiteError: the backend cannot freeze containers on this machine.
            ResourceDied: the sandbox ended.
        """
        async with self._changing:
            if self._sandbox is None or not self._sandbox.alive:
                raise ResourceDied(f"The container {self.instance} is not running, so it cannot be frozen.")
            assert self._backend is not None
            found = self._backend.probe()
            if found.freeze == "none":
                raise found.unsupported_error("freeze()", "a container whose processes can be stopped")
            self._frozen = True
            await self._sandbox.freeze()

    async def thaw(self) -> None:
        """Resume every process inside that `freeze` suspended.

        Raises:
            ResourceDied: the sandbox ended.
        """
        async with self._changing:
            if self._frozen and self._sandbox is not None:
                await self._sandbox.thaw()
            self._frozen = False

    @classmethod
    async def prepare(cls, spec: ContainerSpec) -> None:
        """Fetch or unpack a spec's image, unless that was done before.

        Raises:
            PrerequisiteError: no backend on this machine supports the spec.
            ResourceStartError: the image does not exist or is not an image.
        """
        await (await select_backend(spec)).prepare(spec)

    async def _alone(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a start or a reset, unless the container was released. A release during it cancels it."""
        async with self._changing:
            if self._released:
                raise ResourceDied(f"The container {self.instance} has been released.")
            self._change = asyncio.create_task(change())
            try:
                await self._change
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise ResourceDied(f"The container {self.instance} was released while it was started.") from None
            finally:
                self._change = None

    async def _begin_again(self) -> None:
        self._frozen = False
        sandbox = self._live()
        self._resetting, self._up = self._up, False
        try:
            await sandbox.reset()
            await self._set_up()
        finally:
            self._resetting = False

    async def _bring_up(self) -> None:
        if self._backend is None:
            self._backend = await select_backend(self.spec)
        self._backend.probe().check(self.spec)
        await self._backend.prepare(self.spec)
        self._sandbox = self._backend.sandbox(self.spec, self.instance)
        await self._sandbox.start()
        await self._set_up()

    async def _set_up(self) -> None:
        for command in self.spec.setup:
            try:
                result = await self.run(command, timeout=self.spec.start_timeout_s)
            except ToolError as error:
                raise ResourceStartError(f"The setup command {command!r} of {self.instance} failed: {error}") from error
            if result.exit_code:
                raise ResourceStartError(f"The setup command {command!r} of {self.instance} failed:\n{result}")
        self._up = True

    @property
    def traces(self) -> dict[str, Any]:
        """By backend name, the data with which each backend that may run the container can remove it."""
        if self._backend is None:
            return backends.traces(self.spec, self.instance)
        return {self._backend.name: self._backend.traces(self.spec, self.instance)}

    @property
    def workdir(self) -> str:
        """The directory in which the shell starts. Relative paths are resolved below it."""
        return self.spec.workdir if self._sandbox is None else self._sandbox.workdir

    # --- what tools use ---------------------------------------------------------------------------------------------

    async def run(
        self,
        command: str,
        timeout: float = 60,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        user: Literal["agent", "root"] | None = None,
        max_output: int = MAX_OUTPUT,
        new_process: bool = False,
        raw: bool = False,
    ) -> CommandResult:
        """Run bash source in the session. The session keeps its directory and variables between commands.

        The call returns when the command ends, even if it leaves processes running. They may run until the sandbox
        ends. Their later output is discarded. Once eight later commands have also left processes running, writes of the
        earlier ones to their output fail. A long-running process should therefore write its output to a file.

        Args:
            command: bash source, of any number of lines.
            timeout: seconds after which the command and every process that it started are killed.
            cwd: the directory for this command alone. With ``cwd`` or ``env``, the command runs in a subshell, so
                variables and directories that it sets do not last.
            env: variables for this command alone.
            stdin: its input; None for an empty input.
            user: the user that runs it, which needs ``new_process``; None for the spec's user. Not every backend
                supports other users.
            max_output: bytes kept of stdout and of stderr each, half from the start and half from the end.
            new_process: whether to run it in a new bash process. That process neither sees nor changes the session, and
                runs concurrently with commands in the session.
            raw: whether ``str()`` of the result has the output as printed, instead of as a terminal shows it.

        Raises:
            ResourceDied: the sandbox ended.
            SandboxEnded: processes inside ended the sandbox, by flooding its shell or its memory. It is a `ToolError`.
            ResourceError: the host has no room for the input.
            ToolError: the command, ``cwd`` or a value in ``env`` holds a NUL character or a lone surrogate, or
                ``timeout`` is not a finite number above 0.
            UsageError: an argument has a wrong type, a name in ``env`` cannot be the name of a variable, ``max_output``
                is below 0, another user is given without ``new_process``, or the container is frozen.
            PrerequisiteError: the backend does not support other users on this machine.
        """
        require_type("command", command, str, "one text of bash source; shlex.join() makes one of a list of words")
        require_type("timeout", timeout, int | float, "a number of seconds, without quotes")
        require_type("max_output", max_output, int, "a number of bytes, without quotes")
        require_type("cwd", cwd, str | None, "a directory inside, as a text")
        require_type("stdin", stdin, bytes | str | None, "a text or bytes")
        require_type("env", env, Mapping | None, "a mapping of names to texts")
        if not is_duration(timeout):
            raise ToolError(f"run(timeout={timeout!r}): give a finite number of seconds above 0.")
        if max_output < 0:
            raise UsageError(f"run(max_output={max_output}): give a number of bytes, or 0 to keep none.")
        variables = dict(env or {})
        for name in variables:
            if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
                raise UsageError(f"run(env=…): {name!r} cannot be the name of a shell variable.")
            require_type("env", variables[name], str, "its values as texts, those of numbers too")
            encode_shell_word(variables[name], f"The value of the variable {name}")
        if cwd is not None:
            encode_shell_word(cwd, "The directory")
        self._check_user(user, new_process)
        read = encode_text(stdin, "The input") if isinstance(stdin, str) else stdin
        source = encode_shell_word(command, "The command")
        asked = Command(source, new_process, cwd, variables, read, max_output, user)
        return _result(await self._live().run(asked, timeout), timeout, raw=raw)

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file inside. A relative path is below the spec's workdir.

        Raises:
            UsageError: an argument has a wrong type.
            ToolError: the file does not exist, cannot be read, or is longer than 64 MiB.
            ResourceDied: the sandbox ended.
        """
        require_type("path", path, str, "a path inside, as a text", of="read_file")
        return await self._files().read(path)

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Write a file inside and create its directories. A relative path is below the spec's workdir.

        Raises:
            UsageError: an argument has a wrong type.
            ToolError: the file cannot be written, for instance because the disk limit is reached.
            ResourceDied: the sandbox ended.
        """
        require_type("path", path, str, "a path inside, as a text", of="write_file")
        require_type("data", data, bytes | str, "a text or bytes", of="write_file")
        await self._files().write(path, encode_text(data, "The text") if isinstance(data, str) else data)

    async def upload(self, host_path: str | Path, inside: str) -> None:
        """Copy a file or a directory of the host into the sandbox, in bounded memory.

        Args:
            host_path: a file or a directory. The content of a directory is added to the directory inside. Links in it
                are copied as links. Devices, pipes and sockets are omitted. The copied directories are writable inside.
            inside: the path of the copy. A relative path is below the spec's workdir.

        Raises:
            UsageError: the file or directory does not exist on the host or cannot be read, or an argument has a wrong
                type.
            ToolError: the copy cannot be written, for instance because the disk limit is reached.
            ResourceDied: the sandbox ended.
        """
        require_type("host_path", host_path, str | Path, "a path on this host", of="upload")
        require_type("inside", inside, str, "a path inside, as a text", of="upload")
        await self._files().upload(Path(host_path), inside)

    async def download(
        self,
        inside: str,
        host_path: str | Path,
        *,
        max_bytes: int = 2**30,
        max_entries: int = 10_000,
        max_depth: int = 64,
        timeout: float = 600,
    ) -> list[str]:
        """Copy a file or a directory of the sandbox to the host, in bounded memory. The copy is complete or absent.

        Processes and files inside cannot make this change any path on the host except ``host_path``.

        Args:
            inside: the path to copy. A relative path is below the spec's workdir.
            host_path: the path of the copy. A file there is replaced. A directory there must be empty.
            max_bytes: the maximum total size of the files in bytes. The holes of sparse files count.
            max_entries: the maximum number of files, directories and links.
            max_depth: the maximum number of nested directories.
            timeout: seconds allowed for copying out, and the same again for unpacking on the host.

        Returns:
            The omitted entries of a directory: links that lead out of it, devices, pipes and sockets.

        Raises:
            UsageError: ``host_path`` is taken or is invalid, a limit is not above 0, or an argument has a wrong type.
            ToolError: the path does not exist inside, cannot be read, or exceeds a limit.
            ResourceError: the copy cannot be written on the host.
            ResourceDied: the sandbox ended.
        """
        require_type("inside", inside, str, "a path inside, as a text", of="download")
        require_type("host_path", host_path, str | Path, "a path on this host", of="download")
        for name, limit in {"max_bytes": max_bytes, "max_entries": max_entries, "max_depth": max_depth}.items():
            require_type(name, limit, int, "a whole number, without quotes", of="download")
        require_type("timeout", timeout, int | float, "a number of seconds, without quotes", of="download")
        if not all(limit > 0 for limit in (max_bytes, max_entries, max_depth, timeout)):
            raise UsageError("download(): give limits above 0.")
        limits = UnpackLimits(max_bytes, max_entries, max_depth)
        return await self._files().download(inside, Path(host_path), limits, timeout)

    async def port(self, inside: int) -> tuple[str, int]:
        """Return the host and port by which this machine reaches a TCP port inside.

        They are valid until the sandbox is released or reset.

        Args:
            inside: one of the spec's ``ports``. A process need not listen there yet.

        Raises:
            UsageError: the port is not in the spec, or is not a number.
            ResourceDied: the sandbox ended.
        """
        require_type("inside", inside, int, "a port's number, without quotes", of="port")
        if inside not in self.spec.ports:
            raise UsageError(f"port({inside}): write ContainerSpec(ports=({inside},)); it has {self.spec.ports}.")
        return await self._live().port(inside)

    async def fork(self) -> ContainerSpec:
        """Snapshot the files of this container and return a spec whose containers start with them.

        The ``setup`` of that spec is empty, because the snapshot already holds the files that setup changed. The
        snapshot has no processes and no state of the shell. This container continues unchanged.

        The snapshot uses as much memory or disk as the changed files. It is freed when no container uses it and no
        reference to the spec is left.

        Raises:
            PrerequisiteError: the backend cannot fork containers on this machine.
            ToolError: the files are too many, or nested too deeply, to copy.
            ResourceError: there is no room for a snapshot.
            ResourceDied: the sandbox ended.
        """
        sandbox = self._live()
        assert self._backend is not None
        found = self._backend.probe()
        if not found.fork:
            raise found.unsupported_error("fork()", "a copy of a container's files")
        async with self._changing:
            image = await sandbox.fork()
        return replace(self.spec, image=image, backend=cast(Any, self._backend.name), setup=())

    def _files(self) -> FileTransfer:
        sandbox = self._live()
        return FileTransfer(sandbox.run, sandbox.workdir)

    def _check_user(self, user: str | None, new_process: bool) -> None:
        if user is None or user == self.spec.user:
            return
        if user not in ("agent", "root"):
            raise UsageError(f"run(user={user!r}): the user inside is 'agent' or 'root'.")
        if not new_process:
            raise UsageError(f"run(user={user!r}): the session is {self.spec.user}'s. Add new_process=True.")
        assert self._backend is not None
        self._backend.probe().check_user(user, self.spec)

    def _live(self) -> Sandbox:
        if self._frozen:
            raise UsageError(f"The container {self.instance} is frozen: await thaw() first.")
        if self._sandbox is None:
            raise ResourceDied(
                f"The container {self.instance} is not running: it was not started, is being reset, or was released."
            )
        return self._sandbox


def _result(outcome: CommandOutcome, timeout: float, *, raw: bool) -> CommandResult:
    killed_by = None
    if outcome.timed_out:
        killed_by = "timeout"
    elif outcome.exit_code and outcome.out_of_memory:
        killed_by = "memory"
    elif outcome.exit_code == 137:
        killed_by = "SIGKILL"
    omitted = outcome.stdout.omitted + outcome.stderr.omitted
    complaints = outcome.stderr.text()
    return CommandResult(
        exit_code=outcome.exit_code,
        stdout=outcome.stdout.text(),
        stderr=_INTERNAL_SCRIPTS.sub("bash: ", complaints) if complaints else "",
        truncated=omitted > 0,
        timed_out=outcome.timed_out,
        killed_by=killed_by,
        omitted=omitted,
        timeout=timeout,
        note=outcome.note,
        raw=raw,
    )
