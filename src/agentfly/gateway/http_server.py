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
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Self

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
from agentfly.gateway.rollout_registry import RolloutRegistry
from agentfly.gateway.session import ProgramSession


class HarnessRequest(BaseModel):
    """The body of a request of the harness. Numbers must be JSON numbers, not strings or ``true``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parse the body of a request.

        Raises:
            RequestError: it is invalid.
        """
        try:
            return cls.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise RequestError.from_validation_error(error) from None


class SamplingFields(BaseModel):
    """The fields of `RolloutSampling`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    honor_request: bool = False


class OpenRolloutRequest(HarnessRequest):
    """A request to open a rollout."""

    rollout_id: str
    sampling: SamplingFields | None = None

    def rollout_sampling(self) -> RolloutSampling | None:
        """Return the requested sampling of the rollout, or None.

        Raises:
            ConfigError: a parameter is out of its range.
        """
        return None if self.sampling is None else RolloutSampling(**self.sampling.model_dump())


class FinishRolloutRequest(HarnessRequest):
    """A request to finish a rollout; see `RolloutRegistry.finish`."""

    reward: float | None = None
    task: str | dict[str, Any] | None = None
    group_id: str | None = None
    attempt: Annotated[int, Field(ge=0)] | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str | None = None


logger = logging.getLogger(__name__)

RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STREAM_HEADER_DELAY_S = 1.0
"""Seconds before the header of a stream is sent. An earlier failure still gets an HTTP status of its own."""

KEEPALIVE_S = 10.0
"""Seconds between comments that keep a waiting stream alive."""

STOP_S = 5.0
"""Seconds that connections have to close when the gateway closes."""

OVERRIDDEN_HEADER = "AgentFly-Replaced-Parameters"
"""Response header with the sampling parameters that the program requested and did not get."""


KEPT_ANSWERS, KEPT_BYTES = 32, 64 << 20
"""How many of the last finished trajectories, and bytes of them, are kept for repeated requests of harnesses."""

AnsweredCall = tuple[ModelCall, ProgramResponse, Mapping[str, str]]


class GatewayHTTPServer:
    """Serves the routes of a gateway.

    A program that disconnects cancels its request, and so the generation.

    Args:
        registry: the rollouts.
        apis: the APIs that programs use.
        host, port: the address to listen at; port 0 for any free one.
        key: the harness's key.
        model: the name under which the model is listed.
        known_hosts: host names that requests may use, besides addresses and ``localhost``.
    """

    def __init__(
        self,
        registry: RolloutRegistry,
        apis: Sequence[ProgramAPI],
        *,
        host: str,
        port: int,
        key: str,
        model: str,
        known_hosts: Collection[str],
    ) -> None:
        self._registry = registry
        self._address = host, port
        self._key = key
        self._model = model
        self._known_hosts = known_hosts
        self._notifying = asyncio.Lock()
        self._finished: OrderedDict[str, tuple[bytes, asyncio.Task[str]]] = OrderedDict()
        self._unused_key = new_key()  # compared with if there is no right key, so that timing reveals nothing
        app = web.Application(client_max_size=registry.limits.max_body_bytes, middlewares=[self._guarded])
        rollout = "/rollouts/{rollout}"
        calls = ["/models", *(api.path for api in apis)]
        routes = [
            web.get("/health", self._health),
            *(web.route("*", base + call, self._without_rollout) for base in ("", "/v1") for call in calls),
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
        """Start to listen. Return the port."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._address)
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
        """Check the host and origin of a request, and report errors in OpenAI's format."""
        try:
            hosts = request.headers.getall(hdrs.HOST, [])
            require_known_host(hosts, self._known_hosts)
            require_no_foreign_origin(request.headers.getall(hdrs.ORIGIN, []), hosts)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            limit = self._registry.limits.max_body_bytes
            refusal = RequestError(f"The body is longer than {limit} bytes (max_body_bytes).", status=413)
        except web.HTTPException as error:
            refusal = RequestError(f"{request.method} {request.path}: {error.reason}. {_CALLS}", status=error.status)
        except ConnectionError:
            return web.Response(status=499)  # not received: the program has disconnected
        except Exception as error:
            refusal = RequestError.from_exception(error)
            if refusal.status >= 500:
                logger.warning("A call of %s failed: %s", request.path, error, exc_info=error)
        return web.json_response(refusal.to_json(), status=refusal.status)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "policy_version": self._registry.policy.version})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._program(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "agentfly"}
        return web.json_response({"object": "list", "data": [model]})

    async def _without_rollout(self, request: web.Request) -> web.StreamResponse:
        """Refuse a program that uses the gateway's root instead of a rollout's address."""
        raise RequestError(
            f"{request.method} {request.path}: the URL names no rollout, and the gateway records each call with its "
            f"rollout. Give the program the base URL and the key of one: {self._registry.url}/rollouts/ID/v1",
            status=404,
        )

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        """Refuse an unknown path or method."""
        methods = {method for one in request.app.router.resources() for method in (await one.resolve(request))[1]}
        allowed = methods - {hdrs.METH_ANY}
        raise web.HTTPMethodNotAllowed(request.method, allowed) if allowed else web.HTTPNotFound

    async def _open(self, request: web.Request) -> web.StreamResponse:
        self._require_harness(request)
        asked = OpenRolloutRequest.read(await self._body(request))
        endpoint = self._registry.open(asked.rollout_id, sampling=asked.rollout_sampling())
        return web.json_response(endpoint.to_json(), status=201)

    async def _trajectory(self, request: web.Request) -> web.StreamResponse:
        self._require_harness(request)
        value = self._found(request).trajectory.to_json()
        return web.json_response(text=await run_in_thread(lambda: json.dumps(value)))

    async def _discard(self, request: web.Request) -> web.StreamResponse:
        self._require_harness(request)
        self._found(request)
        self._registry.discard(request.match_info["rollout"])
        return web.Response(status=204)

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        """End a rollout. A repeated request gets the same trajectory, as long as it is kept."""
        self._require_harness(request)
        rollout_id, body = request.match_info["rollout"], await self._body(request)
        if self._registry.is_over(rollout_id):
            answer = self._finished_before(rollout_id, body)
        else:
            answer = asyncio.create_task(self._notified(self._end(rollout_id, FinishRolloutRequest.read(body))))
            self._finished[rollout_id] = (hashlib.sha256(body).digest(), answer)
            answer.add_done_callback(lambda _: self._drop_old())
        return web.json_response(text=await asyncio.shield(answer))  # on_finish runs even if the harness disconnects

    def _end(self, rollout_id: str, asked: FinishRolloutRequest) -> Trajectory:
        failure = None
        if asked.error is not None:
            failure = Failure(Boundary.USAGE, "ProgramFailed", asked.error, by_policy=False)
        return self._registry.finish(
            rollout_id,
            task=asked.task,
            reward=asked.reward,
            group_id=asked.group_id,
            attempt=asked.attempt,
            metrics=asked.metrics,
            error=failure,
            notify=False,
        )

    def _finished_before(self, rollout_id: str, body: bytes) -> asyncio.Task[str]:
        """Return the answer to a repeated request to finish a rollout.

        Raises:
            RequestError: the request differs from the first one, or the answer is no longer kept.
        """
        asked, answer = self._finished.get(rollout_id, (b"", None))
        if answer is None:
            reason = (
                f"Its trajectory is not kept: it was finished elsewhere, discarded, or before the last {KEPT_ANSWERS}."
            )
        elif asked != hashlib.sha256(body).digest():
            reason = "This request differs from the one that finished it. Send that one to get the trajectory."
        else:
            return answer
        raise RequestError(f"The rollout {rollout_id!r} is finished already. {reason}", status=409, code="finished")

    def _drop_old(self) -> None:
        """Drop the oldest answers to harnesses beyond the bounds. An answer that is not ready yet is kept."""
        there = [rollout_id for rollout_id, (_, answer) in self._finished.items() if answer.done()]
        size = sum(_size(self._finished[rollout_id][1]) for rollout_id in there)
        while there and (len(there) > KEPT_ANSWERS or (size > KEPT_BYTES and len(there) > 1)):
            _, answer = self._finished.pop(there.pop(0))
            size -= _size(answer)

    async def _notified(self, trajectory: Trajectory) -> str:
        """Call ``on_finish`` with a trajectory, and return it as JSON."""
        async with self._notifying:
            await run_in_thread_to_completion(lambda: self._registry.notify_finished(trajectory))
        return await run_in_thread(lambda: json.dumps(trajectory.to_json()))

    async def _answer(self, api: ProgramAPI, request: web.Request) -> web.StreamResponse:
        """Answer a call of a program."""
        session = self._program(request)
        length = request.content_length
        size = self._registry.limits.max_body_bytes if length is None else length
        with session.call(min(size, self._registry.limits.max_body_bytes)):
            body = await self._body(request)
            call, name = await session.decode(functools.partial(_read, api, body), size=len(body))
            del body  # frees memory: it may be large, and the answer may take long
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
        """Send the answer or an error as a stream, except its end. ``seen`` is filled once a part is sent."""
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
        """Return the body of a request.

        Raises:
            RequestError: it is compressed, or does not arrive in time.
        """
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() not in ("", "identity"):
            raise RequestError("The body is compressed. Send it as it is.", status=415)
        seconds = self._registry.limits.max_body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await request.read()
        except TimeoutError:
            reason = f"The body has not arrived within {seconds:g} seconds (max_body_seconds)."
            raise RequestError(reason, status=408) from None

    def _require_harness(self, request: web.Request) -> None:
        """Check that a request has the harness's key.

        Raises:
            RequestError: it has not.
        """
        key = bearer_token(request.headers.getall(hdrs.AUTHORIZATION, []))
        if is_same_key(key, self._key):
            return
        programs_key = self._registry.key_of(request.match_info.get("rollout", "")) or self._unused_key
        if is_same_key(key, programs_key):
            reason = f"This key only allows model calls in its rollout. {HARNESS_KEY_REQUIRED}"
            raise RequestError(reason, status=403, code="harness_only")
        raise RequestError(f"The key is missing or wrong. {HARNESS_KEY_REQUIRED}", status=401, code="invalid_api_key")

    def _program(self, request: web.Request) -> ProgramSession:
        """Return the session of the rollout whose program sent a request.

        Raises:
            RequestError: the key is not the rollout's key, or the rollout is finished.
        """
        rollout_id = request.match_info["rollout"]
        key = bearer_token(request.headers.getall(hdrs.AUTHORIZATION, []))
        if not is_same_key(key, self._registry.key_of(rollout_id) or self._unused_key):
            raise RequestError(
                "The API key is missing, or is not the key of this rollout. Opening the rollout returns its key.",
                status=401,
                code="invalid_api_key",
            )
        if self._registry.is_over(rollout_id):
            raise RequestError(f"The rollout {rollout_id!r} is finished.", status=409, code="finished")
        return self._registry.session(rollout_id)

    def _found(self, request: web.Request) -> ProgramSession:
        try:
            return self._registry.session(request.match_info["rollout"])
        except UsageError as error:
            raise RequestError(str(error), status=404) from None


