"""MCP servers: start, operation and end, also if they misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp", reason="pip install 'agentfly-rl[mcp]'")

import httpx2
from mcp.types import TextContent

from agentfly.core.errors import (
    ConfigError,
    PrerequisiteError,
    ResourceDied,
    ResourceError,
    ResourceStartError,
    ToolError,
    UsageError,
)
from agentfly.core.installation import install_command
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.orphans import reap_orphans
from agentfly.resources.mcp.server import MCPServer
from agentfly.resources.mcp.spec import MCPServerSpec
from agentfly.resources.resource import Status
from agentfly.testing.resource_conformance import check_resource

HERE = Path(__file__).parent
SMALL = (sys.executable, "-S", "-E", str(HERE / "small_mcp_server.py"))
NOTES = (sys.executable, str(HERE / "notes_mcp_server.py"))


def small(*command: str, **fields: Any) -> MCPServerSpec:
    return MCPServerSpec(command=command or SMALL, **{"start_timeout_s": 60, "release_timeout_s": 8, **fields})


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own."""
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@contextlib.asynccontextmanager
async def started(spec: MCPServerSpec, name: str = "server") -> AsyncIterator[MCPServer]:
    server = MCPServer(spec, name)
    try:
        await server.start()
        yield server
    finally:
        await server.release()


async def said(server: MCPServer, tool: str, **arguments: Any) -> str:
    result = await server.call(tool, arguments)
    (block,) = result.content
    assert isinstance(block, TextContent), result
    return block.text


