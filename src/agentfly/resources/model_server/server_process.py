"""ServerProcess: one run of a server from start to end, and the state that the next run must restore."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentfly.core.errors import APIUnavailable, ModelAPIError, ResourceStartError
from agentfly.core.numbers import parse_byte_size
from agentfly.resources.credentials import Credentials
from agentfly.resources.model_api.client import ModelClient
from agentfly.resources.model_server.spec import ModelServerSpec
from agentfly.resources.model_server.token_server import LOAD_WEIGHTS, RemoteTokenServer, TokenServer
from agentfly.resources.model_server.vllm_command import secret_values, server_command, server_environment
from agentfly.resources.process.supervised import SupervisedProgram
from agentfly.resources.process.supervisor import ProgramSpec, log_tail


@dataclass
class LoadedState:
    """The weights and adapters loaded into a server.

    Attributes:
        weights: the directory of the weights that replaced the model's own; None if none did.
        load_method: the worker's method that loaded them.
        weights_version: the label of the weights; None if they have none.
        adapters: directories of LoRA adapters, by name.
    """

    weights: str | None = None
    load_method: str = LOAD_WEIGHTS
    weights_version: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)

    async def restore(self, server: TokenServer) -> None:
        """Load all of it into a new server. Errors are those of `TokenServer`."""
        if self.weights is not None:
            await server.load_weights(self.weights, by=self.load_method)
            await server.reset_prefix_cache()
        await self.restore_adapters(server)
        if self.weights_version is not None:
            await server.set_weight_version(self.weights_version)

    async def restore_adapters(self, server: TokenServer) -> None:
        """Have a server hold the adapters, which a change of weights drops."""
        for name, path in self.adapters.items():
            await server.load_adapter(name, path)


_TELLING_S = 5.0  # for telling why a start failed, before the engine's own limit ends it unheard
_LONG_POLL_S = 30.0
_TOLD_LOG = 4096


class ServerProcess:
    """A server's process, and a client of it.

    Args:
        spec: the spec of the server.
        name: name of the server, for messages.
        directory: its working directory, with its log.
        listener: the socket that it serves. It belongs to the caller, so the port stays the same after a restart, and
            no other program can take the port and receive the key.
        key: the key that it requires.
        gpus: the graphics processors that it gets; empty leaves the choice to the engine.

    Attributes:
        client: calls it.
        restart_decided: set once it has ended and its supervisor has decided on a restart.
    """

    def __init__(
        self,
        spec: ModelServerSpec,
        name: str,
        directory: Path,
        listener: socket.socket,
        key: str,
        gpus: Sequence[str] = (),
    ) -> None:
        self._spec = spec
        self._name = name
        self._directory = directory
        self._listener = listener
        self._key = key
        self._gpus = gpus
        self._process = SupervisedProgram()
        self.restart_decided = asyncio.Event()
        host, port = listener.getsockname()
        self.client = ModelClient(
            f"http://{host}:{port}/v1",
            model=spec.served_model_name,
            credentials=Credentials({"Authorization": f"Bearer {key}"}, [key]),
            read_timeout_s=spec.call_timeout_s,
        )

    async def start(self, loaded: LoadedState) -> None:
        """Start the server. Return when it is ready and has loaded the state of the previous run.

        Raises:
            PrerequisiteError: the interpreter or the engine is missing.
            ResourceStartError: it ended, or was not ready in time.
        """
        clock = asyncio.get_running_loop().time
        limit = max(0.75 * self._spec.start_timeout_s, self._spec.start_timeout_s - _TELLING_S)
        deadline = clock() + limit
        await self._process.start(self._job())
        ready = asyncio.create_task(self._until_ready(loaded))
        end = asyncio.create_task(self._process.wait_exit())
        try:
            await asyncio.wait({ready, end}, timeout=deadline - clock(), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise ResourceStartError(f"{self._name} ended before it was ready: {end.result()}.{self.log_excerpt()}")
            if not ready.done():
                raise ResourceStartError(
                    f"{self._name} was not ready within {limit:g} s (start_timeout_s={self._spec.start_timeout_s:g})."
                    f"{self.log_excerpt()}"
                )
            ready.result()
        finally:
            ready.cancel()
            end.cancel()
            await asyncio.gather(ready, end, return_exceptions=True)

    async def wait(self) -> str:
        """Wait for its end. Return a description of how it ended."""
        return await self._process.wait_exit()

    async def stop(self, grace_s: float) -> None:
        """End it, by force after the grace; return when everything that it had started is gone."""
        await self.client.close()
        await self._process.stop(grace_s)

    def kill(self) -> None:
        """Kill it with all its descendants. `wait` returns when that is done."""
        self._process.kill()

    async def is_well(self) -> bool:
        """Return whether it reports to be healthy within ``health_timeout_s``."""
        try:
            await self.client.health(call_timeout_s=self._spec.health_timeout_s)
        except ModelAPIError:
            return False
        return not self.restart_decided.is_set()  # otherwise the answer came from the next run, at the same socket

    def log_excerpt(self) -> str:
        """The end of its log, for a message."""
        end = log_tail(log_file(self._directory), _TOLD_LOG)
        return f" The end of its log:\n{end}" if end else " It wrote nothing to its log."

    @property
    def traces(self) -> dict[str, Any]:
        """The ids of its supervisor."""
        return self._process.traces

    async def _until_ready(self, loaded: LoadedState) -> None:
        """Wait for the server's first successful answer. Connections queue at its socket until it serves."""
        while True:
            try:
                await self.client.health(call_timeout_s=_LONG_POLL_S)
                break
            except APIUnavailable:
                await asyncio.sleep(0.1)
        await loaded.restore(RemoteTokenServer(self.client, call_timeout_s=self._spec.call_timeout_s))

    def _job(self) -> ProgramSpec:
        variables = server_environment(self._spec, self._key, self._gpus)
        return ProgramSpec(
            command=server_command(self._spec, self._listener.fileno()),
            env=variables,
            directory=str(self._directory),
            log=str(log_file(self._directory)),
            max_log_bytes=parse_byte_size(self._spec.max_log_bytes),
            secrets=secret_values(variables),
            inherited=(self._listener.fileno(),),
        )


def log_file(directory: Path) -> Path:
    """Return the log file of a server that runs in a directory."""
    return directory / "log"
