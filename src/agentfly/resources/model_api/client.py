"""ModelClient: single calls of an OpenAI-compatible endpoint, with a distinct error for each kind of failure.

It uses httpx rather than the ``openai`` package. That package takes three times as long to import, retries and sleeps
by its own rules, reads responses of any length, keeps the request with its headers in its exceptions, and has no fields
for token ids. Retries and rate limits are elsewhere: see `agentfly.resources.model_api.retry`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import operator
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urljoin

from agentfly.core.errors import APIMalformed, APIRateLimited, APIRefused, APIUnavailable, ModelAPIError, UsageError
from agentfly.core.numbers import require_durations
from agentfly.resources.credentials import Credentials
from agentfly.resources.model_api.responses import (
    ChatCompletion,
    Json,
    TextCompletion,
    read_chat,
    read_completion,
    read_json,
    read_models,
)
from agentfly.resources.model_api.validation import is_loopback, parse_base_url

if TYPE_CHECKING:
    import httpx


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds until the server allows the next request; None if it gives no readable time.

    A date is read relative to the answer's own ``Date``, so that different clocks do no harm.

    Args:
        headers: the headers of the answer; names are looked up in lower case.
    """
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:  # some endpoints are more exact
        return milliseconds / 1000
    text = headers.get("retry-after")
    if (seconds := _number(text)) is not None:
        return seconds
    if (then := _timestamp(text)) is None:
        return None
    now = _timestamp(headers.get("date"))
    return max(0.0, then - (time.time() if now is None else now))


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _timestamp(text: str | None) -> float | None:
    try:
        date = parsedate_to_datetime(text or "")
        return (date if date.tzinfo else datetime.replace(date, tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


T = TypeVar("T")

MAX_ANSWER_BYTES = 64 * 2**20
"""Maximum size of an answer in bytes. Log-probs of a long completion take a few megabytes."""

_RATE_LIMIT_STATUSES = frozenset({429, 503, 529})
_TRANSIENT_STATUSES = frozenset({408, 409, 425})
_MAX_ERROR_CHARS = 500


class ModelClient:
    """Calls one OpenAI-compatible endpoint: a server of vLLM or another, or an external API.

    Every call is one HTTP request with a deadline. It returns a checked value or raises one of four errors, none of
    which holds a credential. A cancelled call closes its connection, so that the server can stop generating. A client
    belongs to the event loop that it is used in. Redirects are not followed.

    Args:
        base_url: the base of the endpoint, such as ``http://localhost:8000/v1``.
        model: the field ``model`` of every request; None if the calls set it or need none.
        credentials: the secret headers to send.
        connect_timeout_s: time limit for connecting, in seconds.
        read_timeout_s: seconds that may pass without a byte from the far side. Without streaming the first one comes
            when the whole text is generated.
        max_answer_bytes: answers longer than this are malformed.

    Raises:
        ConfigError: ``base_url`` cannot be called, or a time limit is no number of seconds.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        credentials: Credentials | None = None,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 300.0,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        require_durations("ModelClient", connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s)
        self.base_url = parse_base_url(base_url)
        self.model = model
        self._credentials = credentials or Credentials()
        self._max_answer_bytes = max_answer_bytes
        self._http = _http_client(self.base_url, connect_timeout_s, read_timeout_s)
        self._logs = contextlib.ExitStack()
        self._logs.enter_context(self._credentials.out_of_logs())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. A call that is under way fails as unavailable."""
        await self._http.aclose()
        self._logs.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, call_timeout_s: float = 300.0, **parameters: Any
    ) -> ChatCompletion:
        """Request an answer to a conversation.

        Args:
            messages: for instance ``[{"role": "user", "content": "…"}]``.
            call_timeout_s: time limit of the whole call, in seconds.
            parameters: any parameters of the endpoint: ``temperature``, ``max_tokens``, ``tools``, ``model`` …

        Raises:
            APIUnavailable: no complete answer within the deadline, or a failure of the server; a retry may succeed.
            APIRateLimited: the same, and the server asks for fewer requests.
            APIRefused: this call will never be answered.
            APIMalformed: the answer is not a chat completion.
            UsageError: a parameter cannot be sent.
        """
        return await self._call(
            "/chat/completions", {"messages": _conversation(messages)}, parameters, call_timeout_s, read_chat
        )

    async def complete(
        self, prompt: str | Sequence[int], *, call_timeout_s: float = 300.0, **parameters: Any
    ) -> TextCompletion:
        """Continue a prompt, which is a text or token ids.

        Args and errors are those of `chat`. A vLLM server returns the sampled ids for ``return_token_ids=True``.
        """
        return await self._call(
            "/completions", {"prompt": _prompt(prompt)}, parameters, call_timeout_s, read_completion
        )

    async def models(self, *, call_timeout_s: float = 30.0) -> tuple[str, ...]:
        """Return the names of the models that the endpoint serves. Errors are those of `chat`."""
        return self._read(await self.request("GET", "/models", call_timeout_s=call_timeout_s), "/models", read_models)

    async def health(self, *, call_timeout_s: float = 10.0) -> None:
        """Call ``/health``, which vLLM and similar servers have beside ``/v1``. Return if the server is healthy.

        Errors are those of `chat`.
        """
        await self.request("GET", urljoin(self.base_url, "/health"), call_timeout_s=call_timeout_s)

    async def request(self, method: str, path: str, body: Json | None = None, *, call_timeout_s: float) -> bytes:
        """Make a request that has no method here, and return the body of the answer.

        Args:
            method: ``GET`` or ``POST``.
            path: appended to the base URL, such as ``/embeddings``, or a whole URL on the same server.
            body: the JSON body.
            call_timeout_s: maximum duration in seconds.

        Errors are those of `chat`.
        """
        require_durations(path, call_timeout_s=call_timeout_s)
        url = path if "://" in path else f"{self.base_url}{path}"
        content = None if body is None else _to_json(body)
        outcome = await self._send(method, url, content, call_timeout_s)
        if isinstance(outcome, ModelAPIError):
            raise outcome
        return outcome

    async def _call(self, path: str, body: Json, parameters: Json, limit_s: float, read: Callable[[Json], T]) -> T:
        model = {} if self.model is None else {"model": self.model}
        if parameters.get("stream"):
            raise UsageError("stream=True: an answer is returned when it is whole. Leave it out.")
        asked = {**model, **body, **parameters}
        return self._read(await self.request("POST", path, asked, call_timeout_s=limit_s), path, read)

    def _read(self, body: bytes, path: str, read: Callable[[Json], T]) -> T:
        try:
            return read(read_json(body))
        except APIMalformed as error:
            found = str(error)
        raise APIMalformed(f"What {self.base_url}{path} answered {found}", status=200)

    async def _send(self, method: str, url: str, content: bytes | None, limit_s: float) -> bytes | ModelAPIError:
        """Return the body of a successful answer.

        Failures are returned and not raised from where they are found: the exceptions of the libraries below, and the
        frames that they came through, hold the headers of the request.
        """
        import httpx

        said = f"{method} {url}"
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.stream(method, url, content=content, auth=self._sign, headers=_HEADERS) as response,
            ):
                status, headers = response.status_code, response.headers
                coding = headers.get("content-encoding", "identity").strip().lower()
                body = b"" if coding != "identity" else self._credentials.redact_bytes(await self._read_body(response))
                if response.is_success and coding == "identity" and len(body) <= self._max_answer_bytes:
                    return body
        except TimeoutError:
            return APIUnavailable(f"{said} was not answered within {limit_s:g} s (call_timeout_s).")
        except httpx.TimeoutException as error:
            return APIUnavailable(f"{said} was given up after {self._limit_in(error)}.")
        except httpx.ConnectError as error:
            return APIUnavailable(
                f"{said} failed: nobody could be reached there ({self._credentials.redact(repr(error))}). See that the "
                "server runs, and that the address (base_url) is right, its host and port too."
            )
        except (httpx.HTTPError, httpx.StreamError, OSError, RuntimeError) as error:  # the last: it was closed
            return APIUnavailable(f"{said} failed: {self._credentials.redact(repr(error))}.")
        except httpx.InvalidURL as error:
            return APIRefused(f"{said} cannot be called: {self._credentials.redact(str(error))}.")
        except asyncio.CancelledError as error:
            raise error.with_traceback(None) from None
        if status < 300 and coding != "identity":
            told = self._credentials.redact(coding[:_MAX_ERROR_CHARS])
            return APIMalformed(f"{said} answered in the coding {told!r}, and none was asked for.", status=status)
        if status < 300:
            return APIMalformed(f"{said} answered with more than {self._max_answer_bytes} bytes.", status=status)
        return _failure(said, status, body.decode("utf-8", errors="replace"), read_retry_after(headers))

    async def _read_body(self, response: httpx.Response) -> bytes:
        """The body, or so much of it that it is seen to be too long.

        It is not decompressed: a few hundred bytes of a hostile endpoint would become gigabytes at once.
        """
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > self._max_answer_bytes:
                break
        return bytes(body)

    def _sign(self, request: httpx.Request) -> httpx.Request:
        request.headers.update(self._credentials.headers())
        return request

    def _limit_in(self, error: httpx.TimeoutException) -> str:
        limits = self._http.timeout
        if "Connect" in type(error).__name__:
            return f"{limits.connect:g} s without a connection (connect_timeout_s)"
        return f"{limits.read:g} s without a byte (read_timeout_s)"


