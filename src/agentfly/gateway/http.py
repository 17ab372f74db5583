"""The gateway's HTTP: routes, who may use them, and errors in OpenAI's shape. On aiohttp, of the extra ``gateway``."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from agentfly.errors import Boundary, UsageError
from agentfly.gateway.completion import Completion, event
from agentfly.gateway.exchange import Exchange
from agentfly.gateway.session import Session
from agentfly.gateway.wire import ChatRequest, FinishRequest, Refusal
from agentfly.trajectory import Failure

if TYPE_CHECKING:
    from agentfly.gateway.gateway import Gateway

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

EARLY_S = 1.0
"""Seconds in which a stream may still fail with a status of its own, before its header is sent."""

PING_S = 10.0
"""Seconds between signs of life in a stream that waits for the model."""

STOP_S = 5.0
"""Seconds that connections get to close when the gateway does."""


class Server:
    """Serves a gateway's routes.

    A program that hangs up cancels what answers it, and so the generation.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        app = web.Application(client_max_size=gateway.max_body_bytes, middlewares=[self._guarded])
        rollout = "/rollouts/{rollout}"
        app.add_routes(
            [
                web.get("/health", self._health),
                *(web.route("*", base + call, self._nowhere) for base in ("", "/v1") for call in _AT_ROOT),
                web.get(f"{rollout}/v1/models", self._models),
                web.post(f"{rollout}/v1/chat/completions", self._chat),
                web.get(rollout, self._trajectory),
                web.delete(rollout, self._discard),
                web.post(f"{rollout}/finish", self._finish),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)

    async def start(self) -> int:
        """Listen, and give the port."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._gateway.host, self._gateway.port)
        await site.start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Close all connections."""
        await self._runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who may come in, and tell what went wrong as OpenAI does."""
        try:
            self._authorize(request)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            refusal = Refusal(f"The body is longer than {self._gateway.max_body_bytes} bytes.", status=413)
        except web.HTTPException as error:
            refusal = Refusal(f"{request.method} {request.path}: {error.reason}. {_CALLS}", status=error.status)
        except ConnectionError:
            raise  # the program is gone
        except Exception as error:
            refusal = Refusal.of(error)
            if refusal.status >= 500:
                logger.warning("A call of %s failed: %s", request.path, error, exc_info=error)
        return web.json_response(refusal.to_json(), status=refusal.status)

    def _authorize(self, request: web.Request) -> None:
        token = self._gateway.token
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (
            token is None
            or request.path == "/health"
            or hmac.compare_digest(given.encode(errors="replace"), token.encode())
        ):
            return
        raise Refusal("The API key is missing or wrong.", status=401, code="invalid_api_key")

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "policy_version": self._gateway.policy.version})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {"id": self._gateway.model, "object": "model", "created": 0, "owned_by": "agentfly"}
        return web.json_response({"object": "list", "data": [model]})

    async def _nowhere(self, request: web.Request) -> web.StreamResponse:
        """Tell a program that was given the gateway's root in place of a rollout's address."""
        raise Refusal(
            f"{request.method} {request.path}: no rollout is named, and the gateway records each call with its "
            f"rollout. Give the program a base URL with an id of your choice: {self._gateway.url('ID')}",
            status=404,
        )

    async def _trajectory(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._found(request).trajectory.to_json())

    async def _discard(self, request: web.Request) -> web.StreamResponse:
        self._found(request)
        self._gateway.discard(request.match_info["rollout"])
        return web.Response(status=204)

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        said = FinishRequest.read(await request.read())
        failure = None
        if said.error is not None:
            failure = Failure(Boundary.USAGE, "ProgramFailed", said.error, by_policy=False)
        trajectory = self._gateway.finish(
            request.match_info["rollout"],
            task=said.task,
            reward=said.reward,
            group_id=said.group_id,
            attempt=said.attempt,
            metrics=said.metrics,
            error=failure,
        )
        return web.json_response(trajectory.to_json())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = ChatRequest.read(body)
        wanted = self._gateway.wanted(asked)
        session = self._gateway.session(request.match_info["rollout"])
        name = hashlib.sha256(body).digest()
        kept = session.kept(name)
        response: web.StreamResponse
        answering = asyncio.ensure_future(_given(kept) if kept is not None else session.answer(wanted))
        try:
            if asked.stream:
                response = await self._streamed(request, asked, answering)
            else:
                completion = Completion(await answering, asked, self._gateway.policy.tokenizer)
                response = web.json_response(completion.whole())
                await response.prepare(request)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            await _abandoned(answering, session, name)
            raise
        if answering.exception() is None:
            session.delivered(answering.result())
        return response

    async def _streamed(
        self, request: web.Request, asked: ChatRequest, answering: asyncio.Future[Exchange]
    ) -> web.StreamResponse:
        """Send the answer, or why there is none, as a stream, all but its end."""
        await asyncio.wait({answering}, timeout=EARLY_S)
        if answering.done():
            answering.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not answering.done():
            await response.write(b": the model is at work\n\n")
            await asyncio.wait({answering}, timeout=PING_S)
        try:
            events = Completion(answering.result(), asked, self._gateway.policy.tokenizer).events()
        except Exception as error:
            await response.write(event(Refusal.of(error).to_json()))
        else:
            for one in events:
                await response.write(one)
        return response

    def _found(self, request: web.Request) -> Session:
        try:
            return self._gateway.open_session(request.match_info["rollout"])
        except UsageError as error:
            raise Refusal(str(error), status=404) from None


async def _given(exchange: Exchange) -> Exchange:
    return exchange


async def _abandoned(answering: asyncio.Future[Exchange], session: Session, name: bytes) -> None:
    """The program is gone: abort what is sampled for it, and keep what was."""
    answering.cancel()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        session.undelivered(await answering, name)


_AT_ROOT = ("/models", "/chat/completions")
_CALLS = (
    "The calls are POST /rollouts/ID/v1/chat/completions, POST /rollouts/ID/finish, GET /rollouts/ID and "
    "GET /rollouts/ID/v1/models."
)