def _size(answer: asyncio.Task[str]) -> int:
    return 0 if answer.cancelled() or answer.exception() else len(answer.result())


async def _answered(session: ProgramSession, call: ProgramCall, name: bytes) -> AnsweredCall:
    """Return the model call that answers a request, the response and its headers."""
    try:
        model_call = session.undelivered_answer(name) or await session.answer(call.request)
    except ConnectionError as error:  # of the policy, not of the program's connection
        raise RequestError(describe_error(error), status=500) from error
    assert model_call.pending is not None
    replaced = model_call.pending.sampling.replaced
    headers = {OVERRIDDEN_HEADER: ", ".join(sorted(replaced))} if replaced else {}
    return model_call, call.reply(model_call.pending), headers


def _read(api: ProgramAPI, body: bytes) -> tuple[ProgramCall, bytes]:
    """Parse a request. Return it with a hash of its body, which identifies repetitions."""
    call = api.read(body)
    _ = call.request.hashes, call.request.size  # computed here, on the thread
    return call, hashlib.sha256(body).digest()


async def _handle_disconnect(
    answering: asyncio.Future[AnsweredCall], session: ProgramSession, name: bytes, *, seen_in_part: bool
) -> None:
    """Abort the running generation of a program that has disconnected, or keep its finished answer."""
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
