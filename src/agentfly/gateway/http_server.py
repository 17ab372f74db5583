"""The HTTP server of the gateway: routes, access checks and responses.

It serves the harness (open, read and finish rollouts) and the programs (model calls). It needs aiohttp, from the extra
``gateway``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from aiohttp import HttpVersion11, hdrs, web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentfly.core.errors import Boundary, UsageError, describe_error
from agentfly.core.threads.pool import run_in_thread, run_in_thread_to_completion
from agentfly.core.trajectory import Failure, Trajectory
from agentfly.gateway.auth import (
    HARNESS_KEY_REQUIRED,
    bearer_token,
    is_same_key,
    new_key,
    require_known_host,
    require_no_foreign_origin,
)
from agentfly.gateway.call_tree import ModelCall, ProgramAPI, ProgramCall, ProgramResponse
from agentfly.gateway.limits import RequestError
from agentfly.gateway.model_request import RolloutSampling
from agentfly.gateway.session import ProgramSession

if TYPE_CHECKING:
    from agentfly.gateway.gateway import Gateway


class HarnessRequest(BaseModel):
    """The body of a request of the harness. A number is a number of JSON, and neither a text nor ``true``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @classmethod
    def read(cls, body: bytes) -> Self:
        """A request from the body that was sent.

        Raises:
            RequestError: it is none.
        """
        try:
            return cls.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise RequestError.from_validation_error(error) from None


