"""Answers of MCP servers: each is a valid result, an error of the call, or an infrastructure failure."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("mcp", reason="pip install 'agentfly-rl[mcp]'")

from mcp.types import CallToolResult

from agentfly.agents.mcp_tools import _as_result
from agentfly.agents.tool_result import to_tool_result
from agentfly.core.errors import ConfigError, ResourceDied, ResourceError, ResourceStartError, ToolError
from agentfly.resources.mcp.server import MCPServer
from agentfly.resources.mcp.spec import MCPServerSpec
from agentfly.resources.resource import Status
from tests.support.mcp_http_server import PAGE, Answer, MCPHTTPServer, told, tool
from tests.support.scale import scaled


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))


@contextlib.asynccontextmanager
async def connected(there: MCPHTTPServer, **fields: Any) -> AsyncIterator[MCPServer]:
    server = MCPServer(MCPServerSpec(url=there.url, start_timeout_s=30, **fields), "server")
    try:
        await server.start()
        yield server
    finally:
        await server.release()


def text_of(result: CallToolResult) -> str:
    return "\n".join(getattr(block, "text", "?") for block in result.content)


# --- what a call can fail with -------------------------------------------------------------------------------------

Answers = Callable[[Any], Answer | None]

INFRASTRUCTURE: dict[str, Answers] = {
    "HTTP 500": lambda _: Answer(b"oops", 500, "text/plain"),
    "HTTP 502": lambda _: Answer(PAGE, 502, "text/html"),
    "HTTP 503": lambda _: Answer(PAGE, 503, "text/html"),
    "HTTP 503 with an error of the protocol": lambda number: Answer.error(number, -32602, status=503),
    "HTTP 429": lambda _: Answer(status=429),
    "HTTP 401": lambda _: Answer(status=401),
    "HTTP 410": lambda _: Answer(b"nothing", 410),
    "HTTP 299": lambda _: Answer(PAGE, 299, "text/html"),
    "a redirect": lambda _: Answer(status=302, headers={"location": "http://127.0.0.1:9/elsewhere"}),
    "accepted, and no more": lambda _: Answer(status=202),
    "an HTML page": lambda _: Answer(PAGE, kind="text/html"),
    "nothing": lambda _: Answer(),
    "no content type": lambda _: Answer(b"{}", kind=""),
    "no JSON": lambda _: Answer(b"{"),
    "bytes that are no text": lambda _: Answer(b"\xff\xfe\x00"),
    "a broken connection": lambda _: None,
    "no message": lambda _: Answer.of(["hello"]),
    "a number as the result": lambda number: Answer.result(number, 5),
    "null as the result": lambda number: Answer.result(number, None),
    "an empty result": lambda number: Answer.result(number, {}),
    "structured content alone": lambda number: Answer.result(number, {"structuredContent": {"rows": 3}}),
    "structured content that is none": lambda number: Answer.result(number, {"content": [], "structuredContent": 3}),
    "a text of null": lambda number: Answer.result(number, {"content": [{"type": "text", "text": None}]}),
    "a text without text": lambda number: Answer.result(number, {"content": [{"type": "text"}]}),
    "an unknown block": lambda number: Answer.result(number, {"content": [{"type": "hologram", "data": "x"}]}),
    "content that is no list": lambda number: Answer.result(number, {"content": "words"}),
    "an error of no code": lambda number: Answer.error(number, "bad"),
    "an error of no message": lambda number: Answer.error(number, 1, None),
    "an internal error": lambda number: Answer.error(number, -32603, "the database is down"),
    "a request that it did not understand": lambda number: Answer.error(number, -32700),
    "an invalid request": lambda number: Answer.error(number, -32600, status=400),
    "an error of the server": lambda number: Answer.error(number, -32050),
    "a stream of something else": lambda number: Answer(b"data: {}\n\n", kind="text/event-stream"),
    "a stream without an answer": lambda number: Answer(b": hello\n\n", kind="text/event-stream"),
    "a lone surrogate": lambda number: Answer.result(number, {"content": [{"type": "text", "text": "\ud800"}]}),
    "a value nested too deeply": lambda _: Answer(b'{"a":' * 5000 + b"1" + b"}" * 5000),
}

OF_THE_CALL: dict[str, Answers] = {
    "wrong arguments": lambda number: Answer.error(number, -32602, "no such line"),
    "an unknown tool": lambda number: Answer.error(number, -32601, "no such line"),
    "an error of its own": lambda number: Answer.error(number, 17, "no such line"),
    "wrong arguments, with a status": lambda number: Answer.error(number, -32602, "no such line", status=400),
    "an unknown tool, with a status": lambda number: Answer.error(number, -32601, "no such line", status=422),
}


async def failure_of_a_call(server: MCPServer) -> Exception | None:
    try:
        await server.call("say", {})
    except Exception as error:
        return error
    return None


async def test_what_http_and_the_protocol_go_wrong_with_is_infrastructure() -> None:
    async with MCPHTTPServer() as there, connected(there, call_timeout_s=20) as server:
        for name, answer in INFRASTRUCTURE.items():
            there.on_call = lambda request, answer=answer: answer(request["id"])  # type: ignore[misc]
            failed = await failure_of_a_call(server)
            assert isinstance(failed, ResourceError), (name, failed)
            assert str(failed).startswith("mcp:127.0.0.1"), (name, failed)
            there.on_call = lambda request: told(request["id"], "here again")
            assert text_of(await server.call("say", {})) == "here again", name  # one call takes nothing else along
        assert len(there.sessions) == 1


LARGE: dict[str, Answer] = {
    "JSON": Answer(b" " * 200_000),
    "an error page": Answer(b" " * 200_000, 500, "text/html"),
    "a redirect to itself": Answer(b" " * 200_000, 307, headers={"location": "/mcp"}),
}
MANY = b"[" + b"[]," * 100_000 + b"0]"
OF_MANY_VALUES: dict[str, Answer] = {
    "JSON": Answer(MANY),
    "an event": Answer(b": here\n\ndata: " + MANY + b"\n\n", kind="text/event-stream"),
    "an event of many lines": Answer(b"data: [],\n" * 100_000, kind="text/event-stream"),
    "an error page": Answer(MANY, 500, "text/html"),
}
COMPRESSED = {
    "JSON": Answer(gzip.compress(b"{}"), headers={"content-encoding": "gzip"}),
    "an event without end": Answer(
        gzip.compress(gzip.compress(b"\n" * 30_000_000)),
        kind="text/event-stream",
        headers={"content-encoding": "gzip, gzip"},
    ),
    "an error page": Answer(gzip.compress(b"no"), 500, "text/html", {"content-encoding": "GZip"}),
    "a redirect to itself": Answer(gzip.compress(b"no"), 307, headers={"location": "/mcp", "content-encoding": "br"}),
}


@pytest.mark.parametrize(
    ("answers", "told_of_it"),
    [
        (LARGE, "more than 100000 bytes"),
        (COMPRESSED, "none was asked for"),
        (OF_MANY_VALUES, "more than 100,000 commas"),
    ],
)
async def test_nothing_is_read_beyond_a_bound_or_decompressed(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Answer], told_of_it: str
) -> None:
    if answers is LARGE:
        monkeypatch.setattr("agentfly.resources.mcp.transports.MAX_MESSAGE_BYTES", 100_000)
    monkeypatch.setattr("agentfly.resources.mcp.transports.MOST_VALUES", 100_000)
    async with MCPHTTPServer() as there, connected(there, call_timeout_s=20) as server:
        for name, answer in answers.items():
            there.on_call = lambda _, answer=answer: answer  # type: ignore[misc]
            failed = await failure_of_a_call(server)
            assert isinstance(failed, ResourceError), (name, failed)
            assert told_of_it in str(failed), name
        assert len(there.sessions) == 1


async def test_events_are_read_as_utf_8_whatever_the_server_calls_it() -> None:
    def as_event(request: dict[str, Any]) -> Answer:
        return Answer(b"data: " + told(request["id"], "héé").body + b"\n\n", kind="text/event-stream; charset=punycode")

    async with MCPHTTPServer(as_event) as there, connected(there, call_timeout_s=20) as server:
        assert text_of(await server.call("say", {})) == "héé"


async def test_what_the_server_says_of_a_call_is_told_to_the_model() -> None:
    async with MCPHTTPServer() as there, connected(there) as server:
        for name, answer in OF_THE_CALL.items():
            there.on_call = lambda request, answer=answer: answer(request["id"])  # type: ignore[misc]
            failed = await failure_of_a_call(server)
            assert isinstance(failed, ToolError), (name, failed)
            assert str(failed) == "no such line"
        there.on_call = lambda request: Answer.result(request["id"], {"content": [], "isError": True})
        assert (await server.call("say", {})).is_error


async def test_which_errors_say_that_a_call_was_wrong_can_be_said() -> None:
    codes = (-32602, -32601, -32603)
    async with MCPHTTPServer(lambda request: Answer.error(request["id"], -32603, "no file")) as there:
        async with connected(there) as server:
            with pytest.raises(
                ResourceError, match=r"no file \(code -32603\)\. .*tool_error_codes=\(-32602, -32601, -32603\)"
            ):
                await server.call("say", {})
        async with connected(there, tool_error_codes=codes) as server:
            with pytest.raises(ToolError, match="no file"):
                await server.call("say", {})
    with pytest.raises(ConfigError, match="write a tuple of whole numbers"):
        MCPServerSpec(url=there.url, tool_error_codes=("-32603",))  # type: ignore[arg-type]


async def test_a_failure_shows_what_was_said_and_no_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES_KEY", "key-of-the-notes")
    async with MCPHTTPServer() as there, connected(there, api_key_env="NOTES_KEY") as server:
        there.on_call = lambda _: Answer(b"<b>key-of-the-notes</b>\n is not welcome" + b"." * 10_000, 403, "text/html")
        with pytest.raises(ResourceError) as failed:
            await server.call("say", {})
    assert "HTTP status 403 (Forbidden): <b>[secret]</b> is not welcome..." in str(failed.value)
    assert len(str(failed.value)) < 500


def in_pieces(answer: bytes) -> Answer:
    """An answer in chunks of two bytes."""
    pieces = [answer[at : at + 2] for at in range(0, len(answer), 2)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    headers = {"transfer-encoding": "chunked", "content-length": ""}
    return Answer(body, kind="text/event-stream", headers=headers)


async def test_no_credential_that_a_server_sends_back_is_in_a_result_or_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("NOTES_KEY", "key-of-the-notes")
    says = "it is key-of-the-notes, key-of-the"
    redirect = Answer(b"", 302, headers={"location": "http://127.0.0.1:9/key-of-the-notes"})
    async with MCPHTTPServer() as there, connected(there, api_key_env="NOTES_KEY") as server:
        for wrap in (
            lambda answer: Answer(answer, headers={"x-key": "key-of-the-notes"}),
            lambda answer: Answer(b"data: " + answer + b"\n\n", kind="text/event-stream"),
            lambda answer: in_pieces(b"data: " + answer + b"\n\n"),
        ):
            there.on_call = lambda request, wrap=wrap: wrap(told(request["id"], says).body)  # type: ignore[misc]
            assert text_of(await server.call("say", {})) == "it is [secret], key-of-the"
        there.on_call = lambda _: redirect
        failed = await failure_of_a_call(server)
        there.on_call = lambda _: Answer(b'{"key-of-the-notes": 1}')
        failed_too = await failure_of_a_call(server)
    assert isinstance(failed, ResourceError)
    assert "key-of-the-notes" not in f"{failed} {failed_too} {caplog.text}"


# --- a server that forgets its sessions ------------------------------------------------------------------------------

LOST = {
    "404": Answer(b"", 404),
    "404 with an error": Answer.error(None, -32600, "Session not found", status=404),
    "400 as the examples of the protocol's packages say it": Answer.error(
        None, -32000, "Bad Request: No valid session ID provided", status=400
    ),
    "400 in words": Answer(b"unknown session id", 400, "text/plain"),
}


@pytest.mark.parametrize("name", LOST)
async def test_a_server_that_has_forgotten_all_is_called_in_a_new_session_where_nothing_is_lost(name: str) -> None:
    async with MCPHTTPServer() as there, connected(there) as server:
        there.lost = LOST[name]
        assert text_of(await server.call("say", {"n": 0}, keeps_state=False)) == '{"n": 0}'
        there.forget()
        answers = await asyncio.gather(*(server.call("say", {"n": n}, keeps_state=False) for n in range(1, 20)))
        assert [text_of(answer) for answer in answers] == [f'{{"n": {n}}}' for n in range(1, 20)]
        assert there.sessions == ["session-0", "session-1"]  # all calls share the new one
        assert sorted(given["n"] for _, given in there.calls) == list(range(20))  # and none was made twice
        assert await server.status() is Status.HEALTHY


async def test_what_calls_have_left_in_a_session_is_never_silently_gone() -> None:
    async with MCPHTTPServer() as there, connected(there) as server:
        there.forget()
        assert text_of(await server.call("say", {"n": 0})) == '{"n": 0}'  # nothing was left in the first one
        there.forget()
        with pytest.raises(
            ResourceDied, match="has forgotten the session, and with it what the calls before have done"
        ):
            await server.call("say", {"n": 1})
        assert server.quick_status() is Status.BROKEN
        await server.reset()
        assert text_of(await server.call("say", {"n": 2})) == '{"n": 2}'
    assert [given["n"] for _, given in there.calls] == [0, 2]


async def test_where_there_is_no_new_session_the_server_is_gone() -> None:
    async with MCPHTTPServer() as there, connected(there) as server:
        there.forget()
        there.starts = False
        calls = [server.call("say", {"n": n}, keeps_state=False) for n in range(5)]
        for failed in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failed, ResourceDied)
            assert "a new one could not be had" in str(failed)
        assert server.quick_status() is Status.BROKEN
        assert there.calls == []


async def test_sessions_that_are_forgotten_again_and_again_are_tried_once_a_call() -> None:
    async with MCPHTTPServer() as there, connected(there) as server:
        there.on_call = lambda _: there.lost
        with pytest.raises(ResourceError, match="it does not know the session any more"):
            await server.call("say", {}, keeps_state=False)
        assert len(there.sessions) == 2


async def test_a_call_that_is_given_up_while_a_session_begins_leaves_it_to_the_others() -> None:
    async with MCPHTTPServer() as there, connected(there) as server:
        there.forget()
        given_up, other = (asyncio.create_task(server.call("say", {"n": n}, keeps_state=False)) for n in (1, 2))
        while len(there.sessions) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        given_up.cancel()
        assert text_of(await other) == '{"n": 2}'
        with pytest.raises(asyncio.CancelledError):
            await given_up


async def test_a_server_that_nobody_reaches_is_broken_until_it_answers_again() -> None:
    async with MCPHTTPServer() as there, connected(there) as server:
        there.on_call = lambda _: Answer(PAGE, 503, "text/html")
        with pytest.raises(ResourceError, match="HTTP status 503"):
            await server.call("say", {})
        assert server.quick_status() is Status.BROKEN
        there.on_call = lambda request: told(request["id"], "here")
        await server.call("say", {})
        assert server.quick_status() is Status.HEALTHY


# --- lists of tools -------------------------------------------------------------------------------------------------


def pages(*listed: tuple[str | None, list[str], str | None]) -> Callable[[dict[str, Any]], Answer]:
    """Pages by the cursor that they are asked for with: the names on them, and the next cursor."""
    known = {cursor: (names, following) for cursor, names, following in listed}

    def answer(request: dict[str, Any]) -> Answer:
        cursor = (request.get("params") or {}).get("cursor")
        if cursor not in known:
            return Answer.error(request["id"], -32602, "invalid cursor")
        names, following = known[cursor]
        result: dict[str, Any] = {"tools": [tool(name) for name in names]}
        return Answer.result(request["id"], result if following is None else {**result, "nextCursor": following})

    return answer


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        (pages((None, ["a"], "1"), ("1", ["b"], None)), "ab"),
        (pages((None, ["a"], ""), ("", ["b"], None)), "ab"),
        (pages((None, ["a"], ""), ("", ["b"], "2"), ("2", ["c"], None)), "abc"),
        (pages((None, ["a"], "")), "a"),  # the empty cursor was the end
        (pages((None, ["a"], ""), ("", ["a"], "")), "a"),  # it was the beginning again
        (pages((None, ["a"], "1"), ("1", ["b"], ""), ("", ["a"], "1")), "ab"),
        (pages((None, [], "1"), ("1", [], "2"), ("2", ["a"], None)), "a"),
        (pages((None, [], None)), ""),
    ],
)
async def test_all_pages_of_a_list_are_read(listed: Any, names: str) -> None:
    async with MCPHTTPServer() as there:
        there.on_list = listed
        async with connected(there) as server:
            assert [one.name for one in server.tools] == list(names)


async def test_a_list_may_have_any_number_of_pages() -> None:
    numbers = range(150)
    listed = pages(*((str(n) if n else None, [f"t{n}"], str(n + 1) if n < 149 else None) for n in numbers))
    async with MCPHTTPServer() as there:
        there.on_list = listed
        async with connected(there) as server:
            assert [one.name for one in server.tools] == [f"t{n}" for n in numbers]


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (pages((None, ["a"], "1"), ("1", ["b"], "1")), "its list of tools does not end: the cursor '1' came back"),
        (pages((None, ["a"], "1"), ("1", ["b"], "2"), ("2", ["c"], "1")), "the cursor '1' came back"),
        (pages((None, ["a"], ""), ("", ["b"], "")), "the cursor '' came back"),
        (pages((None, ["a"], "1")), "invalid cursor"),
        (lambda request: Answer(PAGE, 503, "text/html"), r"HTTP status 503 \(Service Unavailable\)"),
        (lambda request: Answer.result(request["id"], {"tools": "none"}), "ValidationError"),
        (lambda request: Answer.result(request["id"], {"tools": [{"name": "a"}]}), "ValidationError"),
    ],
)
async def test_a_list_that_cannot_be_read_to_its_end_is_told(listed: Any, message: str) -> None:
    async with MCPHTTPServer() as there:
        there.on_list = listed
        with pytest.raises(ResourceStartError, match=f"did not start: .*{message}"):
            async with connected(there):
                pass


async def test_a_list_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.resources.mcp.client.MAX_PAGES", 20)
    async with MCPHTTPServer() as there:
        there.on_list = lambda request: Answer.result(request["id"], {"tools": [], "nextCursor": str(request["id"])})
        with pytest.raises(ResourceStartError, match="its list of tools does not end: it has more than 20 pages"):
            async with connected(there):
                pass


# --- programs -------------------------------------------------------------------------------------------------------

PRINTS_WHAT_IT_IS_GIVEN = f"""
import json, runpy, sys

