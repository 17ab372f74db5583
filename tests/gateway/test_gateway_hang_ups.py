"""Clients that disconnect at any moment: nothing is printed, and no answer that a program has seen is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import agentfly as af
from agentfly.core.trajectory import FinishReason
from agentfly.gateway.session import ProgramSession
from agentfly.policies.scripted import ScriptedPolicy


def request(end: Any, *texts: str, stream: bool) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    body = json.dumps({"messages": messages, "stream": stream}).encode()
    path = "/" + end.base_url.split("/", 3)[3]
    head = (
        f"POST {path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {end.api_key}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def reset(connection: socket.socket) -> None:
    """Close a connection as a program that is killed does: the other side finds it gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Gate(ScriptedPolicy):
    """Answers ``hi`` many times over once it is told to. It may hold up the event loop meanwhile, as a busy one is."""

    def __init__(self, times: int = 1, busy_until: threading.Event | None = None) -> None:
        super().__init__(lambda prompt, turn: "hi " * times, context_length=10**8)
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.running = 0
        self._busy_until = busy_until

    async def generate(self, *args: Any, **more: Any) -> Any:
        self.asked.set()
        self.running += 1
        try:
            await self.go.wait()
            if self._busy_until is not None:
                assert self._busy_until.wait(20)
            return await super().generate(*args, **more)
        finally:
            self.running -= 1


async def until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def quiet(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> AsyncIterator[None]:
    """Nothing is printed or logged within."""
    caplog.set_level(logging.INFO)
    yield
    told = [record.getMessage() for record in caplog.records if record.name.split(".")[0] in ("agentfly", "aiohttp")]
    assert told == [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_hanging_up_while_the_model_is_at_work_is_quiet_and_leaves_no_turn(
    serving_any: Any, caplog: Any, capfd: Any, stream: bool, how: str
) -> None:
    async with quiet(caplog, capfd), Gate() as policy, serving_any(policy) as (gateway, _):
        end = gateway.open("r")
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(request(end, "q", stream=stream))
        await policy.asked.wait()
        if stream:
            await reader.readuntil(b"at work")
        reset(writer.get_extra_info("socket").dup()) if how == "reset" else None
        writer.transport.abort()
        await until(lambda: policy.running == 0)
        trajectory = gateway.finish("r", reward=1.0)
    assert (trajectory.turns, trajectory.finish_reason, trajectory.reward) == ([], FinishReason.FAILED, None)
    assert trajectory.failure is not None
    assert "gave up its last call" in trajectory.failure.message
    assert not trajectory.trainable


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_while_the_event_loop_is_busy_is_quiet(
    serving_any: Any, caplog: Any, capfd: Any, stream: bool
) -> None:
    """The gateway writes to a connection that it has not yet seen to be gone."""
    gone = threading.Event()
    async with quiet(caplog, capfd), Gate(1_000, busy_until=gone) as policy, serving_any(policy) as (gateway, _):
        end = gateway.open("r")

        def program() -> None:
            connection = socket.create_connection(("127.0.0.1", gateway.port))
            connection.sendall(request(end, "q", stream=stream))
            sent.wait(20)
            time.sleep(0.02)  # until the event loop is held
            reset(connection)
            gone.set()

        sent = threading.Event()
        thread = threading.Thread(target=program)
        thread.start()
        await policy.asked.wait()
        sent.set()
        policy.go.set()
        await until(lambda: policy.running == 0 and not thread.is_alive())
        await asyncio.sleep(0.05)
        trajectory = gateway.finish("r", reward=1.0)
    assert len(trajectory.turns) <= 1


async def test_a_program_that_stops_reading_a_stream_has_its_answer_on_the_record(
    serving_any: Any, caplog: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is longer than what the connection holds, so it has arrived in part."""
    left: list[bool] = []
    undelivered = ProgramSession.mark_undelivered

    def noting(session: ProgramSession, *args: Any, seen_in_part: bool) -> None:
        left.append(seen_in_part)
        undelivered(session, *args, seen_in_part=seen_in_part)

    monkeypatch.setattr(ProgramSession, "mark_undelivered", noting)
    async with quiet(caplog, capfd), Gate(100_000) as policy, serving_any(policy) as (gateway, _):
        end = gateway.open("r")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect(("127.0.0.1", gateway.port))
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1_000)
        writer.write(request(end, "q", stream=True))
        await policy.asked.wait()
        (served,) = gateway._server._runner.server.connections
        served.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        policy.go.set()
        await reader.readuntil(b"hi hi hi")
        writer.transport.abort()
        await until(lambda: left)
        trajectory = gateway.finish("r", reward=1.0)
    assert left == [True]
    assert (len(trajectory.turns), trajectory.finish_reason, trajectory.reward) == (1, FinishReason.ANSWERED, 1.0)
    assert trajectory.turns[0].text == "hi " * 100_000


async def test_a_rollout_without_a_call_is_no_success_whatever_the_harness_says(serving: Any) -> None:
    async with serving(["hi"]) as (gateway, _):
        gateway.open("r")
        trajectory = gateway.finish("r", reward=1.0)
    assert (trajectory.finish_reason, trajectory.reward, trajectory.infrastructure_failed) == ("failed", None, True)
    assert trajectory.failure is not None
    assert "base URL and the key" in trajectory.failure.message


async def test_a_policys_own_broken_connection_is_told_and_spoils_the_rollout(serving_any: Any) -> None:
    class Broken(ScriptedPolicy):
        async def generate(self, *args: Any, **more: Any) -> Any:
            raise ConnectionResetError("the server of the model is gone")

    async with Broken([]) as policy, serving_any(policy) as (gateway, client):
        with pytest.raises(Exception, match="the server of the model is gone"):
            await client().chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
        trajectory = gateway.finish("r.0", reward=1.0)
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.reward) == ("ConnectionResetError", None)


async def test_what_is_finished_over_http_is_told_also_where_the_harness_hangs_up(serving: Any) -> None:
    told: list[af.Trajectory] = []
    go = threading.Event()

    def slow(trajectory: af.Trajectory) -> None:
        assert go.wait(20)
        told.append(trajectory)

    async with serving(["hi"], on_finish=slow) as (gateway, _):
        gateway.open("r")
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = f"POST /rollouts/r/finish HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gateway.key}\r\n"
        writer.write(f"{head}Content-Length: 0\r\n\r\n".encode())
        await until(lambda: gateway.is_over("r"))
        writer.transport.abort()
        go.set()
    assert [one.rollout_id for one in told] == ["r"]
