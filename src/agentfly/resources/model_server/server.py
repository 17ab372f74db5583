"""ModelServer: a live server of a language model, restarted when it dies, as tools and policies use it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from agentfly.core.errors import APIUnavailable, ModelAPIError, ResourceDied, ResourceResetError, UsageError
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.tree_removal import remove_tree
from agentfly.core.user_directories import state_directory
from agentfly.resources.model_api.client import ModelClient
from agentfly.resources.model_api.judge import Judge
from agentfly.resources.model_api.responses import ChatCompletion, TextCompletion
from agentfly.resources.model_api.validation import check_parameter_names
from agentfly.resources.model_server.gpu_allocator import VISIBLE, GPUAllocator, visible_gpus
from agentfly.resources.model_server.server_process import LoadedState, ServerProcess, log_file
from agentfly.resources.model_server.spec import ModelServerSpec
from agentfly.resources.model_server.token_server import (
    CONTROL_TIMEOUT_S,
    LOAD_WEIGHTS,
    TokenServer,
    parse_response,
    server_url,
)
from agentfly.resources.model_server.vllm_command import server_command
from agentfly.resources.process.supervisor import log_tail
from agentfly.resources.resource import Resource, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")

_INSTANCE = re.compile(r"[\w.-]{1,100}")


class ModelServer(Resource, Judge, TokenServer):
    """A language model behind an OpenAI-compatible server on this machine: ``await server.chat(messages)``.

    A server that dies is restarted at the same address, as often as the spec allows. A request that was running is sent
    once more, and new requests wait. Adapters are loaded again, so a restart only costs time. After too many restarts,
    all calls raise `ResourceDied`, which is never the policy's fault.
    """

    spec: ModelServerSpec

    def __init__(self, spec: ModelServerSpec, instance: str) -> None:
        super().__init__(spec, instance)
        if not _INSTANCE.fullmatch(instance) or instance in (".", ".."):
            raise UsageError(f"{instance!r} cannot be the name of a server: use letters, digits, '.', '_' and '-'.")
        self._key = secrets.token_urlsafe(32)
        self._listener: socket.socket | None = None
        self._run: ServerProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._restarter: asyncio.Task[None] | None = None
        self._ready_or_lost = asyncio.Event()  # it serves, or never will again
        self._lost: str | None = "it has not been started."
        self._released = False
        self._deaths: list[float] = []
        self._loaded = LoadedState()
        self._devices: tuple[str, ...] = ()

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server, and wait until it is ready.

        Raises:
            PrerequisiteError: the interpreter, the engine or a package is missing; the message says what to do.
            ResourceStartError: the server ended, or was not ready in time; the message has the end of its log.
        """
        if self._released:
            raise ResourceDied(f"{self._name} has been released.")
        self._starting = asyncio.create_task(self._start())
        try:
            await self._starting
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if asker is not None and asker.cancelling():
                raise
            raise ResourceDied(f"{self._name} was released while it was started.") from None

    async def reset(self) -> None:
        """End all requests, go back to the weights it started with, unload the adapters and forget all prompts.

        Raises:
            ResourceResetError: the server does not do it.
            ResourceDied: the server is gone.
        """
        try:
            await self.request("POST", "/abort_requests", {}, call_timeout_s=CONTROL_TIMEOUT_S)
            for name in list(self._loaded.adapters):
                await self.unload_adapter(name)
            if self._loaded.weights is not None:
                await self.load_weights(None, by=self._loaded.load_method)
            await self.reset_prefix_cache()
            await self.resume()
            self._loaded = LoadedState()
        except ModelAPIError as error:
            raise ResourceResetError(f"{self._name} could not be reset: {error}") from error

    async def status(self) -> Status:
        """Query the server's health endpoint. A hanging server is killed; a restarting one counts as healthy."""
        if self._lost is not None or not self._directory.exists():
            return Status.BROKEN
        if not self._ready_or_lost.is_set() or (run := self._run) is None:
            return Status.HEALTHY
        well = await run.is_well() or (await self._has_ended(run) and self._lost is None)
        return Status.HEALTHY if well else Status.BROKEN

    def quick_status(self) -> Status:
        """Return whether it serves or restarts, as far as this is known."""
        return Status.HEALTHY if self._lost is None else Status.BROKEN

    async def release(self) -> None:
        """Ask the server to end, and kill it after half of ``release_timeout_s``. Return when it is gone."""
        self._released = True
        self._mark_lost("it was released.")
        for task in (self._starting, self._restarter):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait({task})
        await self._end(self.spec.release_timeout_s / 2)
        if self._devices and self._gpus is not None:
            await self._gpus.release(self.instance)
        await run_in_thread(remove_tree, self._directory)

    @property
    def traces(self) -> dict[str, Any]:
        """The working directory of its processes, and the ids of their supervisor."""
        return {"directory": str(self._directory), **(self._run.traces if self._run is not None else {})}

    # --- what tools and policies use --------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """The base of its API, such as ``http://127.0.0.1:40123/v1``, for other clients; they need `api_key`.

        Raises:
            ResourceDied: it is not running.
        """
        if self._listener is None or self._lost is not None:
            raise ResourceDied(f"{self._name} is not running: {self._lost}")
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}/v1"

    @property
    def api_key(self) -> str:
        """The key that every request needs."""
        return self._key

    @property
    def model(self) -> str:
        """The name of the model in requests."""
        return self.spec.served_model_name

    async def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> ChatCompletion:
        """Request an answer to a conversation.

        Args:
            messages: for instance ``[{"role": "user", "content": "…"}]``.
            parameters: any parameters of the API, such as ``temperature`` and ``max_tokens``; ``model`` for an adapter.

        Raises:
            UsageError: a parameter cannot be sent.
            ResourceDied: the server is gone and will not be started again.
            ModelAPIError: it refuses or fails; see `agentfly.resources.model_api.client.ModelClient`.
        """
        asked = _call_parameters(parameters)
        return await self._ask(lambda client, left: client.chat(messages, call_timeout_s=left, **asked))

    async def complete(self, prompt: str | Sequence[int], **parameters: Any) -> TextCompletion:
        """Continue a prompt, which is a text or token ids. The rest is as in `chat`."""
        asked = _call_parameters(parameters)
        return await self._ask(lambda client, left: client.complete(prompt, call_timeout_s=left, **asked))

    async def load_weights(self, directory: str | Path | None, *, by: str = LOAD_WEIGHTS) -> None:
        """Serve other weights, and after a restart too; see `TokenServer.load_weights`. The adapters stay loaded."""
        await super().load_weights(directory, by=by)
        self._loaded.weights, self._loaded.load_method = None if directory is None else str(directory), by
        await self._loaded.restore_adapters(self)

    async def set_weight_version(self, label: str) -> None:
        """Set the label of the current weights, which samples report. It survives a restart."""
        await super().set_weight_version(label)
        self._loaded.weights_version = label

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a directory. It replaces an adapter with the same name.

        Raises:
            UsageError: the spec has no ``adapters``.
            ResourceDied, ModelAPIError: as in `chat`.
        """
        if not self.spec.adapters:
            raise UsageError(f"{self.spec.label} takes no adapters. Say how many: ModelServerSpec(adapters=1, …).")
        await super().load_adapter(name, path)
        self._loaded.adapters[name] = str(path)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Errors are those of `chat`."""
        await super().unload_adapter(name)
        self._loaded.adapters.pop(name, None)

    def log(self, size: int = 2**16) -> str:
        """Return the end of the server's log without its secrets, at most this many bytes."""
        return log_tail(log_file(self._directory), size)

    # --- asking -----------------------------------------------------------------------------------------------------

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, call_timeout_s: float | None = None
    ) -> Mapping[str, Any]:
        """Make any other request; see `TokenServer.request`."""
        url, limit = server_url(self.base_url, path), call_timeout_s or self.spec.call_timeout_s
        return parse_response(
            await self._ask(
                lambda client, left: client.request(method, url, body, call_timeout_s=max(0.001, min(left, limit)))
            )
        )

    async def _ask(self, ask: Callable[[ModelClient, float], Awaitable[T]]) -> T:
        """Make a request. Repeat it once if the server dies meanwhile, all within ``call_timeout_s``."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.spec.call_timeout_s
        run = await self._running(deadline - clock())
        try:
            return await ask(run.client, deadline - clock())
        except APIUnavailable:
            if self._lost is None and (deadline <= clock() or await run.is_well() or not await self._has_ended(run)):
                raise
        run = await self._running(deadline - clock())
        return await ask(run.client, max(0.001, deadline - clock()))

    async def _running(self, within_s: float) -> ServerProcess:
        """The server, as soon as it serves.

        Raises:
            ResourceDied: it will not serve again.
            APIUnavailable: it does not serve in time.
        """
        if self._lost is None:
            try:
                async with asyncio.timeout(within_s):
                    await self._ready_or_lost.wait()
            except TimeoutError:
                raise APIUnavailable(f"{self._name} was being started again for {within_s:.0f} s.") from None
        if self._lost is not None or self._run is None:
            raise ResourceDied(f"{self._name} cannot be used: {self._lost}")
        return self._run

    async def _has_ended(self, run: ServerProcess) -> bool:
        """Whether a server that is not well has come to its end.

        It ends shortly after its engine. If it does not, and is still unhealthy, it hangs and is killed.
        """
        if not await self._restart_decided(run):
            if await run.is_well():
                return False
            logger.warning("%s hangs: it is not well, and does not end. It is killed.", self._name)
            run.kill()
            await self._restart_decided(run)
        return True

    async def _restart_decided(self, run: ServerProcess) -> bool:
        try:
            async with asyncio.timeout(self.spec.health_timeout_s):
                await run.restart_decided.wait()
        except TimeoutError:
            return False
        return True

    # --- starting, and starting again -------------------------------------------------------------------------------

    async def _start(self) -> None:
        server_command(self.spec, 0)  # missing prerequisites are reported before anything is created
        self._directory.mkdir(parents=True, mode=0o700)
        if (gpus := self._gpus) is not None:
            self._devices = await gpus.allocate(self.instance, self.spec.devices, self.spec.gpus)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        await self._bring_up(self._listener)
        self._lost = None
        self._ready_or_lost.set()
        self._restarter = asyncio.create_task(self._restart_when_dead(self._listener), name=f"mind {self.instance}")

    async def _bring_up(self, listener: socket.socket) -> None:
        self._run = run = ServerProcess(self.spec, self._name, self._directory, listener, self._key, self._devices)
        await run.start(self._loaded)

    async def _end(self, grace_s: float) -> None:
        if self._run is not None:
            await self._run.stop(grace_s)

    async def _restart_when_dead(self, listener: socket.socket) -> None:
        """Start the server again whenever it dies, until that is too often."""
        clock = asyncio.get_running_loop().time
        failure: Exception | None = None
        while (run := self._run) is not None:
            how = await run.wait()
            self._ready_or_lost.clear()
            died = f"it died ({how})" if failure is None else f"it did not start again: {failure}"
            self._deaths = [then for then in self._deaths if clock() - then < self.spec.restart_window_s] + [clock()]
            if len(self._deaths) > self.spec.restarts:
                often = f"{len(self._deaths)} times within {self.spec.restart_window_s:g} s (restarts="
                log = run.log_excerpt() if failure is None else ""
                self._mark_lost(f"{died}; it ended {often}{self.spec.restarts}).{log}")
            run.restart_decided.set()
            if self._lost is not None:
                return
            logger.warning("%s: %s. It is started again.", self._name, died)
            await self._end(0)
            try:
                await self._bring_up(listener)
            except Exception as error:  # on any error, the waiting requests must get an error
                failure = error
                await self._end(0)
            else:
                failure = None
                self._ready_or_lost.set()

    def _mark_lost(self, why: str) -> None:
        self._lost = why
        self._ready_or_lost.set()
        if self._listener is not None:  # otherwise clients in its queue would wait forever
            with contextlib.suppress(
                OSError
            ):  # Linux reports that it is not connected, and shuts it down for all holders
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    @cached_property
    def _gpus(self) -> GPUAllocator | None:
        """The machine's GPUs to choose from; None if the server needs none, or the spec or the engine chooses."""
        if self.spec.device != "gpu" or VISIBLE in dict(self.spec.env):
            return None
        devices = visible_gpus(os.environ)
        return GPUAllocator(state_directory().resolve() / "gpus", devices) if devices else None

    @cached_property
    def _directory(self) -> Path:
        return state_directory().resolve() / "model-servers" / self.instance

    @property
    def _name(self) -> str:
        return f"{self.spec.label} {self.instance}"


def _call_parameters(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a call. Reject those that belong to the spec."""
    if "call_timeout_s" in parameters:
        raise UsageError("call_timeout_s is no parameter of a call. Write ModelServerSpec(call_timeout_s=…).")
    check_parameter_names(parameters)
    return parameters