small = runpy.run_path({str(Path(__file__).parent / "small_mcp_server.py")!r})
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "tools/call":
        for said in request["params"]["arguments"]["says"]:
            sys.stdout.buffer.write(said.replace("ID", str(request["id"])).encode("latin-1") + b"\\n")
        sys.stdout.buffer.flush()
    elif "id" in request:
        small["answer"](request)
"""
FINE = '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": "fine"}]}}'


async def test_whatever_a_program_answers_is_a_result_or_a_typed_failure_at_once() -> None:
    spec = MCPServerSpec(command=(sys.executable, "-c", PRINTS_WHAT_IT_IS_GIVEN), start_timeout_s=60)
    server = MCPServer(spec, "server")
    try:
        await server.start()
        noises = ["", "hello", "[]", "3", "null", "\xff", '{"id": 1}', "{" * 100, '{"id": [ID], "result": {}}']
        for noise in noises:
            assert text_of(await server.call("say", {"says": [noise, FINE]})) == "fine"
        for wrong in (
            '{"jsonrpc": "2.0", "id": ID, "result": 5}',
            '{"jsonrpc": "2.0", "id": ID, "result": null}',
            '{"jsonrpc": "2.0", "id": ID, "error": "bad"}',
            '{"jsonrpc": "1.0", "id": ID, "result": {}}',
            '{"id": ID, "result": {"content": []}}',
            '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": "\\ud800"}]}}',
            '{"jsonrpc": "2.0", "id": ID, "result": {"content": [{"type": "text", "text": null}]}}',
            '{"jsonrpc": "2.0", "id": ID, "result": {"structuredContent": {"rows": 3}}}',
            '{"jsonrpc": "2.0", "id": ID, "error": {"code": -32603, "message": "down"}}',
        ):
            with pytest.raises(ResourceError, match=r"violates the protocol|could not answer a call"):
                await server.call("say", {"says": [wrong]})
        with pytest.raises(ToolError, match="no such line"):
            await server.call(
                "say", {"says": ['{"jsonrpc": "2.0", "id": ID, "error": {"code": -32602, "message": "no such line"}}']}
            )
        assert await server.status() is Status.HEALTHY
    finally:
        await server.release()


async def test_a_program_that_sends_a_line_without_end_is_gone_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.resources.mcp.transports.MAX_MESSAGE_BYTES", 10_000)
    spec = MCPServerSpec(command=(sys.executable, "-c", PRINTS_WHAT_IT_IS_GIVEN), start_timeout_s=60)
    server = MCPServer(spec, "server")
    try:
        await server.start()
        with pytest.raises(ResourceDied, match="it sent a line of more than 10000 bytes"):
            await server.call("say", {"says": ["x" * 100_000]})
    finally:
        await server.release()


# --- any bytes ------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["text", "image"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "content",
                    "structuredContent",
                    "isError",
                    "type",
                    "text",
                    "data",
                    "mimeType",
                    "resource",
                    "uri",
                    "_meta",
                    "code",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
answers = st.one_of(
    st.builds(
        lambda body, status, kind: lambda _: Answer(body, status, kind),
        st.binary(max_size=40),
        st.sampled_from([200, 200, 201, 400, 403, 404, 418, 500, 503, 599]),
        st.sampled_from(["application/json", "text/event-stream", "text/html", "", "application/json; charset=x", "é"]),
    ),
    st.builds(lambda result: lambda number: Answer.result(number, result), values),
    st.builds(lambda content: lambda number: Answer.result(number, {"content": content}), st.lists(values, max_size=3)),
    st.builds(lambda code, said: lambda number: Answer.error(number, code, said), values, values),
    st.builds(lambda value: lambda number: Answer.of(value), values),
    st.builds(
        lambda value: (
            lambda number: Answer(
                b"event: message\ndata: "
                + json.dumps({"jsonrpc": "2.0", "id": number, "result": value}).encode()
                + b"\n\n",
                kind="text/event-stream",
            )
        ),
        values,
    ),
)


@settings(max_examples=scaled(8, 500))
@given(st.lists(answers, min_size=1, max_size=8))
@example([lambda number: Answer.of({"jsonrpc": "2.0", "id": number, "result": {"content": [], "_meta": 1}})])
def test_any_answer_over_http_is_a_result_or_a_typed_failure(script: list[Answers]) -> None:
    async def ask() -> None:
        async with MCPHTTPServer() as there, connected(there, call_timeout_s=5) as server:
            for answer in script:
                there.on_call = lambda request, answer=answer: answer(request["id"])  # type: ignore[misc]
                with contextlib.suppress(ToolError, ResourceError):
                    to_tool_result("say", _as_result(await server.call("say", {}, keeps_state=False)))
            there.on_call = lambda request: told(request["id"], "here")
            with contextlib.suppress(ResourceDied):  # a session that was forgotten, and no other to be had
                assert text_of(await server.call("say", {}, keeps_state=False)) == "here"

    asyncio.run(ask())
