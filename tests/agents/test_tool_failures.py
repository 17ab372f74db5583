"""Exceptions in tools: shown to the model, reported as an outage, or retried."""

from __future__ import annotations

import asyncio
import errno
import http.client
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import httpx
import pytest
import requests
import urllib3

from agentfly.agents import invocation
from agentfly.agents.tool_decorator import tool
from agentfly.contexts.context import Context
from agentfly.core.errors import (
    AcquireTimeout,
    PrerequisiteError,
    ResourceDied,
    ToolCrashed,
    ToolError,
    ToolTimeout,
    ToolUnavailable,
    UnknownTool,
    UsageError,
)
from agentfly.core.trajectory import Failure

if TYPE_CHECKING:
    pass


async def test_an_exception_of_the_tools_code_is_told_to_the_model_with_its_cause(context: Context) -> None:
    @tool
    def divide(by: int) -> float:
        """Divide one."""
        return 1 / by

    with pytest.raises(ToolCrashed, match=r"^ZeroDivisionError: division by zero$") as crashed:
        await divide.call({"by": 0}, context)
    assert isinstance(crashed.value.__cause__, ZeroDivisionError)


def wrapped() -> None:
    try:
        raise ConnectionResetError("peer")
    except ConnectionResetError as error:
        raise ValueError("no answer") from error


def while_handling() -> None:
    try:
        raise ConnectionResetError("peer")
    except ConnectionResetError:
        raise ValueError("no answer")  # noqa: B904


def replaced() -> None:
    try:
        raise ConnectionResetError("peer")
    except ConnectionResetError:
        raise ValueError("no answer") from None


GET = httpx.Request("GET", "http://a")


def foreign(module: str, name: str, **attributes: Any) -> Exception:
    """An exception as a package raises it that need not be installed."""
    error: Exception = type(name, (Exception,), {"__module__": module, **attributes})("it failed")
    return error


@dataclass
class Named:
    name: str


