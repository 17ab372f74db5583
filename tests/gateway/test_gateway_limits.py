"""Limits of programs: an error names the exceeded limit, and no request blocks the event loop for long."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from typing import Any

import httpx
import pytest

import agentfly as af
from agentfly.core.trajectory import FinishReason
from agentfly.gateway import call_tree
from agentfly.policies.scripted import ByteTokenizer, ScriptedPolicy

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]


class Program:
    """Sends requests as they are."""

    def __init__(self, gateway: af.Gateway, http: httpx.AsyncClient, rollout_id: str = "r.0") -> None:
        self._http = http
        self._end = gateway.open(rollout_id)

    async def send(self, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._end.api_key}"}
        return await self._http.post(f"{self._end.base_url}/chat/completions", content=content, headers=headers)


def said(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


LIMITED = [
    ({"max_body_bytes": 1_000}, {"messages": [{"role": "user", "content": "x" * 2_000}]}, 413),
    ({"max_json_marks": 50}, {"messages": [{"role": "user", "content": ","}] * 30}, 413),
    ({"max_messages": 3}, {"messages": ASK * 4}, 400),
    ({"max_text_chars": 100}, {"messages": [{"role": "user", "content": "x" * 50}] * 3}, 400),
    ({"max_text_chars": 100}, {"messages": ASK, "tools": [{"function": {"name": "f", "description": "x" * 90}}]}, 400),
]


@pytest.mark.parametrize(("limits", "body", "status"), LIMITED, ids=[next(iter(one[0])) for one in LIMITED])
async def test_a_request_beyond_a_limit_is_refused_by_its_name_and_leaves_no_trace(
    serving: Any, limits: dict[str, int], body: Any, status: int
) -> None:
    async with serving(["hi"], limits=af.GatewayLimits(**limits)) as (gateway, _), httpx.AsyncClient() as http:
        program = Program(gateway, http)
        answer = await program.send(body)
        assert (answer.status_code, next(iter(limits)) in answer.text) == (status, True), answer.text
        assert (await program.send({"messages": ASK})).status_code == 200
        assert len(gateway.finish("r.0", reward=0.0).turns) == 1


class Counting(ByteTokenizer):
    """Counts what it renders and encodes, by thread, and how much of it at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.renders: Counter[threading.Thread] = Counter()
        self.characters = 0
        self.at_a_time = self.most_at_a_time = 0
        self._lock = threading.Lock()

    def apply_chat_template(self, messages: Any, **more: Any) -> str:
        with self._lock:
            self.at_a_time += 1
            self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
        try:
            self.renders[threading.current_thread()] += 1
            text = super().apply_chat_template(messages, **more)
            self.characters += len(text)
            return text
        finally:
            with self._lock:
                self.at_a_time -= 1


def counted() -> tuple[ScriptedPolicy, Counting]:
    policy, tokenizer = ScriptedPolicy(lambda prompt, turn: "hi"), Counting()
    policy.tokenizer = tokenizer
    return policy, tokenizer


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x"}] * 100_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 140_000}]},
        {"messages": ASK, "tools": [{"function": {"name": "f"}}] * 100_000},
        {"messages": ASK, "metadata": [[]] * 130_000},
    ],
    ids=["messages", "parts", "tools", "values nobody reads"],
)
async def test_a_request_of_very_many_values_is_refused_before_any_of_them_is_read(
    serving_any: Any, monkeypatch: pytest.MonkeyPatch, body: Any
) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("it was read")

    policy, tokenizer = counted()
    async with policy, serving_any(policy) as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        program = Program(gateway, http)
        before = tokenizer.characters
        monkeypatch.setattr("agentfly.gateway.chat_completions.requests.ChatCompletionRequest.read", never)
        assert "max_json_marks" in (await program.send(body)).text
    assert tokenizer.characters == before


async def test_text_that_cannot_fit_the_context_is_not_tokenized(serving_any: Any) -> None:
    policy, tokenizer = counted()
    policy.context_length = 1_000
    async with policy, serving_any(policy) as (gateway, _), httpx.AsyncClient() as http:
        program, before = Program(gateway, http), tokenizer.characters
        answer = await program.send(said("x" * 16_001))
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert tokenizer.characters == before
        assert (await program.send(said("x" * 10_000))).json()["error"]["code"] == "context_length_exceeded"
        assert tokenizer.characters > before


async def test_long_requests_are_rendered_on_threads_one_of_a_rollout_at_a_time_and_short_ones_on_the_loop(
    serving_any: Any,
) -> None:
    policy, tokenizer = counted()
    async with policy, serving_any(policy) as (gateway, _), httpx.AsyncClient(timeout=60) as http:
        program = Program(gateway, http)
        tokenizer.renders.clear()
        assert (await program.send(said("short"))).status_code == 200
        assert set(tokenizer.renders) == {threading.main_thread()}
        tokenizer.renders.clear()
        tokenizer.most_at_a_time = 0
        answers = await asyncio.gather(*(program.send(said(f"{n}" * 100_000)) for n in range(6)))
        assert {answer.status_code for answer in answers} == {200}
        assert threading.main_thread() not in tokenizer.renders
        assert tokenizer.most_at_a_time == 1
        trajectory = gateway.finish("r.0", reward=1.0)
    assert len(trajectory.turns) == 7
    assert sorted(len(sequence) for sequence in trajectory.sequences)[1:] > [100_000] * 6


