"""WorkerProcess: this process's side of a simulator's process and its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentfly.core.errors import ResourceError
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.environments.fork_server import ForkServer
from agentfly.resources.environments.process_supervisor import ExitInfo, SupervisorConfig
from agentfly.resources.environments.wire_types import MAX_BYTES, MalformedData
from agentfly.resources.environments.worker import FRAME_LENGTH
from agentfly.resources.process.cgroups import MemoryLimit
from agentfly.resources.process.child import python_command
from agentfly.resources.process.procfs import peer_closed, signal_descendants, start_time
from agentfly.resources.process.supervised import KILL_TIMEOUT_S, SupervisorProcess

TAIL_BYTES = 4096
"""Number of bytes kept from the end of a simulator's output, for the message about its death."""

MAX_RESPONSE_BYTES = MAX_BYTES + (1 << 20)
"""Maximum length of a response: a result and its frame."""

FORK_ATTEMPTS = 2
"""Number of attempts to fork before a start uses a new interpreter."""


StartSupervisor = Callable[[SupervisorConfig, int], Awaitable[SupervisorProcess]]


class WorkerProcess:
    """A process that answers requests one at a time, under a supervisor.

    Args:
        fork_server: the fork server to fork from; None to start a new interpreter.
        memory_limit: the memory limit of the process and its descendants, if any.
        directory: its private directory.
        environment: the environment variables of a new interpreter.
    """

    def __init__(
        self,
        fork_server: ForkServer | None,
        memory_limit: MemoryLimit | None,
        directory: str,
        environment: dict[str, str],
    ) -> None:
        self._fork_server = fork_server
        self._memory_limit = memory_limit
        self._directory = directory
        self._environment = environment
        self._claimed = False
        self._starting: asyncio.Task[SupervisorProcess] | None = None
        self._supervisor: SupervisorProcess | None = None
        self._calls: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._control: asyncio.StreamWriter | None = None
        self._output: asyncio.ReadTransport | None = None
        self._exit_report: asyncio.Task[bytes] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._tail = b""
        self._stop_requested = False

    async def start(self) -> None:
        """Start the supervisor, which starts the process."""
        if self._fork_server is not None:
            self._fork_server.acquire()
            self._claimed = True
            for _ in range(FORK_ATTEMPTS):
                with contextlib.suppress(ConnectionError):  # the fork server died, perhaps because of an import
                    async with self._fork_server.turn:
                        if not await self._fork_server.ready():
                            break
                        await self._connect(self._fork)
                        return
                self._close_connections()
        await self._connect(self._spawn)  # which reports an import that kills the process

    async def request(self, request: bytes) -> bytes:
        """Send a request and return the bytes of the response.

        Raises:
            EOFError: the process is gone.
            MalformedData: the response is too long; the process cannot be used any more.
        """
        assert self._calls is not None
        reader, writer = self._calls
        try:
            writer.writelines([FRAME_LENGTH.pack(len(request)), request])
            await writer.drain()
            length = FRAME_LENGTH.unpack(await reader.readexactly(FRAME_LENGTH.size))[0]
            if length > MAX_RESPONSE_BYTES:
                raise MalformedData(f"it is {length} bytes long")
            return await reader.readexactly(length)
        except ConnectionError as error:
            raise EOFError from error

    @property
    def ended(self) -> bool:
        """Whether the process and all its descendants have ended."""
        reported = self._exit_report is not None and self._exit_report.done()
        return reported or (self._supervisor is not None and self._supervisor.gone())

    @property
    def peer_closed(self) -> bool:
        """Whether the process has closed its side, as its end does. Its descendants may still run."""
        if self._calls is None or (self._exit_report is not None and self._exit_report.done()):
            return True
        descriptor: int = self._calls[1].get_extra_info("socket").fileno()
        return descriptor < 0 or peer_closed(descriptor)

    @property
    def traces(self) -> dict[str, Any]:
        """The ids by which `reap` finds it."""
        return {} if self._supervisor is None else self._supervisor.traces

    def freeze(self) -> None:
        """Stop (SIGSTOP) the process and all its descendants."""
        if not self.ended and self._supervisor is not None:
            signal_descendants(self._supervisor.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue (SIGCONT) the process and all its descendants."""
        if not self.ended and self._supervisor is not None:
            signal_descendants(self._supervisor.pid, signal.SIGCONT)

    @property
    def exit_info(self) -> ExitInfo | None:
        """The end of the process, if its report has arrived; else None."""
        report = self._exit_report
        if report is not None and report.done() and not report.cancelled():
            with contextlib.suppress(OSError, ValueError):
                return ExitInfo.from_json(report.result())
        return None

    async def wait_exit(self) -> ExitInfo:
        """Wait for the report about the end of the process."""
        with contextlib.suppress(TimeoutError, OSError, ValueError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                assert self._exit_report is not None
                assert self._collecting is not None
                report = await asyncio.shield(self._exit_report)
                await asyncio.shield(self._collecting)
                return ExitInfo.from_json(report)
        return ExitInfo(None, False)

    @property
    def output_tail(self) -> str:
        """The end of the process's output."""
        return self._tail.decode(errors="replace").strip()

    async def stop(self) -> None:
        """Kill the process and all its descendants; return when they are gone."""
        if self._starting is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    self._supervisor = await asyncio.shield(self._starting)
        if self._supervisor is not None:
            await self._end(self._supervisor)
        self._close_connections()
        if self._claimed and self._fork_server is not None:
            self._fork_server.release()
            self._claimed = False

    async def _connect(self, start_supervisor: StartSupervisor) -> None:
        with contextlib.ExitStack() as far_ends:  # only the supervisor uses them
            # Steps that can be cancelled come before the process exists. Each near end belongs to its connection from
            # the start, so it is closed wherever this method ends.
            near, calls = socket.socketpair()
            far_ends.enter_context(calls)
            self._calls = await asyncio.open_connection(sock=near)
            near, control = socket.socketpair()
            far_ends.enter_context(control)
            reader, self._control = await asyncio.open_connection(sock=near)
            reading, errors = os.pipe()
            far_ends.callback(os.close, errors)
            output = await self._open_output(reading)
            self._exit_report = asyncio.create_task(_read_report(reader))
            self._collecting = asyncio.create_task(self._collect_output(output))
            me = os.getpid()
            config = SupervisorConfig(
                calls.fileno(), control.fileno(), (me, start_time(me)), self._memory_limit, self._directory
            )
            self._starting = asyncio.ensure_future(start_supervisor(config, errors))
        self._supervisor = await asyncio.shield(self._starting)

    def _fork(self, config: SupervisorConfig, output: int) -> Awaitable[SupervisorProcess]:
        assert self._fork_server is not None
        reply = self._fork_server.fork(config, output)

        async def supervisor() -> SupervisorProcess:
            fields = await reply
            return SupervisorProcess(fields["pid"], fields["start_time"])

        return supervisor()

    def _spawn(self, config: SupervisorConfig, output: int) -> Awaitable[SupervisorProcess]:
        """Start a supervisor in a new interpreter."""
        child = subprocess.Popen(
            python_command("agentfly.resources.environments.process_supervisor:main", config.to_json()),
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(config.calls, config.control),
            start_new_session=True,  # Ctrl-C at the terminal is for the user's program, which then ends this in order
        )
        started: asyncio.Future[SupervisorProcess] = asyncio.get_running_loop().create_future()
        started.set_result(SupervisorProcess(child.pid, start_time(child.pid), child))
        return started

    async def _end(self, supervisor: SupervisorProcess) -> None:
        assert self._control is not None
        assert self._exit_report is not None
        if not self._stop_requested:
            self._stop_requested = True
            with contextlib.suppress(OSError):
                self._control.write(b".")  # this side removes the directory
                self._control.write_eof()
        await supervisor.wait_gone(self._exit_report, KILL_TIMEOUT_S)  # a connection reset counts as end-of-file
        if self._memory_limit is not None:
            await run_in_thread(self._memory_limit.remove)  # does nothing unless the supervisor was killed

    def _close_connections(self) -> None:
        for task in (self._exit_report, self._collecting):
            if task is not None:
                task.cancel()
        for transport in (self._calls and self._calls[1], self._control, self._output):
            if transport is not None:
                transport.close()

    async def _open_output(self, descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        self._output, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        return reader

    async def _collect_output(self, output: asyncio.StreamReader) -> None:
        """Keep the end of the output in memory, so that the process can neither fill a disk nor block."""
        while chunk := await output.read(1 << 16):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]


async def _read_report(reader: asyncio.StreamReader) -> bytes:
    """Read the exit report up to end-of-file, bounded in size."""
    text = b""
    while chunk := await reader.read(1 << 16):
        text = (text + chunk)[:TAIL_BYTES]
    return text


def reap(traces: Mapping[str, Any]) -> None:
    """Kill an orphaned supervisor with all its descendants, and remove its directory. The `reap` of the kind.

    A supervisor normally ends by itself within a second of its owner's death. This function is for the other cases.

    Raises:
        ResourceError: it does not end.
        OSError: something in its directory cannot be removed.
    """
    pid, started = traces.get("pid"), traces.get("start_time")
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + KILL_TIMEOUT_S
        if pid is not None and start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
                os.kill(pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
        while time.monotonic() < deadline:
            if pid is None or start_time(pid) != started:
                if (limit := traces.get("memory_limit")) is not None:
                    MemoryLimit(**limit).remove()
                if (directory := traces.get("directory")) is not None:
                    remove_tree(directory)
                return
            time.sleep(0.01)
    raise ResourceError(f"The supervisor {pid} of a simulator does not end, even after SIGKILL. Check what blocks it.")
