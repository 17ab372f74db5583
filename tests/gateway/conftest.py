"""A gateway in front of a scripted policy, and OpenAI's own client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentfly.gateway.gateway import Gateway
from agentfly.gateway.rollout_registry import RolloutEndpoint
from agentfly.policies.scripted import ScriptedPolicy

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


@asynccontextmanager
async def serving_policy(policy: Any, **settings: Any) -> AsyncIterator[tuple[Gateway, Callable[[str], AsyncOpenAI]]]:
    """A gateway in front of a policy, and what gives a client for a rollout, which it opens."""
    clients: list[AsyncOpenAI] = []
    endpoints: dict[str, RolloutEndpoint] = {}
    async with Gateway(policy, **settings) as gateway:

        def client(rollout_id: str = "r.0") -> AsyncOpenAI:
            if rollout_id not in endpoints:
                endpoints[rollout_id] = gateway.open(rollout_id)
            end = endpoints[rollout_id]
            clients.append(AsyncOpenAI(base_url=end.base_url, api_key=end.api_key, max_retries=0, timeout=20))
            return clients[-1]

        try:
            yield gateway, client
        finally:
            for one in clients:
                await one.close()


@pytest.fixture
def serving() -> Any:
    """``serving(script, **settings)``: a gateway in front of a scripted policy."""

    @asynccontextmanager
    async def serving(script: Any, *, context_length: int = 100_000, **settings: Any) -> AsyncIterator[Any]:
        async with (
            ScriptedPolicy(script, context_length=context_length) as policy,
            serving_policy(policy, **settings) as both,
        ):
            yield both

    return serving


@pytest.fixture
def serving_any() -> Any:
    """``serving_any(policy, **settings)``: a gateway in front of any policy."""
    return serving_policy


@pytest.fixture
def tools() -> Any:
    """The tools of a program."""
    return TOOLS


@pytest.fixture
def call() -> str:
    """A call of its tool, as a model writes it."""
    return CALL


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams begin soon, and chat templates are proved for few turns."""
    monkeypatch.setattr("agentfly.gateway.http_server.STREAM_HEADER_DELAY_S", 0.05)
    monkeypatch.setattr("agentfly.gateway.http_server.KEEPALIVE_S", 0.05)
    monkeypatch.setattr("agentfly.gateway.request_codec.EXPECTED_MAX_TURNS", 4)