async def test_finding_what_a_request_continues_takes_no_longer_for_a_long_record(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Counter[str]()
    inner = call_tree.same_message  # type: ignore[attr-defined]

    def counting(*messages: Any) -> bool:
        compared["messages"] += 1
        return inner(*messages)

    monkeypatch.setattr(call_tree, "same_message", counting)
    answers = Counter[str]()

    def script(prompt: str, turn: int) -> str:
        answers["all"] += 1
        return "the same"

    async with serving(script) as (gateway, _), httpx.AsyncClient() as http:
        program = Program(gateway, http)
        for number in range(40):
            await program.send(said("begin", "the same", f"way {number % 20}"))
        compared.clear()
        assert (await program.send(said("begin", "the same", "way 3", "the same", "on"))).status_code == 200
        assert compared["messages"] <= 4
        trajectory = gateway.finish("r.0", reward=1.0)
    assert trajectory.turns[-1].parent_turns in ((3,), (23,))


async def test_as_many_calls_at_a_time_are_answered_as_may_be(serving: Any) -> None:
    go = asyncio.Event()

    async def script(prompt: str, turn: int) -> str:
        await go.wait()
        return "hi"

    limits = af.GatewayLimits(max_concurrent_calls=2)
    async with serving(script, limits=limits) as (gateway, _), httpx.AsyncClient() as http:
        program, other = Program(gateway, http), Program(gateway, http, "other")
        calls = [asyncio.create_task(program.send(said(f"{n}"))) for n in range(3)]
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().result()
        assert (refused.status_code, "max_concurrent_calls" in refused.text) == (429, True)
        calls.append(asyncio.create_task(other.send(said("q"))))
        go.set()
        assert [(await call).status_code for call in (*waiting, calls[-1])] == [200] * 3
        assert (await program.send(said("q"))).status_code == 200, "there is room again"
        assert len(gateway.finish("r.0", reward=1.0).turns) == 3


async def test_the_length_of_all_requests_that_are_being_answered_is_bounded(serving: Any) -> None:
    go = asyncio.Event()

    async def script(prompt: str, turn: int) -> str:
        await go.wait()
        return "hi"

    limits = af.GatewayLimits(max_body_bytes=1_000, max_pending_bytes=1_500)
    async with serving(script, limits=limits) as (gateway, _), httpx.AsyncClient() as http:
        program = Program(gateway, http)
        calls = [asyncio.create_task(program.send(said("x" * 800))) for _ in range(2)]
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().result()
        assert (refused.status_code, "max_pending_bytes" in refused.text) == (429, True)
        go.set()
        assert (await waiting.pop()).status_code == 200


@pytest.mark.parametrize("limits", [{"max_calls": 2}, {"max_record_bytes": 3_000}], ids=["calls", "bytes"])
async def test_a_rollout_ends_where_its_record_may_not_grow_any_more(serving: Any, limits: dict[str, int]) -> None:
    async with serving(["hi"] * 9, limits=af.GatewayLimits(**limits)) as (gateway, _), httpx.AsyncClient() as http:
        program = Program(gateway, http)
        answers = [await program.send(said("x" * 20, *["hi", "on"] * n)) for n in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 400]
        assert (answers[-1].json()["error"]["code"], next(iter(limits)) in answers[-1].text) == ("rollout_full", True)
        trajectory = gateway.finish("r.0", reward=0.5)
    assert (trajectory.finish_reason, trajectory.reward, len(trajectory.turns)) == (FinishReason.MAX_TURNS, 0.5, 2)
    assert next(iter(limits)) in trajectory.notes[-1]


async def test_the_record_of_a_long_conversation_counts_each_of_its_tokens_once(serving: Any) -> None:
    limits = af.GatewayLimits(max_record_bytes=400_000)
    async with serving(lambda prompt, turn: "hi", limits=limits) as (gateway, _), httpx.AsyncClient() as http:
        program = Program(gateway, http)
        for turns in range(30):
            answer = await program.send(said("x" * 3_000, *["hi", "on"] * turns))
            assert answer.status_code == 200, answer.text
        (sequence,) = gateway.finish("r.0", reward=0.0).sequences
    assert len(sequence) > 3_000


async def test_a_body_that_does_not_arrive_is_not_waited_for(serving: Any) -> None:
    limits = af.GatewayLimits(max_body_seconds=0.05)
    async with serving(["hi"], limits=limits) as (gateway, _):
        end = gateway.open("r")
        head = (
            "POST /rollouts/r/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            f"Authorization: Bearer {end.api_key}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode() + b"{")
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"max_body_seconds" in answer
