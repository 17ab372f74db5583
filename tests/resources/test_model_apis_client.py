"""The client of model APIs: one call, and the error for each way in which the server fails."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import traceback
import tracemalloc
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import pytest

from agentfly.core.errors import (
    APIMalformed,
    APIRateLimited,
    APIRefused,
    APIUnavailable,
    ConfigError,
    ModelAPIError,
    UsageError,
)
from agentfly.resources.credentials import Credentials
from agentfly.resources.model_api.client import ModelClient, read_retry_after
from agentfly.resources.model_api.responses import FunctionCall, Usage
from agentfly.resources.model_api.validation import parse_base_url
from agentfly.testing import fake_openai_server as behaviour
from agentfly.testing.fake_openai_server import (
    FakeOpenAIServer,
    ServerReply,
    chat_completion,
    error_reply,
    raw_reply,
    text_reply,
)

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def far_side() -> AsyncIterator[FakeOpenAIServer]:
    async with FakeOpenAIServer() as side:
        yield side


def client_of(far_side: FakeOpenAIServer, **settings: Any) -> ModelClient:
    return ModelClient(far_side.url, model="m", **settings)


# --- what comes back -------------------------------------------------------------------------------------------------


async def test_a_chat_comes_back_with_its_text_usage_and_finish_reason(far_side):
    async with client_of(far_side) as client:
        completion = await client.chat(HELLO, temperature=0)
    assert (completion.text, completion.usage, completion.finish_reason) == ("hello", Usage(3, 2), "stop")
    (request,) = far_side.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.body == {"model": "m", "messages": HELLO, "temperature": 0}


async def test_tool_calls_come_back_with_the_arguments_as_the_model_wrote_them(far_side):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": '}}
    far_side.script.append(raw_reply(200, chat_completion(None, tool_calls=[call])))
    async with client_of(far_side) as client:
        completion = await client.chat(HELLO)
    assert (completion.text, completion.tool_calls) == ("", (FunctionCall("1", "look", '{"at": '),))


async def test_token_ids_go_out_and_come_back_as_ids(far_side):
    choice = {"text": " b", "token_ids": [7, 8], "prompt_token_ids": [5, 6], "finish_reason": "length"}
    far_side.script.append(raw_reply(200, {"choices": [{**choice, "logprobs": {"token_logprobs": [-0.5, -1]}}]}))
    async with client_of(far_side) as client:
        completion = await client.complete([5, 6], return_token_ids=True, logprobs=1)
    assert far_side.requests[0].body["prompt"] == [5, 6]
    assert (completion.token_ids, completion.prompt_token_ids) == ((7, 8), (5, 6))
    assert (completion.token_logprobs, completion.text, completion.usage) == ((-0.5, -1.0), " b", None)


async def test_models_and_health_are_asked_where_servers_have_them(far_side):
    far_side.script += [raw_reply(200, {"object": "list", "data": [{"id": "a"}, {"id": "b"}]}), raw_reply(200, b"")]
    async with client_of(far_side) as client:
        assert await client.models() == ("a", "b")
        await client.health()
    assert [request.path for request in far_side.requests] == ["/v1/models", "/health"]


@pytest.mark.parametrize(
    "usage",
    [None, {}, {"prompt_tokens": "3"}, {"prompt_tokens": -1}, {"prompt_tokens": True}, 5, {"prompt_tokens": 10**400}],
)
async def test_usage_that_is_missing_or_senseless_is_none(far_side, usage):
    far_side.script.append(raw_reply(200, {**chat_completion("hello", None), "usage": usage}))
    async with client_of(far_side) as client:
        assert (await client.chat(HELLO)).usage is None


# --- what goes wrong -------------------------------------------------------------------------------------------------

UNAVAILABLE = [
    error_reply(500),
    error_reply(502),
    error_reply(408),
    behaviour.closes_connection,
    behaviour.closes_in_body,
    behaviour.resets_connection,
    behaviour.not_http,
]
MALFORMED = [
    raw_reply(200, b""),
    raw_reply(200, b"<html>Bad gateway</html>"),
    raw_reply(200, b'{"choices": [{"message": {"content": "hel'),
    raw_reply(200, b'{"choices": NaN}'),
    raw_reply(200, b"\xff\xfe"),
    raw_reply(200, b"[" * 100_000),
    raw_reply(200, []),
    raw_reply(200, {"choices": []}),
    raw_reply(200, {"choices": [{}]}),
    raw_reply(200, {"choices": [{"message": {"content": 5}}]}),
    raw_reply(200, chat_completion(None, tool_calls=[{"function": {}}])),
    raw_reply(200, {"error": {"message": "an error that says it is fine"}}),
    behaviour.short_content_length,
]


async def failure_of(far_side: FakeOpenAIServer, answer: ServerReply, **settings: Any) -> ModelAPIError:
    far_side.script.append(answer)
    async with client_of(far_side, **settings) as client:
        with pytest.raises(ModelAPIError) as raised:
            await client.chat(HELLO)
    return raised.value


@pytest.mark.parametrize("answer", UNAVAILABLE)
async def test_what_may_pass_is_unavailable(far_side, answer):
    error = await failure_of(far_side, answer)
    assert type(error) is APIUnavailable
    assert far_side.url in str(error)


@pytest.mark.parametrize("answer", MALFORMED)
async def test_an_answer_that_is_not_what_was_asked_for_is_malformed(far_side, answer):
    assert type(await failure_of(far_side, answer)) is APIMalformed


@pytest.mark.parametrize(
    ("answer", "cure"),
    [
        (error_reply(401), "api_key_env"),
        (error_reply(403), "api_key_env"),
        (error_reply(404, "The model `m` does not exist"), "model's name"),
        (error_reply(400, "max_tokens is too large"), "max_tokens is too large"),
        (error_reply(422), "parameters"),
        (raw_reply(302, Location="http://elsewhere.net:1/v1"), "do not follow a redirect"),
        (raw_reply(429, {"error": {"message": "pay", "code": "insufficient_quota"}}), "nothing left"),
    ],
)
async def test_what_will_never_be_answered_is_refused_with_the_cure(far_side, answer, cure):
    error = await failure_of(far_side, answer)
    assert type(error) is APIRefused
    assert cure in str(error)
    assert len(far_side.requests) == 1


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "7", "retry-after-ms": "250"}, 0.25),
        ({"Retry-After": formatdate(1_000_042, usegmt=True), "Date": formatdate(1_000_000, usegmt=True)}, 42.0),
        ({"Retry-After": formatdate(1_000_000, usegmt=True), "Date": formatdate(1_000_042, usegmt=True)}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "nan"}, None),
    ],
)
async def test_who_asks_for_less_is_rate_limited_with_the_time_it_names(far_side, status, headers, seconds):
    error = await failure_of(far_side, raw_reply(status, b"busy", **headers))
    assert type(error) is APIRateLimited
    assert (error.status, error.retry_after_s) == (status, seconds)


def test_a_date_without_one_to_compare_it_with_is_taken_by_the_clock_here():
    assert read_retry_after({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}) == 0
    assert (read_retry_after({"retry-after": "Sun, 06 Nov 2094 08:49:37 GMT"}) or 0) > 1e6


@pytest.mark.parametrize("answer", [behaviour.never_replies, behaviour.stalls_in_body, behaviour.trickles_bytes])
async def test_a_deadline_ends_a_call_whatever_the_far_side_does(far_side, answer):
    far_side.script.append(answer)
    async with client_of(far_side) as client:
        with pytest.raises(APIUnavailable, match=r"within 0\.3 s \(call_timeout_s\)"):
            await client.chat(HELLO, call_timeout_s=0.3)
    await far_side.wait_until(lambda: far_side.open == 0)


@pytest.mark.parametrize("answer", [behaviour.never_replies, behaviour.stalls_in_body])
async def test_silence_ends_a_call_before_its_deadline(far_side, answer):
    assert "read_timeout_s" in str(await failure_of(far_side, answer, read_timeout_s=0.2))


async def test_nobody_there_is_unavailable():
    async with FakeOpenAIServer() as gone:
        url = gone.url
    async with ModelClient(url, model="m") as client:
        with pytest.raises(
            APIUnavailable, match=r"nobody could be reached there \(ConnectError.*See that the server runs"
        ):
            await client.chat(HELLO)


async def test_a_connection_that_nobody_accepts_is_given_up():
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # more than it queues: what comes then gets no answer at all
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        async with ModelClient(url, model="m", connect_timeout_s=0.2) as client:
            with pytest.raises(APIUnavailable, match="connect_timeout_s"):
                await client.chat(HELLO)


@pytest.mark.parametrize("status", [200, 500])
async def test_a_huge_answer_is_read_only_so_far(far_side, status):
    sent = bytearray()

    async def floods(request: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(behaviour.head(status, 10**12))
        while True:
            writer.write(b" " * 65536)
            sent.extend(b" " * 65536)
            await writer.drain()

    error = await failure_of(far_side, floods, max_answer_bytes=100_000)
    assert type(error) is (APIMalformed if status == 200 else APIUnavailable)
    await far_side.wait_until(lambda: far_side.open == 0)
    assert len(sent) < 50_000_000


@pytest.mark.parametrize(("status", "kind"), [(200, APIMalformed), (500, APIUnavailable), (400, APIRefused)])
@pytest.mark.parametrize("coding", ["gzip, gzip", "br", "GZIP", "unheard-of"])
async def test_an_answer_is_never_decompressed(far_side, status, kind, coding):
    body = gzip.compress(gzip.compress(b" " * 30_000_000))
    tracemalloc.start()
    try:
        error = await failure_of(far_side, raw_reply(status, body, Content_Encoding=coding))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert type(error) is kind
    if status == 200:
        assert f"in the coding '{coding.lower()}'" in str(error)


@pytest.mark.parametrize("value", ["[]", "{}", "1"])
async def test_an_answer_of_more_values_than_can_be_read_at_once_is_malformed(far_side, monkeypatch, value):
    monkeypatch.setattr("agentfly.resources.model_api.responses.MOST_VALUES", 100_000)
    body = f'{{"choices": [{",".join([value] * 100_000)}]}}'.encode()
    assert "more than 100,000 commas and brackets" in str(await failure_of(far_side, raw_reply(200, body)))


async def test_a_large_answer_that_is_no_completion_is_told_in_few_words(far_side):
    body = {"a": [{"b": "x" * 1000}] * 10_000, "c": {str(n): n for n in range(10_000)}}
    assert len(str(await failure_of(far_side, raw_reply(200, body)))) < 500


async def test_fifty_calls_that_are_cancelled_leave_no_request_open(far_side):
    far_side.default_reply = behaviour.never_replies
    async with client_of(far_side) as client:
        calls = [asyncio.create_task(client.chat(HELLO)) for _ in range(50)]
        await far_side.wait_until(lambda: far_side.open == 50)
        for call in calls:
            call.cancel()
        await far_side.wait_until(lambda: far_side.open == 0)
        assert all(call.cancelled() for call in calls)
        far_side.default_reply = text_reply("still there")
        assert (await client.chat(HELLO)).text == "still there"


async def test_a_client_that_is_closed_is_unavailable(far_side):
    client = client_of(far_side)
    await client.close()
    with pytest.raises(APIUnavailable):
        await client.chat(HELLO)


@pytest.mark.parametrize("found", [b"1e999", b"-1e999", b"1" + b"0" * 400, b'"-1"'])
async def test_a_log_prob_that_is_no_finite_number_is_malformed(far_side, found):
    answer = b'{"choices": [{"text": "a", "logprobs": {"token_logprobs": [%b]}}]}' % found
    far_side.script.append(raw_reply(200, answer))
    async with client_of(far_side) as client:
        with pytest.raises(APIMalformed, match="token_logprobs"):
            await client.complete("x")


@pytest.mark.parametrize("parameters", [{"temperature": float("nan")}, {"tools": [object()]}, {"stream": True}])
async def test_a_parameter_that_cannot_be_sent_is_an_error_of_its_writer(far_side, parameters):
    async with client_of(far_side) as client:
        with pytest.raises(UsageError):
            await client.chat(HELLO, **parameters)
    assert far_side.requests == []


# --- credentials -----------------------------------------------------------------------------------------------------

SECRET = "sk-Sentinel/4711+="


def rendered(error: BaseException) -> str:
    """An exception as a debugger shows it, with the local variables of all its frames."""
    shown = traceback.TracebackException.from_exception(error, capture_locals=True)
    return "".join(shown.format()) + repr(error) + json.dumps(repr(vars(error)))


@pytest.mark.parametrize(
    "answer",
    [
        *UNAVAILABLE,
        *MALFORMED[:4],
        behaviour.echoes_credentials,
        error_reply(429),
        behaviour.echoes_credentials_as_an_answer,
    ],
)
async def test_no_failure_shows_a_credential(far_side, answer, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("KEY", SECRET)
    credentials = Credentials.from_environment("KEY", [("X-Org", "KEY")])
    error = await failure_of(far_side, answer, credentials=credentials)
    assert far_side.requests[0].headers["authorization"] == f"Bearer {SECRET}"
    assert far_side.requests[0].headers["x-org"] == SECRET
    assert SECRET not in rendered(error)
    assert SECRET not in caplog.text
    assert "Sentinel" not in repr(credentials)


async def test_neither_a_cancellation_nor_a_timeout_shows_a_credential(far_side, monkeypatch):
    monkeypatch.setenv("KEY", SECRET)
    far_side.default_reply = behaviour.never_replies
    async with client_of(far_side, credentials=Credentials.from_environment("KEY", [("X-Org", "KEY")])) as client:
        with pytest.raises(TimeoutError) as timed_out:
            async with asyncio.timeout(0.2):
                await client.chat(HELLO)
        with pytest.raises(APIUnavailable) as too_late:
            await client.chat(HELLO, call_timeout_s=0.2)
    assert SECRET not in rendered(timed_out.value)
    assert SECRET not in rendered(too_late.value)


async def test_what_is_too_short_to_be_a_secret_is_left_in_answers(far_side, monkeypatch):
    monkeypatch.setenv("KEY", "EMPTY")
    far_side.script.append(text_reply("The set is EMPTY."))
    async with client_of(far_side, credentials=Credentials.from_environment("KEY")) as client:
        assert (await client.chat(HELLO)).text == "The set is EMPTY."


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base_url",
    [
        "sandbox_url",
        "",
        "localhost:8000",
        "api.host.net/v1",
        "ftp://host/v1",
        "http://",
        "http://:8000/v1",
        "http://host:port/v1",
        "http://<host>/v1",
        "https://…/v1",
        "https://{host}/v1",
        "https://$HOST/v1",
        "https://your-endpoint/v1",
        "https://api.example.com/v1",
        "http://host/v1?key=1",
        "http://host/v1/chat/completions",
        "http://user:hunter2@host/v1",
        "user:hunter2@host/v1",
        "http://user:hunter2@host:port/v1",
        "http://host:port/v1?key=hunter2",
        "http://your-host/v1?key=hunter2",
        "http://[::1/v1#hunter2",
        "host/v1?key=hunter2",
        None,
    ],
)
def test_an_address_that_cannot_be_called_is_refused(base_url):
    with pytest.raises(ConfigError, match="base_url") as refused:
        parse_base_url(base_url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        (" https://API.host.net ", "https://api.host.net"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("https://Bücher.de/v1", "https://xn--bcher-kva.de/v1"),
        ("https://xn--bcher-kva.de/v1", "https://xn--bcher-kva.de/v1"),
        ("http://judge_server:80/openai/v1", "http://judge_server:80/openai/v1"),
    ],
)
def test_an_address_has_one_form(written, meant):
    assert parse_base_url(written) == meant