def raises(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


async def failure_of(fail: Callable[[], None], context: Context) -> Exception:
    @tool
    def look() -> None:
        """Look."""
        fail()

    with pytest.raises((ToolCrashed, ToolUnavailable)) as failed:
        await look.call({}, context)
    return failed.value


@pytest.mark.parametrize(
    "fail",
    [
        raises(ConnectionRefusedError(errno.ECONNREFUSED, "refused")),
        raises(MemoryError()),
        raises(OSError(errno.ENOSPC, "disk full")),
        raises(OSError(errno.EMFILE, "too many files")),
        raises(OSError(errno.ENETUNREACH, "no way there")),
        raises(socket.gaierror(socket.EAI_NONAME, "no such host")),
        raises(httpx.ConnectError("refused")),
        raises(httpx.ReadTimeout("slow")),
        raises(httpx.HTTPStatusError("busy", request=GET, response=httpx.Response(503))),
        raises(httpx.HTTPStatusError("slow down", request=GET, response=httpx.Response(429))),
        raises(asyncio.IncompleteReadError(b"half", 10)),
        raises(http.client.IncompleteRead(b"half")),
        raises(http.client.RemoteDisconnected("gone")),
        raises(urllib.error.HTTPError("http://a", 503, "busy", Message(), None)),
        raises(ssl.SSLEOFError(8, "EOF")),
        raises(anyio.BrokenResourceError()),
        raises(aiohttp.ServerDisconnectedError()),
        raises(aiohttp.ClientPayloadError("half")),
        raises(aiohttp.ServerTimeoutError("slow")),
        raises(requests.exceptions.ConnectionError("refused")),
        raises(requests.exceptions.ReadTimeout("slow")),
        raises(requests.exceptions.ChunkedEncodingError("half")),
        raises(urllib3.exceptions.ProtocolError("gone")),
        raises(foreign("redis.exceptions", "ConnectionError")),
        raises(foreign("pymongo.errors", "ConnectionFailure")),
        raises(foreign("grpc.aio._call", "AioRpcError", code=lambda _: Named("UNAVAILABLE"))),
        raises(foreign("botocore.exceptions", "ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 503}})),
        raises(foreign("openai", "APIConnectionError")),
        raises(ExceptionGroup("two", [ValueError("x"), ConnectionRefusedError("y")])),
        raises(ExceptionGroup("one", [AcquireTimeout("pool full")])),
        wrapped,
        while_handling,
    ],
)
async def test_an_outage_is_infrastructure_and_says_what_to_do_if_the_model_can_cause_it(
    fail: Callable[[], None], context: Context
) -> None:
    failure = await failure_of(fail, context)
    assert isinstance(failure, ToolUnavailable)
    assert not isinstance(failure, ToolError)  # the model is not told of it
    assert not Failure.of(failure).by_policy
    assert str(failure).startswith(f"The tool 'look' failed with {type(failure.__cause__).__name__}: ")
    assert "catch the exception in the tool and raise agentfly.ToolError" in str(failure)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_a_far_side_that_breaks_off_is_an_outage_whoever_asks_it(answer: bytes, context: Context) -> None:
    async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(breaks_off, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"

        async def by_aiohttp() -> bytes:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return await response.read()

        async def by_streams() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            try:
                return await reader.readexactly(100)
            finally:
                writer.close()

        def by_requests() -> bytes:
            return requests.get(url, timeout=30).content

        def by_urllib() -> bytes:
            with urllib.request.urlopen(url, timeout=30) as response:
                return bytes(response.read())

        def by_httpx() -> bytes:
            return httpx.get(url, timeout=30).content

        for fetch in (by_aiohttp, by_streams, by_requests, by_urllib, by_httpx):
            fetch.__doc__ = "Fetch."
            with pytest.raises(ToolUnavailable):
                await tool(fetch).call({}, context)


def test_no_client_is_imported_to_know_its_exceptions() -> None:
    """In a process of its own, since this one has them all."""
    program = (
        "import sys; from agentfly.agents.transient_errors import find_transient_error as find; find(ValueError('x'));"
        "print(*{'aiohttp', 'requests', 'urllib3', 'grpc', 'openai', 'botocore'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


async def test_an_outage_behind_an_exception_is_named(context: Context) -> None:
    failure = await failure_of(wrapped, context)
    assert "ValueError: no answer (because of ConnectionResetError: peer)" in str(failure)


@pytest.mark.parametrize(
    "fail",
    [
        raises(FileNotFoundError(errno.ENOENT, "no such file")),
        raises(PermissionError(errno.EACCES, "not yours")),
        raises(IsADirectoryError(errno.EISDIR, "a directory")),
        raises(OSError("something")),
        raises(httpx.InvalidURL("nowhere")),
        raises(httpx.HTTPStatusError("not there", request=GET, response=httpx.Response(404))),
        raises(httpx.HTTPStatusError("it fell over", request=GET, response=httpx.Response(500))),
        raises(urllib.error.HTTPError("http://a", 403, "no", Message(), None)),
        raises(urllib.error.URLError("unknown url type: xyz")),
        raises(requests.exceptions.InvalidURL("nowhere")),
        raises(aiohttp.InvalidURL("nowhere")),
        raises(EOFError("no more")),
        raises(foreign("redis.exceptions", "ResponseError")),
        raises(foreign("of.a.user", "ConnectionError")),
        raises(foreign("of.a.user", "Teapot", status_code=503)),
        raises(foreign("grpc.aio._call", "AioRpcError", code=lambda _: Named("INVALID_ARGUMENT"))),
        raises(ExceptionGroup("two", [ValueError("x"), UnknownTool("y")])),
        replaced,
    ],
)
async def test_what_the_model_may_have_caused_is_told_to_it(fail: Callable[[], None], context: Context) -> None:
    assert isinstance(await failure_of(fail, context), ToolCrashed)


async def test_a_tool_may_say_that_the_model_caused_an_outage(context: Context) -> None:
    @tool
    def fetch(host: str) -> None:
        """Fetch."""
        try:
            raise ConnectionRefusedError(host)
        except ConnectionError as error:
            raise ToolError(f"{host} does not answer") from error

    with pytest.raises(ToolError, match=r"^example does not answer$"):
        await fetch.call({"host": "example"}, context)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("raised", [SystemExit(1), StopIteration("x"), asyncio.CancelledError(), TimeoutError("slow")])
async def test_nothing_that_a_tool_raises_can_end_more_than_its_call(
    raised: BaseException, sync: bool, context: Context
) -> None:
    def fail() -> None:
        """Fail."""
        raise raised

    async def fail_too() -> None:
        """Fail."""
        raise raised

    with pytest.raises(ToolCrashed):
        await tool(fail if sync else fail_too).call({}, context)


async def test_a_long_message_of_an_exception_is_cut(context: Context) -> None:
    @tool
    def fail() -> None:
        """Fail."""
        raise ValueError("x" * 100_000)

    with pytest.raises(ToolCrashed) as crashed:
        await fail.call({}, context)
    assert len(str(crashed.value)) < 1_000


@pytest.mark.parametrize("error", [ToolError("no such item"), AcquireTimeout("pool full"), PrerequisiteError("bwrap")])
async def test_a_typed_failure_comes_out_as_it_was_raised(error: Exception, context: Context) -> None:
    @tool
    async def fail() -> None:
        """Fail."""
        raise error

    with pytest.raises(type(error)) as raised:
        await fail.call({}, context)
    assert raised.value is error


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invocation, "FIRST_RETRY_DELAY_S", 0.001)


class Flaky:
    """Fails as often as it is told, and counts."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.calls = error, times, 0

    def look(self) -> str:
        """Look."""
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "there"


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("error", [ConnectionResetError("peer"), httpx.ReadTimeout("slow"), ResourceDied("gone")])
async def test_a_call_that_infrastructure_made_fail_is_made_again_as_often_as_the_tool_says(
    error: Exception, context: Context
) -> None:
    flaky = Flaky(error, times=2)
    assert (await tool(retries=2)(flaky.look).call({}, context)).observation == "there"
    assert flaky.calls == 3
    for retries in (0, 1):
        flaky = Flaky(error, times=2)
        with pytest.raises((ToolUnavailable, ResourceDied)):
            await tool(retries=retries)(flaky.look).call({}, context)
        assert flaky.calls == 1 + retries


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    "error", [ToolError("no such item"), ValueError("x"), UsageError("wrong"), PrerequisiteError("bwrap")]
)
async def test_what_the_model_caused_and_what_must_be_mended_is_never_tried_again(
    error: Exception, context: Context
) -> None:
    flaky = Flaky(error, times=1)
    with pytest.raises((ToolError, UsageError, PrerequisiteError)):
        await tool(retries=5)(flaky.look).call({}, context)
    assert flaky.calls == 1


async def test_all_tries_together_have_the_tools_time(context: Context) -> None:
    flaky = Flaky(ConnectionResetError("peer"), times=1000)
    with pytest.raises(ToolTimeout):
        await tool(retries=1000, timeout_s=0.1)(flaky.look).call({}, context)
