"""ProcessStream: a process of this machine as the stream of a program in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentfly.resources.containers.stream_shell.stream import Stream

_CHUNK = 65536
_PIECES = 16  # read ahead
_GRACE_S = 0.5  # for what a process has printed before its end
PROGRAM = Path(__file__).with_name("namespaces.py")


class ProcessStream(Stream):
    """A process, its input and its two outputs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Take over a process whose input and outputs are pipes."""
        self.process = process
        self._pieces: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(_PIECES)
        self._over = False
        self._reading = asyncio.create_task(self._read_both())

    async def read(self) -> tuple[int, bytes] | None:
        """See `Stream.read`."""
        if self._over:
            return None
        piece = await self._pieces.get()
        self._over = piece is None
        return piece

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        assert self.process.stdin is not None
        if self.process.returncode is not None or self.process.stdin.is_closing():
            raise BrokenPipeError("the program has ended")
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def end_input(self) -> None:
        """See `Stream.end_input`."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def close(self) -> None:
        """See `Stream.close`. What runs inside finds its input at its end; only a sandbox's end is sure to end it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self._over = True
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.exited()
        self.process._transport.close()  # type: ignore[attr-defined]

    async def exited(self) -> int:
        """Wait until the process has ended; its exit code.

        The `wait` of asyncio comes back at the end of the outputs only. That does not come while others have them open,
        or while nobody reads what was printed.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(ProcessLookupError):  # it has ended, and was waited for
            descriptor = os.pidfd_open(self.process.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        while (code := self.process.returncode) is None:  # noqa: ASYNC110 - asyncio tells nobody that it has waited
            await asyncio.sleep(0.005)
        return code

    async def _read_both(self) -> None:
        """Read until both outputs are at their end, or the process is, though others may have them open."""
        readers = [asyncio.create_task(self._read_one(number)) for number in (1, 2)]
        ended = asyncio.create_task(self.exited())
        try:
            while not all(reader.done() for reader in readers):
                await asyncio.wait([*readers, ended], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    await asyncio.wait(readers, timeout=_GRACE_S)
                    break
            await self._pieces.put(None)
        finally:
            for task in (*readers, ended):
                task.cancel()

    async def _read_one(self, number: int) -> None:
        source = self.process.stdout if number == 1 else self.process.stderr
        assert source is not None
        while data := await source.read(_CHUNK):
            await self._pieces.put((number, data))


async def namespaces(
    verb: str, place: Path, plan: Mapping[str, Any], environment: Mapping[str, str], passed: Sequence[int] = ()
) -> ProcessStream:
    """Run the program `namespaces` with a plan.

    Args:
        verb: what it is to do.
        place: the directory of the sandbox, by which the process is known.
        plan: what it needs to know. It is in none of the process's words, which all users of the host may read.
        environment: the environment of that program alone.
        passed: open files that it is to have, named in its words.
    """
    descriptor = _written(plan)
    try:
        words = [verb, str(place), str(descriptor), *map(str, passed)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(PROGRAM), *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            pass_fds=(descriptor, *passed),
            start_new_session=True,
            limit=_CHUNK,
        )  # fmt: skip
    finally:
        os.close(descriptor)
    return ProcessStream(process)


def _written(plan: Mapping[str, Any]) -> int:
    """A file in memory with a plan, open at its beginning."""
    descriptor = os.memfd_create("plan")
    with open(descriptor, "w", encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        json.dump(plan, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