async def eventually(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# --- programs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_mcp_servers_keep_the_contract_of_resources() -> None:
    async def dirty(server: MCPServer) -> None:
        await said(server, "write", line="left behind")
        await said(server, "leave")

    async def is_clean(server: MCPServer) -> bool:
        return await said(server, "read") == "[]"

    await check_resource(
        small(capacity=2), dirty=dirty, is_clean=is_clean, use=lambda server: server.call("wait", {"seconds": 90})
    )


async def test_a_server_tells_its_tools_and_is_called_and_nothing_of_it_is_left(state: Path) -> None:
    async with started(small()) as server:
        assert [tool.name for tool in server.tools] == ["write", "read", "wait", "leave", "end"]
        assert await said(server, "write", line="tea") == "line 1"
        left = int(await said(server, "leave"))
        assert await server.status() is Status.HEALTHY
        assert psutil.pid_exists(left)
    assert not psutil.pid_exists(left)
    assert not list((state / "mcp-servers").iterdir())


async def test_a_call_that_the_server_refuses_is_the_callers_matter() -> None:
    async with started(small()) as server:
        with pytest.raises(ToolError, match="there is no 'fly'"):
            await server.call("fly", {})
        assert await said(server, "read") == "[]"


async def test_calls_overlap_and_one_that_is_given_up_leaves_the_others_alone() -> None:
    async with started(small()) as server:
        given_up = asyncio.create_task(server.call("wait", {"seconds": 60}))
        await asyncio.sleep(0.05)
        assert await server.status() is Status.HEALTHY
        assert await said(server, "write", line="meanwhile") == "line 1"
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert await said(server, "read") == '["meanwhile"]'
        assert await server.status() is Status.HEALTHY


async def test_a_call_that_takes_too_long_is_a_failure_of_infrastructure_that_says_what_to_do() -> None:
    async with started(small(call_timeout_s=1)) as server:
        with pytest.raises(ResourceError, match=r"within call_timeout_s=1\. Where the model can cause that"):
            await server.call("wait", {"seconds": 60})
        assert await said(server, "read") == "[]"


async def test_a_server_that_dies_during_a_call_says_how_with_the_end_of_its_log() -> None:
    async with started(small()) as server:
        waiting = asyncio.create_task(server.call("wait", {"seconds": 60}))
        await asyncio.sleep(0.05)
        for call in (server.call("end", {}), waiting, server.call("read", {})):
            with pytest.raises(ResourceDied, match=r"exited with status 3\)\. The end of its log:\nout of paper"):
                await call
        assert await server.status() is Status.BROKEN


def small_servers() -> set[psutil.Process]:
    """The running servers of `SMALL` that this process has started."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline() == list(SMALL):
                found.add(process)
    return found


async def test_the_engine_replaces_a_server_that_was_killed(tmp_path: Path) -> None:
    others = small_servers()
    async with ResourceEngine(ledger=tmp_path / "ledger") as engine:
        lease = await engine.acquire(small(), "one")
        assert await said(lease.resource, "write", line="tea") == "line 1"
        (program,) = small_servers() - others
        program.kill()
        with pytest.raises(ResourceDied, match="SIGKILL"):
            await said(lease.resource, "read")
        await engine.release(lease)
        again = await engine.acquire(small(), "two")
        assert await said(again.resource, "read") == "[]"


@pytest.mark.slow
async def test_what_a_killed_process_left_ends_with_it_and_is_removed_by_the_next(state: Path, tmp_path: Path) -> None:
    program = tmp_path / "owner.py"
    program.write_text(
        textwrap.dedent(f"""
        import asyncio
        from agentfly.resources.engine.engine import ResourceEngine
        from agentfly.resources.mcp.spec import MCPServerSpec

        async def main():
            async with ResourceEngine() as engine:
                lease = await engine.acquire(MCPServerSpec(command={SMALL!r}), "owner")
                result = await lease.resource.call("leave", {{}})
                print(result.content[0].text, lease.resource.traces["pid"], flush=True)
                await asyncio.sleep(600)

        asyncio.run(main())
        """)
    )
    owner = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert owner.stdout is not None
    left, keeper = map(int, (await asyncio.to_thread(owner.stdout.readline)).split())
    os.kill(keeper, signal.SIGSTOP)  # one that can do nothing any more
    owner.kill()
    owner.wait()
    owner.stdout.close()
    os.kill(keeper, signal.SIGKILL)
    await reap_orphans()
    await eventually(lambda: not psutil.pid_exists(left))
    assert not list((state / "mcp-servers").iterdir())


@pytest.mark.slow
async def test_a_program_gets_the_variables_of_its_spec_and_few_others_and_none_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOT_FOR_SERVERS", "1")
    spec = MCPServerSpec(command=NOTES, env={"TOKEN": "s3cret-token"}, cwd=str(tmp_path), start_timeout_s=100)
    assert "s3cret" not in repr(spec)
    async with started(spec) as server:
        assert await said(server, "variable", name="TOKEN") == f"s3cret-token in {tmp_path}"
        assert await said(server, "variable", name="NOT_FOR_SERVERS") == f"None in {tmp_path}"
        assert await said(server, "secret") == "printed"
        await eventually(lambda: "the secret is [secret]" in server.log())
        blocked = asyncio.create_task(server.call("block", {"seconds": 0.5}))
        assert await server.status() is Status.HEALTHY  # though it can answer nothing else meanwhile
        assert not (await blocked).is_error


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("no-such-program-here",), "could not be run: .*no-such-program-here"),
        ((sys.executable, "-c", "print('no server'); raise SystemExit('no licence')"), r"status 1.*no licence"),
        (("sh", "-c", "echo trouble >&2; exec sleep 600"), r"did not answer within 0.75 s.*trouble"),
    ],
)
@pytest.mark.slow
async def test_a_start_that_comes_to_nothing_says_why(command: tuple[str, ...], told: str, state: Path) -> None:
    server = MCPServer(small(*command, start_timeout_s=1.0 if "sh" in command else 60), "server")
    with pytest.raises(ResourceStartError, match=f"(?s){told}"):
        await server.start()
    await server.release()
    assert not list((state / "mcp-servers").iterdir())


async def test_a_program_that_is_named_from_here_is_told_where_it_is_looked_for(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("print('hello')")
    monkeypatch.chdir(tmp_path)
    for command in ((sys.executable, "mine.py"), ("./mine.py",)):
        with pytest.raises(ResourceStartError) as refused:
            async with started(MCPServerSpec(command=command)):
                pass
        assert str(refused.value).count("did not start") == 1
        assert f"write its absolute path, {str(tmp_path / 'mine.py')!r}, or give cwd=" in str(refused.value)


async def test_a_program_that_prints_where_it_should_not_is_a_server_all_the_same() -> None:
    noisy = f"print('hello', flush=True); import runpy; runpy.run_path({SMALL[-1]!r}, run_name='__main__')"
    async with started(small(sys.executable, "-c", noisy)) as server:
        assert await said(server, "read") == "[]"


async def test_a_program_that_takes_no_notice_of_its_end_is_killed(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time, runpy; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"runpy.run_path({SMALL[-1]!r}, run_name='__main__'); time.sleep(600)"
    )
    async with started(small(sys.executable, "-c", stubborn, release_timeout_s=1)) as server:
        left = int(await said(server, "leave"))
    assert not psutil.pid_exists(left)


async def test_without_the_package_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.client.client", None)
    with pytest.raises(PrerequisiteError, match=re.escape(install_command("mcp"))):
        await MCPServer(small(), "server").start()


# --- addresses -----------------------------------------------------------------------------------------------------


@pytest.fixture
def address() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of the official package, over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with subprocess.Popen([*NOTES, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp", program
        finally:
            program.kill()


@pytest.mark.slow
async def test_a_server_at_an_address_is_called_over_http_until_it_goes_away(address: Any) -> None:
    url, program = address
    spec = MCPServerSpec(url=url, start_timeout_s=60)
    assert spec.label == f"mcp:127.0.0.1:{url.split(':')[2].split('/')[0]}"
    async with started(spec) as server, started(spec, "other") as other:
        assert server.traces == {}
        assert await said(server, "write", line="tea") == "1 None"
        assert await said(other, "write", line="tea") == "2 None"  # it is the same server
        failed = await server.call("fail", {"how": "badly"})
        assert failed.is_error
        await server.reset()
        waiting = asyncio.create_task(server.call("wait", {"seconds": 60}))
        await asyncio.sleep(0.3)
        assert await server.status() is Status.HEALTHY
        program.kill()
        program.wait()
        with pytest.raises(ResourceError):
            await waiting
        with pytest.raises(ResourceError, match="did not answer a call: Connect"):
            await server.call("read", {})
        assert server.quick_status() is Status.BROKEN
        assert await server.status() is Status.BROKEN


async def test_an_address_where_nobody_is_or_nobody_who_speaks_the_protocol_is_told() -> None:
    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\nconnection: close\r\n\r\nnope")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as wrong:
        port = wrong.sockets[0].getsockname()[1]
        with pytest.raises(ResourceStartError, match=r"did not start: .+"):
            async with started(MCPServerSpec(url=f"http://127.0.0.1:{port}/mcp")):
                pass
    with pytest.raises(ResourceStartError, match=r"did not start: ConnectError: .+"):
        async with started(MCPServerSpec(url=f"http://127.0.0.1:{port}/mcp")):
            pass


async def test_an_address_gets_the_credentials_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[str] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.close()

    monkeypatch.setenv("NOTES_KEY", "key-of-notes")
    monkeypatch.setenv("NOTES_TEAM", "red")
    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        spec = MCPServerSpec(url=url, api_key_env="NOTES_KEY", headers_env={"x-team": "NOTES_TEAM"})
        with pytest.raises(ResourceStartError) as failed:
            async with started(spec):
                pass
    assert "authorization: bearer key-of-notes" in heads[0].lower()
    assert "x-team: red" in heads[0].lower()
    requests = [error.request for error in causes(failed.value) if isinstance(error, httpx2.RequestError)]
    assert requests
    assert all({"authorization", "x-team"}.isdisjoint(request.headers) for request in requests)
    assert "key-of-notes" not in str(failed.value)
    monkeypatch.delenv("NOTES_KEY")
    with pytest.raises(PrerequisiteError, match="NOTES_KEY"):
        async with started(spec):
            pass


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it came of."""
    yield error
    for cause in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        if cause is not None:
            yield from causes(cause)


# --- specs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "cure"),
    [
        ({}, "needs a command or a url, and not both"),
        ({"command": ("a",), "url": "http://a/mcp"}, "needs a command or a url, and not both"),
        ({"command": "uvx server --all"}, r"one text a word: \('uvx', 'server', '--all',\)"),
        ({"command": ("a", 1)}, "write a tuple of texts"),
        ({"url": "host/mcp"}, r"url='host/mcp' is no address that can be called. Write the whole of it"),
        ({"url": "http://[::1"}, r"url='http://\[::1' is no URL"),
        ({"url": "http://host:port/mcp"}, "is no URL: Port could not be cast"),
        ({"url": "http://{host}/mcp"}, r"'\{host\}' is no name of a host"),
        ({"url": "http://me:pass@host/mcp"}, "holds a user or a password.*api_key_env or headers_env"),
        ({"url": "https://sk-012345@host/mcp"}, "holds a user or a password.*api_key_env or headers_env"),
        ({"url": "https://host/mcp?x=1&tavilyApiKey=sk-012345"}, "credential in the parameter 'tavilyApiKey'"),
        ({"url": "https://host/mcp?access_token=sk-012345"}, "credential in the parameter 'access_token'"),
        ({"url": "http://a/mcp", "env": {"A": "b"}}, r"env=…\) is for a server that is given by its command"),
        ({"command": ("a",), "api_key_env": "A"}, r"api_key_env=…\) is for a server that is given by its url"),
        (
            {"url": "http://a/mcp", "api_key_env": "sk-0123456789abcdef01234567"},
            "the name of an environment variable",
        ),
        ({"command": ("a",), "call_timeout_s": 0}, "a number of seconds above 0"),
        ({"command": ("a",), "max_log_bytes": 1}, "below 4096"),
        ({"command": ("a",), "comand": 1}, "Did you mean 'command'"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_with_the_cure(fields: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=cure) as refused:
        MCPServerSpec(**fields)
    assert "sk-012345" not in str(refused.value)


def test_an_address_keeps_the_parameters_that_are_no_secret() -> None:
    spec = MCPServerSpec(url=" https://Bücher.de:8443/mcp?project_ref=abc&read_only=true")
    assert spec.url == "https://xn--bcher-kva.de:8443/mcp?project_ref=abc&read_only=true"
    assert spec.label == "mcp:xn--bcher-kva.de:8443"


def test_specs_that_mean_the_same_are_equal_and_their_labels_are_short() -> None:
    one = MCPServerSpec(command=["/usr/bin/uvx", "mcp-server-git", "-v"], env={"B": "2", "A": "1"})  # type: ignore[arg-type]
    other = MCPServerSpec(command=("/usr/bin/uvx", "mcp-server-git", "-v"), env=(("A", "1"), ("B", "2")))
    assert one == other
    assert hash(one) == hash(other)
    assert one.label == "mcp:uvx mcp-server-git"
    assert repr(one).count("…") == 2


def test_a_name_that_is_no_directorys_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be the name of a server"):
        MCPServer(small(), "../else")
