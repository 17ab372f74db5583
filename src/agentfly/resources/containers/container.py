"""Container: a sandbox as a resource, with a shell that lasts and files."""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from agentfly.errors import ResourceDied, ResourceStartError, ToolError, UsageError
from agentfly.resources.containers.backend import Backend, candidates, choose
from agentfly.resources.containers.command import Command, Outcome
from agentfly.resources.containers.result import CommandResult
from agentfly.resources.containers.sandbox import Sandbox
from agentfly.resources.containers.spec import INSIDE, ContainerSpec
from agentfly.resources.resource import Resource, Status

MAX_OUTPUT = 64 * 1024
MAX_FILE = 64 * 2**20
_FILE_TIMEOUT_S = 60.0
_INSTANCE = re.compile(r"[\w.-]{1,100}")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_OUR_SCRIPTS = re.compile(rf"^{INSIDE}/\d+\.(?:sh|cmd): ", re.MULTILINE)


class Container(Resource):
    """A sandbox that runs commands: ``await box.run("python solve.py", timeout=60)``.

    Its processes cannot reach beyond it, but they can reach each other, the shell and every file that they may write:
    any of them can make up the exit code or the output of a later command, and what a later `read_file` finds. So no
    grade may rest on what a box says in which processes of the agent still live, or whose programs it could replace:
    take the agent's files out with `read_file`, check what they are, and grade them in a fresh box.
    """

    spec: ContainerSpec

    def __init__(self, spec: ContainerSpec, instance: str, *, backend: Backend | None = None) -> None:
        """Make a handle; nothing is started before `start`.

        Args:
            spec: what to start.
            instance: its name, unique on the machine: letters, digits, ``.``, ``_`` and ``-``.
            backend: what starts it; by default the best that does what the spec asks.
        """
        super().__init__(spec, instance)
        if not _INSTANCE.fullmatch(instance) or instance in (".", ".."):
            raise UsageError(f"{instance!r} cannot be the name of a container: use letters, digits, '.', '_' and '-'.")
        self._backend = backend
        self._sandbox: Sandbox | None = None
        self._changing = asyncio.Lock()  # one of start, reset and release at a time
        self._change: asyncio.Task[None] | None = None  # the start or reset under way
        self._up = False
        self._resetting = False
        self._released = False

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring the sandbox up, and run the spec's setup commands.

        Raises:
            PrerequisiteError: the machine cannot do what the spec asks; the message says what to do.
            ResourceStartError: the sandbox did not come up, or a setup command failed.
        """
        await self._alone(self._bring_up)

    async def reset(self) -> None:
        """Begin again with an empty private layer, no processes but the shell, and the setup commands run.

        Raises:
            ResourceStartError: as `start` does.
            ResourceDied: the container has been released, before or meanwhile.
        """
        await self._alone(self._begin_again)

    async def status(self) -> Status:
        """Whether the sandbox is alive, or is being reset."""
        alive = self._up and self._sandbox is not None and self._sandbox.alive
        return Status.HEALTHY if alive or self._resetting else Status.BROKEN

    async def release(self) -> None:
        """Kill every process inside, wherever it hid, and remove every trace of the sandbox. It is not started again.

        Raises:
            OSError: something of it cannot be removed; a second call tries again.
        """
        self._released = True
        if self._change is not None:
            self._change.cancel()
        async with self._changing:
            self._up = False
            if self._sandbox is not None:
                await self._sandbox.end()
                self._sandbox = None

    async def _alone(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start or reset, unless the container has been released; a release meanwhile puts an end to it."""
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
        sandbox = self._live()
        self._resetting, self._up = self._up, False
        try:
            await sandbox.reset()
            await self._set_up()
        finally:
            self._resetting = False

    async def _bring_up(self) -> None:
        if self._backend is None:
            self._backend = await choose(self.spec)
        self._backend.probe().check(self.spec)
        self._sandbox = self._backend.sandbox(self.spec, self.instance)
        await self._sandbox.start()
        await self._set_up()

    async def _set_up(self) -> None:
        for command in self.spec.setup:
            result = await self.run(command, timeout=self.spec.start_timeout_s)
            if result.exit_code:
                raise ResourceStartError(f"The setup command {command!r} of {self.instance} failed:\n{result}")
        self._up = True

    @property
    def traces(self) -> dict[str, Any]:
        """For each backend that may have it, by name, what the backend needs to remove it."""
        backends = candidates(self.spec) if self._backend is None else [self._backend]
        return {backend.name: backend.traces(self.spec, self.instance) for backend in backends}

    # --- what tools use ---------------------------------------------------------------------------------------------

    async def run(
        self,
        command: str,
        timeout: float = 60,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        max_output: int = MAX_OUTPUT,
        new_process: bool = False,
    ) -> CommandResult:
        """Run bash source in the session, whose directory and variables last from one command to the next.

        The call returns when the command has ended, whether or not it left processes behind; those go on, and end at
        the latest with the sandbox. What they print from then on is thrown away; once eight later commands have left
        processes behind too, printing fails for them, so what is to last should print to a file.

        Args:
            command: any number of lines.
            timeout: seconds after which it is killed with all that it started.
            cwd: a directory for this command alone. With it, or with ``env``, the command runs in a subshell, so that
                what it sets does not last.
            env: variables for this command alone.
            stdin: what it can read; None means that it finds the end of its input at once.
            max_output: bytes kept of each of stdout and stderr, half from the start and half from the end.
            new_process: run it in a bash of its own, that neither sees nor changes the session, at the same time as
                whatever runs there.

        Raises:
            ResourceDied: the sandbox ended.
            ResourceError: the host has no room for what is passed in.
            ToolError: the command, ``cwd`` or a value in ``env`` holds a NUL or half a character.
            UsageError: a name in ``env`` is not one of a variable.
        """
        variables = dict(env or {})
        for name in variables:
            if not _VARIABLE.fullmatch(name):
                raise UsageError(f"run(env=…): {name!r} cannot be the name of a shell variable.")
            _word(variables[name], f"The value of the variable {name}")
        if cwd is not None:
            _word(cwd, "The directory")
        read = _encoded(stdin, "The input") if isinstance(stdin, str) else stdin
        asked = Command(_word(command, "The command"), new_process, cwd, variables, read, max_output)
        return _result(await self._live().run(asked, timeout), timeout)

    async def read_file(self, path: str) -> bytes:
        """The content of a file inside. A relative path is below the spec's workdir.

        Raises:
            ToolError: there is no such file, it cannot be read, or is longer than 64 MiB.
            ResourceDied: the sandbox ended.
        """
        where = self._quoted(path)
        # "command -p" looks in the system's directories only, whatever the agent put into those before them
        head = b"builtin command -p head -c %d -- %s" % (MAX_FILE + 1, where)
        command = b"[[ -d %s ]] || %s || exit 1; [[ ! -d %s ]]" % (where, head, where)
        outcome = await self._file_command(command, None, 2 * (MAX_FILE + 1))
        if outcome.exit_code or outcome.timed_out:
            raise ToolError(f"{path} could not be read: {_reason(outcome) or 'it is a directory'}")
        if outcome.stdout.total > MAX_FILE:
            raise ToolError(f"{path} is longer than {MAX_FILE} bytes, the most that can be read at once.")
        return outcome.stdout.kept

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Write a file inside, making its directories. A relative path is below the spec's workdir.

        Raises:
            ToolError: it cannot be written, for instance because the disk limit is reached.
            ResourceDied: the sandbox ended.
        """
        where, parent = self._quoted(path), self._quoted(posixpath.dirname(path))
        content = _encoded(data, "The text") if isinstance(data, str) else data
        command = b"builtin command -p mkdir -p -- %s && builtin command -p cat > %s" % (parent, where)
        outcome = await self._file_command(command, content, MAX_OUTPUT)
        if outcome.exit_code or outcome.timed_out:
            raise ToolError(f"{path} could not be written: {_reason(outcome)}")

    def _quoted(self, path: str) -> bytes:
        """A path inside as a word of the shell. A name that is not UTF-8 is written as `os.fsdecode` does it."""
        _word(path, "The path")
        return os.fsencode(shlex.quote(posixpath.join(self.spec.workdir, path)))

    async def _file_command(self, source: bytes, stdin: bytes | None, max_output: int) -> Outcome:
        return await self._live().run(Command(source, True, None, {}, stdin, max_output), _FILE_TIMEOUT_S)

    def _live(self) -> Sandbox:
        if self._sandbox is None:
            raise ResourceDied(
                f"The container {self.instance} is not running: it was not started, is being reset, or was released."
            )
        return self._sandbox


def _result(outcome: Outcome, timeout: float) -> CommandResult:
    killed_by = None
    if outcome.timed_out:
        killed_by = "timeout"
    elif outcome.exit_code and outcome.out_of_memory:
        killed_by = "memory"
    elif outcome.exit_code == 137:
        killed_by = "SIGKILL"
    omitted = outcome.stdout.omitted + outcome.stderr.omitted
    return CommandResult(
        exit_code=outcome.exit_code,
        stdout=outcome.stdout.text(),
        stderr=_OUR_SCRIPTS.sub("bash: ", outcome.stderr.text()),
        truncated=omitted > 0,
        timed_out=outcome.timed_out,
        killed_by=killed_by,
        omitted=omitted,
        timeout=timeout,
        note=outcome.lost,
    )


def _reason(outcome: Outcome) -> str:
    if outcome.timed_out:
        return f"it took longer than {_FILE_TIMEOUT_S:g} s"
    return _OUR_SCRIPTS.sub("", outcome.stderr.text()).strip()


def _word(text: str, what: str) -> bytes:
    """What can be a word of the shell.

    Raises:
        ToolError: it cannot be one.
    """
    if "\0" in text:
        raise ToolError(
            f"{what} holds a NUL character at position {text.index(chr(0))}, which cannot be. Leave it out."
        )
    return _encoded(text, what)


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ToolError(
            f"{what} holds half a character (a lone surrogate) at position {error.start}. Leave it out."
        ) from None
