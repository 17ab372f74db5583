"""EngineStream: the stream of a program in a container, through the engine's service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agentfly.resources.containers.stream_shell.stream import Stream

if TYPE_CHECKING:
    from aiodocker.stream import Stream as Attached


class EngineStream(Stream):
    """A connection that was upgraded to carry a program's input and outputs."""

    def __init__(self, attached: Attached) -> None:
        """Make a handle of a connection that `open` opens."""
        self._attached = attached
        self._ended = False

    @classmethod
    async def open(cls, attached: Attached) -> EngineStream:
        """Open a connection. Nothing of it is left if that fails or is cancelled."""
        stream = cls(attached)
        try:
            await attached.__aenter__()
        except BaseException:
            await stream.close()
            raise
        return stream

    async def read(self) -> tuple[int, bytes] | None:
        """See `Stream.read`."""
        from aiohttp import ClientError

        try:
            message = await self._attached.read_out()
        except ClientError as error:
            await self.close()
            raise ConnectionResetError(str(error)) from error
        if message is None:
            await self.close()
            return None
        return message.stream, message.data

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        from aiohttp import ClientError

        if self._ended:
            raise BrokenPipeError("the stream has ended")
        try:
            await self._attached.write_in(data)
        except (ClientError, RuntimeError, AssertionError, AttributeError) as error:  # what its library raises then
            raise BrokenPipeError(f"the stream is closed ({error!r})") from error

    async def end_input(self) -> None:
        """See `Stream.end_input`."""
        response = self._attached._resp
        transport = response.connection.transport if response is not None and response.connection else None
        if transport is None or not transport.can_write_eof():
            raise BrokenPipeError("the stream is closed, or cannot be closed on one side")
        transport.write_eof()

    async def close(self) -> None:
        """See `Stream.close`."""
        self._ended = True
        try:
            async with asyncio.timeout(1):
                await self._attached.close()
        except (TimeoutError, AssertionError):
            if (response := self._attached._resp) is not None:
                response.close()  # the other side has closed it, which its library takes for done
