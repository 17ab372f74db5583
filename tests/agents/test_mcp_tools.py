"""Tools of real MCP servers in real rollouts, over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("mcp", reason="pip install 'agentfly-rl[mcp]'")

from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

import agentfly as af
from agentfly.agents import mcp_tools
from agentfly.agents.mcp_tools import _as_result
from agentfly.agents.tool import Tool
from agentfly.core.errors import (
    AgentFlyError,
    ConfigError,
    ResourceDied,
    ResourceError,
    ResourceStartError,
    ToolDefinitionError,
    ToolError,
)
from agentfly.core.messages import Image
from agentfly.core.trajectory import Trajectory
from tests.support.mcp_http_server import PAGE, Answer, MCPHTTPServer, says_its_arguments

RESOURCES = Path(__file__).parents[1] / "resources"
NOTES = af.MCPServerSpec(
    command=(sys.executable, str(RESOURCES / "notes_mcp_server.py")), start_timeout_s=110, capacity=2
)
SMALL = af.MCPServerSpec(
    command=(sys.executable, "-S", "-E", str(RESOURCES / "small_mcp_server.py")), start_timeout_s=60
)
PIXEL = Image(b"\x89PNG a pixel", "image/png")


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLY_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def notes(state: None) -> dict[str, Tool]:
    return {tool.name: tool for tool in af.mcp_tools(NOTES)}


async def play(tools: list[Tool], calls: list[tuple[str, dict[str, Any]]], **run: Any) -> list[Trajectory]:
    agent = af.Agent(model="tiny", tools=tools, max_turns=50)
    script = [*(agent.format.write(name, given) for name, given in calls), "Done."]
    return (await af.run(agent, ["Go."], policy=af.ScriptedPolicy(script, sees=True), **run)).trajectories


@af.reward
def always_one() -> float:
    return 1.0


def observed(trajectory: Trajectory) -> list[str]:
    return [result.observation for turn in trajectory.turns for result in turn.tool_results]


@pytest.mark.slow
def test_a_servers_tools_are_described_as_it_describes_them(notes: dict[str, Tool]) -> None:
    write = notes["write"]
    assert write.description.startswith("Write a line.")
    assert write.parameters["properties"]["times"] == {"default": 1, "type": "integer"}
    assert write.parameters["required"] == ["line"]
    assert write.schema.describe().startswith("line (string), times (integer, optional), tags (")
    assert notes["show"].schema.type_of("kind") == 'one of "png", "both"'
    copy = pickle.loads(cloudpickle.dumps(write))
    assert (copy.name, copy.parameters, copy.resources) == ("write", write.parameters, (NOTES,))


@pytest.mark.slow
async def test_each_rollout_has_a_server_of_its_own_whose_answers_become_observations(notes: dict[str, Tool]) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("write", {"line": "tea", "times": "2", "tags": '["a"]'}),
        ("read", {}),
        ("show", {"kind": "both"}),
        ("fail", {"how": "badly"}),
        ("write", {"lines": "tea"}),
    ]
    for trajectory in await play(list(notes.values()), calls, attempts=2):
        assert not trajectory.infrastructure_failed
        first, read, shown, failed, refused = observed(trajectory)
        assert first == "2 ['a']"
        assert read == "tea\ntea"
        assert shown == "look:"
        assert failed == "Error: Error executing tool fail"
        assert refused.startswith("Error: The call of 'write' was not executed, because its arguments do not fit: ")
        records = [result for turn in trajectory.turns for result in turn.tool_results]
        assert records[2].images == (PIXEL,)
        assert records[1].info == {"structured": {"result": ["tea", "tea"]}}
        assert records[3].failure is not None
        assert records[3].failure.by_policy


@pytest.mark.slow
async def test_a_server_that_dies_is_nobodys_fault_and_the_next_rollout_has_another() -> None:
    tools = af.mcp_tools(SMALL)
    with pytest.raises(AgentFlyError, match=r"(?s)reasons that the policy could not cause.*ResourceDied.*out of paper"):
        await play(tools, [("end", {})])
    (fine,) = await play(tools, [("write", {"line": "a"}), ("read", {})])
    assert observed(fine) == ["line 1", '["a"]']


@pytest.mark.slow
async def test_a_shared_server_serves_all_rollouts_and_one_a_call_none_twice() -> None:
    shared = af.mcp_tools(SMALL, only=["read", "write"], prefix="all_", scope="global")
    fresh = af.mcp_tools(SMALL, only=["write"], scope="call")
    assert [tool.name for tool in (*shared, *fresh)] == ["all_read", "all_write", "write"]
    assert all(tool.resources == () for tool in (*shared, *fresh))
    calls: list[tuple[str, dict[str, Any]]] = [("all_write", {"line": "a"}), ("write", {"line": "b"})]
    trajectories = await play([*shared, *fresh], calls, attempts=3)
    assert sorted(observed(trajectory)[0] for trajectory in trajectories) == ["line 1", "line 2", "line 3"]
    assert {observed(trajectory)[1] for trajectory in trajectories} == {"line 1"}


async def test_a_shared_server_that_died_is_replaced_for_whoever_tries_again() -> None:
    (write,) = af.mcp_tools(SMALL, only=["write"], scope="global", retries=3)

    @af.tool
    async def kill(context: af.Context) -> str:
        """Kill the server."""
        server = await context.acquire(SMALL, scope="global")
        with contextlib.suppress(ResourceDied):
            await server.call("end", {})
        return "killed"

    (trajectory,) = await play([kill, write], [("write", {"line": "a"}), ("kill", {}), ("write", {"line": "b"})])
    assert observed(trajectory) == ["line 1", "killed", "line 1"]


async def test_a_call_that_takes_longer_than_its_tool_may_is_told_to_the_model() -> None:
    (trajectory,) = await play(
        af.mcp_tools(SMALL, timeout_s=0.2, max_output_tokens=9), [("wait", {"seconds": 60}), ("read", {})]
    )
    assert observed(trajectory) == ["Error: The call of 'wait' was stopped after 0.2 s.", "[]"]


@pytest.mark.slow
async def test_the_tools_of_a_server_at_an_address_work_in_rollouts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(RESOURCES / "notes_mcp_server.py"), str(port)]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)  # noqa: ASYNC251
        tools = af.mcp_tools(af.MCPServerSpec(url=f"http://127.0.0.1:{port}/mcp"), scope="global")
        calls: list[tuple[str, dict[str, Any]]] = [("write", {"line": "tea"}), ("show", {"kind": "png"})]
        trajectories = await play(tools, calls, attempts=4)
    finally:
        program.kill()
        program.wait()
    assert sorted(observed(trajectory)[0] for trajectory in trajectories) == [f"{n} None" for n in (1, 2, 3, 4)]
    assert all(trajectory.turns[1].tool_results[0].images == (PIXEL,) for trajectory in trajectories)


@pytest.mark.parametrize(
    ("options", "error", "cure"),
    [
        ({"only": ["wriet"]}, ConfigError, "has no tool 'wriet'. Did you mean 'write'"),
        ({"only": "write"}, ConfigError, r"write a list of names, \['write'\]"),
        ({"prefix": "x" * 64}, ToolDefinitionError, "no name that a model can call"),
        ({"timeout_s": 0}, ToolDefinitionError, "above 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(options: dict[str, Any], error: type[Exception], cure: str) -> None:
    with pytest.raises(error, match=cure):
        af.mcp_tools(SMALL, **options)


@pytest.mark.slow
def test_a_server_that_cannot_be_asked_says_why() -> None:
    with pytest.raises(ResourceStartError, match="status 7"):
        af.mcp_tools(af.MCPServerSpec(command=("sh", "-c", "exit 7")))


def test_what_a_model_cannot_be_shown_it_is_told_of() -> None:
    blob = BlobResourceContents(uri="file:///a.zip", mime_type="application/zip", blob="aGk=")
    picture = BlobResourceContents(uri="file:///a.png", mime_type="image/png", blob="aGk=")
    result = _as_result(
        CallToolResult(
            content=[
                TextContent(type="text", text="words"),
                AudioContent(type="audio", data="aGk=", mime_type="audio/wav"),
                ResourceLink(type="resource_link", name="page", uri="https://example.org/"),
                EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///a.txt", text="inside")),
                EmbeddedResource(type="resource", resource=blob),
                EmbeddedResource(type="resource", resource=picture),
            ]
        )
    )
    assert result.observation == [
        "words",
        "[audio, audio/wav, which cannot be shown]",
        "[page: https://example.org/]",
        "inside",
        "[file:///a.zip, application/zip, which cannot be shown]",
        Image(b"hi", "image/png"),
    ]


def test_an_answer_in_structure_alone_is_the_observation() -> None:
    result = _as_result(CallToolResult(content=[], structured_content={"temperature": 3}))
    assert result.observation == {"temperature": 3}


@pytest.mark.parametrize(("scope", "told"), [("rollout", "Each rollout"), ("call", "Each call"), ("global", None)])
def test_a_start_that_every_rollout_pays_for_is_told_with_what_it_takes(monkeypatch, caplog, scope, told) -> None:
    monkeypatch.setattr(mcp_tools, "_SLOW_START_S", 0.0)
    af.mcp_tools(SMALL, scope=scope)
    if told is None:
        assert caplog.text == ""
    else:
        assert f"{told} starts" in caplog.text
        assert "scope='global'" in caplog.text


async def test_a_shared_server_that_forgets_its_sessions_costs_no_rollout_anything() -> None:
    def answers_and_forgets(request: dict[str, Any]) -> Answer:
        if len(there.calls) == 12:
            there.forget()
        return says_its_arguments(request)

    async with MCPHTTPServer(answers_and_forgets) as there:
        tools = await asyncio.to_thread(af.mcp_tools, af.MCPServerSpec(url=there.url), scope="global")
        calls: list[tuple[str, dict[str, Any]]] = [("say", {"n": n}) for n in range(3)]
        trajectories = await play(tools, calls, attempts=8)
        assert [observed(one) for one in trajectories] == [['{"n": 0}', '{"n": 1}', '{"n": 2}']] * 8
        assert not any(one.infrastructure_failed for one in trajectories)
        assert len(there.calls) == 24
        assert len(there.sessions) == 3  # one that was asked for the tools, and two of the run


@pytest.mark.parametrize(
    "answer",
    [
        Answer(PAGE, 503, "text/html"),
        Answer(PAGE, kind="text/html"),
        Answer.of({"jsonrpc": "2.0", "id": 3, "result": {"structuredContent": {"rows": 3}}}),
    ],
)
@pytest.mark.parametrize("scope", ["rollout", "global", "call"])
@pytest.mark.slow
async def test_no_rollout_is_scored_by_what_its_server_goes_wrong_with(answer: Answer, scope: str) -> None:
    def often(request: dict[str, Any]) -> Answer:
        fails = request["params"]["arguments"]["n"] and len(there.calls) % 3 == 0
        body = answer.body.replace(b'"id": 3', f'"id": {request["id"]}'.encode())
        return replace(answer, body=body) if fails else says_its_arguments(request)

    async with MCPHTTPServer(often) as there:
        tools = await asyncio.to_thread(af.mcp_tools, af.MCPServerSpec(url=there.url), scope=scope)
        calls: list[tuple[str, dict[str, Any]]] = [("say", {"n": n}) for n in range(2)]
        trajectories = await play(tools, calls, attempts=6, reward=always_one, max_failure_rate=1.0)
    failed = [one for one in trajectories if one.infrastructure_failed]
    assert failed
    assert all(one.reward is None for one in failed)
    assert all(observed(one) == ['{"n": 0}', '{"n": 1}'] for one in trajectories if one not in failed)


@pytest.mark.parametrize("written", ["no base64!", "aGk", "aGk=="])
def test_an_image_that_is_no_base64_is_the_servers_fault(written: str) -> None:
    answer = CallToolResult(content=[ImageContent(type="image", data=written, mime_type="image/png")])
    with pytest.raises(ResourceError, match="an image that is no base64"):
        _as_result(answer)
    with pytest.raises(ToolError, match="does not say why"):
        _as_result(answer.model_copy(update={"is_error": True}))
    wrapped = ImageContent(type="image", data="aG\nk=\n", mime_type="image/png")
    assert _as_result(CallToolResult(content=[wrapped])).observation == [Image(b"hi", "image/png")]
    other = ImageContent(type="image", data="aGk=", mime_type="text/html")
    assert _as_result(CallToolResult(content=[other])).observation == "[image, text/html, which cannot be shown]"