class SamplingFields(BaseModel):
    """What `RolloutSampling` has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    honor_request: bool = False


class OpenRolloutRequest(HarnessRequest):
    """A rollout that is to begin."""

    rollout_id: str
    sampling: SamplingFields | None = None

    def rollout_sampling(self) -> RolloutSampling | None:
        """How the model samples in it, if the request says so.

        Raises:
            ConfigError: a parameter cannot be.
        """
        return None if self.sampling is None else RolloutSampling(**self.sampling.model_dump())


class FinishRolloutRequest(HarnessRequest):
    """What a harness says of a rollout when it is over."""

    reward: float | None = None
    task: str | dict[str, Any] | None = None
    group_id: str | None = None
    attempt: Annotated[int, Field(ge=0)] | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str | None = None


logger = logging.getLogger(__name__)

RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STREAM_HEADER_DELAY_S = 1.0
"""Seconds in which a stream may still fail with a status of its own, before its header is sent."""

KEEPALIVE_S = 10.0
"""Seconds between signs of life in a stream that waits for the model."""

STOP_S = 5.0
"""Seconds that connections get to close when the gateway does."""

OVERRIDDEN_HEADER = "AgentFly-Replaced-Parameters"
"""The header of an answer that names the parameters of sampling which the program asked for and did not get."""


KEPT_ANSWERS, KEPT_BYTES = 32, 64 << 20
"""How many trajectories of rollouts that were finished last, and bytes of them, are kept for harnesses to ask again."""

AnsweredCall = tuple[ModelCall, ProgramResponse, Mapping[str, str]]


class GatewayHTTPServer:
    """Serves a gateway's routes.

    A program that hangs up cancels what answers it, and so the generation.
    """

    def __init__(self, gateway: Gateway, apis: Sequence[ProgramAPI]) -> None:
        self._gateway = gateway
        self._telling = asyncio.Lock()
        self._finished: OrderedDict[str, tuple[bytes, asyncio.Task[str]]] = OrderedDict()
        self._nobodys_key = new_key()
        app = web.Application(client_max_size=gateway.limits.max_body_bytes, middlewares=[self._guarded])
        rollout = "/rollouts/{rollout}"
        calls = ["/models", *(api.path for api in apis)]
        routes = [
            web.get("/health", self._health),
            *(web.route("*", base + call, self._nowhere) for base in ("", "/v1") for call in calls),
            web.get(f"{rollout}/v1/models", self._models),
            *(web.post(f"{rollout}/v1{api.path}", functools.partial(self._answer, api)) for api in apis),
            web.post("/rollouts", self._open),
            web.get(rollout, self._trajectory),
            web.delete(rollout, self._discard),
            web.post(f"{rollout}/finish", self._finish),
            web.route("*", "/{unknown:.*}", self._unknown),
        ]
        for route in routes:
            app.router.add_route(route.method, route.path, route.handler, expect_handler=_continue_if_expected)
        # A compressed body could become any number of bytes.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S, auto_decompress=False
        )

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
        if self._finished:
            await asyncio.wait([answer for _, answer in self._finished.values()])

    @web.middleware
    async def _guarded(self, request: web.Request, handler: RequestHandler) -> web.StreamResponse:
        """Let in who may come in, and tell what went wrong as OpenAI does."""
        try:
            hosts = request.headers.getall(hdrs.HOST, [])
            require_known_host(hosts, self._gateway.allowed_hosts)
            require_no_foreign_origin(request.headers.getall(hdrs.ORIGIN, []), hosts)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            limit = self._gateway.limits.max_body_bytes
            refusal = RequestError(f"The body is longer than {limit} bytes (max_body_bytes).", status=413)
        except web.HTTPException as error:
            refusal = RequestError(f"{request.method} {request.path}: {error.reason}. {_CALLS}", status=error.status)
        except ConnectionError:
            return web.Response(status=499)  # to nobody: the program has hung up
        except Exception as error:
            refusal = RequestError.from_exception(error)
            if refusal.status >= 500:
                logger.warning("A call of %s failed: %s", request.path, error, exc_info=error)
        return web.json_response(refusal.to_json(), status=refusal.status)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "policy_version": self._gateway.policy.version})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._program(request)
        model = {"id": self._gateway.model, "object": "model", "created": 0, "owned_by": "agentfly"}
        return web.json_response({"object": "list", "data": [model]})

    async def _nowhere(self, request: web.Request) -> web.StreamResponse:
        """Tell a program that was given the gateway's root in place of a rollout's address."""
        raise RequestError(
            f"{request.method} {request.path}: no rollout is named, and the gateway records each call with its "
            f"rollout. Give the program the base URL and the key of one: {self._gateway.url}/rollouts/ID/v1",
            status=404,
        )

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        """Refuse a path or a method that there is not."""
        methods = {method for one in request.app.router.resources() for method in (await one.resolve(request))[1]}
        allowed = methods - {hdrs.METH_ANY}
        raise web.HTTPMethodNotAllowed(request.method, allowed) if allowed else web.HTTPNotFound

    async def _open(self, request: web.Request) -> web.StreamResponse:
        self._require_harness(request)
        asked = OpenRolloutRequest.read(await self._body(request))
        endpoint = self._gateway.open(asked.rollout_id, sampling=asked.rollout_sampling())
        return web.json_response(endpoint.to_json(), status=201)

    async def _trajectory(self, request: web.Request) -> web.StreamResponse:
        self._require_harness(request)
        value = self._found(request).trajectory.to_json()
        return web.json_response(text=await run_in_thread(lambda: json.dumps(value)))

    async def _discard(self, request: web.Request) -> web.StreamResponse:
        self._require_harness(request)
        self._found(request)
        self._gateway.discard(request.match_info["rollout"])
        return web.Response(status=204)

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        """End a rollout. The same request once more is answered by the same trajectory, as long as that is kept."""
        self._require_harness(request)
        rollout_id, body = request.match_info["rollout"], await self._body(request)
        if self._gateway.is_over(rollout_id):
            answer = self._finished_before(rollout_id, body)
        else:
            answer = asyncio.create_task(self._told(self._end(rollout_id, FinishRolloutRequest.read(body))))
            self._finished[rollout_id] = (hashlib.sha256(body).digest(), answer)
            answer.add_done_callback(lambda _: self._forget_old())
        return web.json_response(text=await asyncio.shield(answer))  # it is told also where the harness hangs up

    def _end(self, rollout_id: str, said: FinishRolloutRequest) -> Trajectory:
        failure = None
        if said.error is not None:
            failure = Failure(Boundary.USAGE, "ProgramFailed", said.error, by_policy=False)
        return self._gateway.finish(
            rollout_id,
            task=said.task,
            reward=said.reward,
            group_id=said.group_id,
            attempt=said.attempt,
            metrics=said.metrics,
            error=failure,
            tell=False,
        )

    def _finished_before(self, rollout_id: str, body: bytes) -> asyncio.Task[str]:
        """What a rollout's end is answered by once more.

        Raises:
            RequestError: it was asked for by another request, or the answer is kept no longer.
        """
        asked, answer = self._finished.get(rollout_id, (b"", None))
        if answer is None:
            told = (
                f"Its trajectory is not kept: it was finished elsewhere, discarded, or before the last {KEPT_ANSWERS}."
            )
        elif asked != hashlib.sha256(body).digest():
            told = "This request says something else than the one that finished it. Send that to have the trajectory."
        else:
            return answer
        raise RequestError(f"The rollout {rollout_id!r} is finished already. {told}", status=409, code="finished")

    def _forget_old(self) -> None:
        """Keep the last answers to harnesses, within their bounds. One that is not there yet is not forgotten."""
        there = [rollout_id for rollout_id, (_, answer) in self._finished.items() if answer.done()]
        size = sum(_size(self._finished[rollout_id][1]) for rollout_id in there)
        while there and (len(there) > KEPT_ANSWERS or (size > KEPT_BYTES and len(there) > 1)):
            _, answer = self._finished.pop(there.pop(0))
            size -= _size(answer)

    async def _told(self, trajectory: Trajectory) -> str:
        """A trajectory as JSON, once ``on_finish`` has been told of it."""
        async with self._telling:
            await run_in_thread_to_completion(lambda: self._gateway.notify_finished(trajectory))
        return await run_in_thread(lambda: json.dumps(trajectory.to_json()))

    async def _answer(self, api: ProgramAPI, request: web.Request) -> web.StreamResponse:
        """Answer a call of a program."""
        session = self._program(request)
        length = request.content_length
        size = self._gateway.limits.max_body_bytes if length is None else length
        with session.call(min(size, self._gateway.limits.max_body_bytes)):
            body = await self._body(request)
            call, name = await session.decode(functools.partial(_read, api, body), size=len(body))
            del body  # it may be long, and the answer may take long
            answering = asyncio.ensure_future(_answered(session, call, name))
            seen: list[bool] = []
            try:
                if call.streams:
                    response = await self._streamed(request, call, answering, seen)
                else:
                    _, reply, headers = await answering
                    response = web.json_response(reply.whole(), headers=headers)
                    await response.prepare(request)
                await response.write_eof()
            except (ConnectionError, asyncio.CancelledError):
                await _handle_disconnect(answering, session, name, seen_in_part=bool(seen))
                raise
            if answering.exception() is None:
                session.mark_delivered(answering.result()[0])
            return response

    async def _streamed(
        self, request: web.Request, call: ProgramCall, answering: asyncio.Future[AnsweredCall], seen: list[bool]
    ) -> web.StreamResponse:
        """Send the answer, or why there is none, as a stream, all but its end. ``seen`` is filled once some is sent."""
        await asyncio.wait({answering}, timeout=STREAM_HEADER_DELAY_S)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        if answering.done():
            headers |= answering.result()[2]
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        while not answering.done():
            await response.write(b": the model is at work\n\n")
            await asyncio.wait({answering}, timeout=KEEPALIVE_S)
        try:
            reply = answering.result()[1]
        except Exception as error:
            await response.write(call.failed(RequestError.from_exception(error)))
            return response
        for event in reply.events():
            await response.write(event)
            seen.append(True)
        return response

    async def _body(self, request: web.Request) -> bytes:
        """The body of a request.

        Raises:
            RequestError: it is compressed, or does not arrive in time.
        """
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() not in ("", "identity"):
            raise RequestError("The body is compressed. Send it as it is.", status=415)
        seconds = self._gateway.limits.max_body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await request.read()
        except TimeoutError:
            told = f"The body has not arrived within {seconds:g} seconds (max_body_seconds)."
            raise RequestError(told, status=408) from None

    def _require_harness(self, request: web.Request) -> None:
        """Let in the harness alone.

        Raises:
            RequestError: it is not the harness.
        """
        key = bearer_token(request.headers.getall(hdrs.AUTHORIZATION, []))
        if is_same_key(key, self._gateway.key):
            return
        its_own = self._gateway.key_of(request.match_info.get("rollout", "")) or self._nobodys_key
        if is_same_key(key, its_own):
            told = f"This key is good for calls of the model in its rollout alone. {HARNESS_KEY_REQUIRED}"
            raise RequestError(told, status=403, code="harness_only")
        raise RequestError(f"The key is missing or wrong. {HARNESS_KEY_REQUIRED}", status=401, code="invalid_api_key")

    def _program(self, request: web.Request) -> ProgramSession:
        """The rollout whose program a request comes from.

        Raises:
            RequestError: the key is not that of the rollout, or this is over.
        """
        rollout_id = request.match_info["rollout"]
        key = bearer_token(request.headers.getall(hdrs.AUTHORIZATION, []))
        if not is_same_key(key, self._gateway.key_of(rollout_id) or self._nobodys_key):
            raise RequestError(
                "The API key is missing, or is not that of this rollout. Whoever opens the rollout is told it.",
                status=401,
                code="invalid_api_key",
            )
        if self._gateway.is_over(rollout_id):
            raise RequestError(f"The rollout {rollout_id!r} is finished.", status=409, code="finished")
        return self._gateway.session(rollout_id)

    def _found(self, request: web.Request) -> ProgramSession:
        try:
            return self._gateway.session(request.match_info["rollout"])
        except UsageError as error:
            raise RequestError(str(error), status=404) from None


def _size(answer: asyncio.Task[str]) -> int:
    return 0 if answer.cancelled() or answer.exception() else len(answer.result())


async def _answered(session: ProgramSession, call: ProgramCall, name: bytes) -> AnsweredCall:
    """The answer to a call, as it was at the moment when it was there, with the headers that go with it."""
    try:
        exchange = session.undelivered_answer(name) or await session.answer(call.request)
    except ConnectionError as error:  # of the policy, and not of the program's connection
        raise RequestError(describe_error(error), status=500) from error
    assert exchange.pending is not None
    replaced = exchange.pending.sampling.replaced
    headers = {OVERRIDDEN_HEADER: ", ".join(sorted(replaced))} if replaced else {}
    return exchange, call.reply(exchange.pending), headers


def _read(api: ProgramAPI, body: bytes) -> tuple[ProgramCall, bytes]:
    """A request and a name for it, with all that takes long done."""
    call = api.read(body)
    _ = call.request.hashes, call.request.size
    return call, hashlib.sha256(body).digest()


async def _handle_disconnect(
    answering: asyncio.Future[AnsweredCall], session: ProgramSession, name: bytes, *, seen_in_part: bool
) -> None:
    """The program is gone: abort what is sampled for it, and keep what was."""
    answering.cancel()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        session.mark_undelivered((await answering)[0], name, seen_in_part=seen_in_part)


async def _continue_if_expected(request: web.Request) -> None:
    """Answer an ``Expect`` header. aiohttp's own handler fails on a value that is not ASCII."""
    expected = request.headers.get(hdrs.EXPECT, "").lower()
    if request.version == HttpVersion11 and expected != "100-continue":
        raise web.HTTPExpectationFailed(text="The gateway knows no Expect header but 100-continue.")
    if request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


_CALLS = (
    "The calls are POST /rollouts/ID/v1/chat/completions, POST /rollouts, POST /rollouts/ID/finish, GET /rollouts/ID "
    "and GET /rollouts/ID/v1/models."
)
