"""WorkerProcess: this process's side of a simulator's process and its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import ResourceError
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.resources.environments.fork_server import ForkServer
from agentfly.resources.environments.process_supervisor import ExitInfo, SupervisorConfig
from agentfly.resources.environments.wire_types import MAX_BYTES, MalformedData
from agentfly.resources.environments.worker import FRAME_LENGTH
from agentfly.resources.process.child import python_command
from agentfly.resources.process.memory_limit import MemoryLimit
from agentfly.resources.process.procfs import peer_closed, signal_descendants, start_time

logger = logging.getLogger(__name__)

TAIL_BYTES = 4096
"""How much of the end of a simulator's output is kept for the message about its death."""

MOST_ANSWER_BYTES = MAX_BYTES + (1 << 20)
"""The longest answer that is read: a result, and what tells that it is one."""

FORCE_S = 5.0
"""Seconds a keeper may take to end everything below it before it is killed itself."""

FORK_ATTEMPTS = 2
"""How often a zygote that has died is replaced for one start."""


Birth = asyncio.Future["SupervisorProcess"]
StartSupervisor = Callable[[SupervisorConfig, int], Awaitable["SupervisorProcess"]]


@dataclass(frozen=True)
class SupervisorProcess:
    """A keeper that has been started.

    Args:
        pid: its process id.
        started: its start time.
        child: the same as a child of this process; None if it is the child of a zygote.
    """

    pid: int
    started: int | None
    child: subprocess.Popen[bytes] | None = None

    def gone(self) -> bool:
        """Whether it has ended."""
        if self.child is not None:
            return self.child.poll() is not None
        return self.started is None or start_time(self.pid) != self.started

    def kill(self) -> None:
        """Kill it. What it keeps is killed by the kernel, as far as that was started by it."""
        if not self.gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class WorkerProcess:
    """A process that answers parcels with parcels, one at a time, and whose end is noticed and told.

    Args:
        nursery: what has it forked; None to begin with a fresh interpreter.
        bound: the limit on its memory, with all that it starts, if there is one.
        directory: a directory that is its alone.
        environment: the environment variables of an interpreter that it begins with.
    """

    def __init__(
        self, nursery: ForkServer | None, bound: MemoryLimit | None, directory: str, environment: dict[str, str]
    ) -> None:
        self._nursery = nursery
        self._bound = bound
        self._directory = directory
        self._environment = environment
        self._claimed = False
        self._starting: asyncio.Task[SupervisorProcess] | None = None
        self._keeper: SupervisorProcess | None = None
        self._calls: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._life: asyncio.StreamWriter | None = None
        self._output: asyncio.ReadTransport | None = None
        self._last_words: asyncio.Task[bytes] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._tail = b""
        self._told_to_end = False

    async def start(self) -> None:
        """Start the keeper and, by it, the process."""
        if self._nursery is not None:
            self._nursery.acquire()
            self._claimed = True
            for _ in range(FORK_ATTEMPTS):
                with contextlib.suppress(ConnectionError):  # the zygote died, perhaps of what it imported
                    async with self._nursery.turn:
                        if not await self._nursery.ready():
                            break
                        await self._connect(self._fork)
                        return
                self._close_connections()
        await self._connect(self._spawn)  # by which an import that kills is told

    async def request(self, request: bytes) -> bytes:
        """Send a request and get the bytes that answer it.

        Raises:
            EOFError: the process is gone.
            Malformed: the answer is longer than any may be; the process can be asked nothing more.
        """
        assert self._calls is not None
        reader, writer = self._calls
        try:
            writer.writelines([FRAME_LENGTH.pack(len(request)), request])
            await writer.drain()
            length = FRAME_LENGTH.unpack(await reader.readexactly(FRAME_LENGTH.size))[0]
            if length > MOST_ANSWER_BYTES:
                raise MalformedData(f"it is {length} bytes long")
            return await reader.readexactly(length)
        except ConnectionError as error:
            raise EOFError from error

    @property
    def ended(self) -> bool:
        """Whether the process has ended, with everything that it had started."""
        told = self._last_words is not None and self._last_words.done()
        return told or (self._keeper is not None and self._keeper.gone())

    @property
    def peer_closed(self) -> bool:
        """Whether the process has closed its side, which its end does, though what it started may be there yet."""
        if self._calls is None or (self._last_words is not None and self._last_words.done()):
            return True
        descriptor: int = self._calls[1].get_extra_info("socket").fileno()
        return descriptor < 0 or peer_closed(descriptor)

    @property
    def traces(self) -> dict[str, Any]:
        """How `reap` finds it."""
        keeper = self._keeper
        return {} if keeper is None else {"pid": keeper.pid, "start_time": keeper.started}

    def freeze(self) -> None:
        """Stop the process and everything that it has started where they are."""
        if not self.ended and self._keeper is not None:
            signal_descendants(self._keeper.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        if not self.ended and self._keeper is not None:
            signal_descendants(self._keeper.pid, signal.SIGCONT)

    @property
    def exit_info(self) -> ExitInfo | None:
        """How the process ended, if that is told by now."""
        words = self._last_words
        if words is not None and words.done() and not words.cancelled():
            with contextlib.suppress(OSError, ValueError):
                return ExitInfo.from_json(words.result())
        return None

    async def wait_exit(self) -> ExitInfo:
        """How the process ended."""
        with contextlib.suppress(TimeoutError, OSError, ValueError):
            async with asyncio.timeout(FORCE_S):
                assert self._last_words is not None
                assert self._listening is not None
                words = await asyncio.shield(self._last_words)
                await asyncio.shield(self._listening)
                return ExitInfo.from_json(words)
        return ExitInfo(None, False)

    @property
    def output_tail(self) -> str:
        """The end of what the process has written to its output."""
        return self._tail.decode(errors="replace").strip()

    async def stop(self) -> None:
        """Kill the process and everything that it had started; return when they are gone."""
        if self._starting is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(FORCE_S):
                    self._keeper = await asyncio.shield(self._starting)
        if self._keeper is not None:
            await self._end(self._keeper)
        self._close_connections()
        if self._claimed and self._nursery is not None:
            self._nursery.release()
            self._claimed = False

    async def _connect(self, bear: StartSupervisor) -> None:
        with contextlib.ExitStack() as far_ends:  # which are for the keeper alone
            # What can be interrupted comes before there is a process to lose, and each near end belongs to its
            # connection from the moment it is made, so that it is closed wherever this ends.
            near, calls = socket.socketpair()
            far_ends.enter_context(calls)
            self._calls = await asyncio.open_connection(sock=near)
            near, life = socket.socketpair()
            far_ends.enter_context(life)
            words, self._life = await asyncio.open_connection(sock=near)
            reading, errors = os.pipe()
            far_ends.callback(os.close, errors)
            output = await self._open_output(reading)
            self._last_words = asyncio.create_task(_end_of(words))
            self._listening = asyncio.create_task(self._collect_output(output))
            me = os.getpid()
            charge = SupervisorConfig(calls.fileno(), life.fileno(), (me, start_time(me)), self._bound, self._directory)
            self._starting = asyncio.ensure_future(bear(charge, errors))
        self._keeper = await asyncio.shield(self._starting)

    def _fork(self, charge: SupervisorConfig, output: int) -> Awaitable[SupervisorProcess]:
        assert self._nursery is not None
        reply = self._nursery.fork(charge, output)

        async def keeper() -> SupervisorProcess:
            born = await reply
            return SupervisorProcess(born["pid"], born["start_time"])

        return keeper()

    def _spawn(self, charge: SupervisorConfig, output: int) -> Awaitable[SupervisorProcess]:
        """Start a keeper in a fresh interpreter."""
        child = subprocess.Popen(
            python_command("agentfly.resources.environments.process_supervisor:main", charge.to_json()),
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(charge.calls, charge.life),
            start_new_session=True,  # Ctrl-C at the terminal is for the user's program, which then ends this in order
        )
        born: Birth = asyncio.get_running_loop().create_future()
        born.set_result(SupervisorProcess(child.pid, start_time(child.pid), child))
        return born

    async def _end(self, keeper: SupervisorProcess) -> None:
        assert self._life is not None
        assert self._last_words is not None
        if not self._told_to_end:
            self._told_to_end = True
            with contextlib.suppress(OSError):
                self._life.write(b".")  # this side tidies up
                self._life.write_eof()
        try:
            async with asyncio.timeout(FORCE_S):
                await asyncio.shield(self._last_words)
        except TimeoutError:
            logger.warning("The keeper %d of a simulator does not end and is killed.", keeper.pid)
            keeper.kill()
        except OSError:
            pass  # a reset says the same as an end
        while not keeper.gone():  # noqa: ASYNC110  (its sockets close an instant before it is gone)
            await asyncio.sleep(0.001)
        if self._bound is not None:
            await run_in_thread(self._bound.remove)  # nothing to do unless the keeper was killed

    def _close_connections(self) -> None:
        for task in (self._last_words, self._listening):
            if task is not None:
                task.cancel()
        for transport in (self._calls and self._calls[1], self._life, self._output):
            if transport is not None:
                transport.close()

    async def _open_output(self, descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        self._output, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        return reader

    async def _collect_output(self, output: asyncio.StreamReader) -> None:
        """Keep the end of what the process writes, so that it can neither fill a disk nor block."""
        while chunk := await output.read(1 << 16):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]


async def _end_of(words: asyncio.StreamReader) -> bytes:
    """What is written until the end, as far as it is no more than a keeper writes."""
    text = b""
    while chunk := await words.read(1 << 16):
        text = (text + chunk)[:TAIL_BYTES]
    return text


def reap(traces: Mapping[str, Any]) -> None:
    """End a keeper that a dead process left, and all below it, and remove its directory. The `reap` of the kind.

    A keeper ends by itself within a second of its process's death; this is for one that could not.

    Raises:
        ResourceError: it does not end.
        OSError: something in its directory cannot be removed.
    """
    pid, started = traces.get("pid"), traces.get("start_time")
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + FORCE_S
        if pid is not None and start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
                os.kill(pid, signal.SIGCONT)  # a stopped one would not hear
        while time.monotonic() < deadline:
            if pid is None or start_time(pid) != started:
                if (bound := traces.get("bound")) is not None:
                    MemoryLimit(**bound).remove()
                if (directory := traces.get("directory")) is not None:
                    remove_tree(directory)
                return
            time.sleep(0.01)
    raise ResourceError(
        f"The keeper {pid} of a simulator does not end, not even by SIGKILL. Look for what holds it up."
    )