_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}


def _http_client(base_url: str, connect_timeout_s: float, read_timeout_s: float) -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(
        verify=_certificates(),
        timeout=httpx.Timeout(read_timeout_s, connect=connect_timeout_s, pool=None),
        # The client does not limit concurrent calls: waits in its pool would be invisible to the rate limiter.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
        trust_env=not is_loopback(base_url),
        cookies=CookieJar(
            DefaultCookiePolicy(allowed_domains=())
        ),  # no cookies are stored, because owners share the connections
        follow_redirects=False,
    )


def load_certificates() -> None:
    """Do the slow set-up of a process's first client, so that it can run outside the event loop."""
    _certificates()


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the trusted certificates. They are read once, because reading blocks the event loop for a while."""
    import httpx

    return httpx.create_ssl_context()


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    given = messages if isinstance(messages, Sequence) else ()
    if not given or not all(isinstance(message, Mapping) for message in given):
        raise UsageError(f"messages={messages!r:.200}: write a list such as [{{'role': 'user', 'content': '…'}}].")
    return list(given)


def _prompt(prompt: str | Sequence[int]) -> str | list[int]:
    try:
        return prompt if isinstance(prompt, str) else [operator.index(one) for one in prompt]
    except TypeError:
        raise UsageError(
            f"prompt={prompt!r:.200}: give a text or a list of token ids. Several prompts are several calls."
        ) from None


def _to_json(body: Json) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        names = ", ".join(body)
        raise UsageError(f"A request with {names} cannot be sent as JSON: {error}. Give plain values.") from error


def _failure(said: str, status: int, body: str, retry_after_s: float | None) -> ModelAPIError:
    """Return the error for an answer with a status other than 200."""
    told, code = _error_message(body)
    message = f"{said} answered {status}: {told}"
    if status in _RATE_LIMIT_STATUSES and code != "insufficient_quota":
        return APIRateLimited(message, status=status, retry_after_s=retry_after_s)
    if status in _TRANSIENT_STATUSES or status >= 500:
        return APIUnavailable(message, status=status, retry_after_s=retry_after_s)
    stop = "" if message.endswith((".", "!", "?")) else "."
    return APIRefused(f"{message}{stop} {_advice(status)}", status=status)


def _error_message(body: str) -> tuple[str, str | None]:
    """Return the message and code in an error's body, if it has the form of OpenAI or vLLM."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"])[:_MAX_ERROR_CHARS], error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return (" ".join(body[:_MAX_ERROR_CHARS].split()) or "(nothing)"), None


def _advice(status: int) -> str:
    if status in (401, 403):
        return "Check the key in the environment variable that api_key_env names, and what it may be used for."
    if status == 404:
        return "Check the base_url, to which the rest of that address was added, and the model's name."
    if 300 <= status < 400:
        return "Credentials do not follow a redirect. Write the address that it leads to as base_url."
    if status in (402, 429):
        return "The account has nothing left to spend."
    if status == 413:
        return "The request is too long for this endpoint."
    return "Check the parameters of the call."
