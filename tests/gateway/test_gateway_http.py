"""The gateway over HTTP: what it refuses, what fails behind it, and what programs ask besides answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError

import agentfly as af
from agentfly.errors import ConfigError, PolicyError, UsageError
from agentfly.policies.openai import OpenAIPolicy
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.training.rows import untrainable_cause

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
ANSWER = "It is 3."
PNG = af.Image(b"picture", "image/png").url


async def say(client: Any, messages: list[Any], **more: Any) -> Any:
    return (await client.chat.completions.create(model="any", messages=messages, **more)).choices[0]


REFUSED = [
    ({"n": 2}, "n"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
]


@pytest.mark.parametrize(("parameters", "param"), REFUSED, ids=[json.dumps(one) for one, _ in REFUSED])
async def test_what_cannot_be_done_is_refused_clearly(serving: Any, parameters: dict[str, Any], param: str) -> None:
    async with serving([ANSWER]) as (_, client):
        with pytest.raises(BadRequestError) as caught:
            await client().chat.completions.create(**{"model": "m", "messages": ASK, **parameters})
        harmless = {"n": 1, "presence_penalty": 0, "user": "me", "metadata": {}, "seed": 1, "store": False}
        assert (await say(client(), ASK, **harmless)).message.content == ANSWER
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "poet", "content": "x"}], "poet"),
        ([*ASK, {"role": "assistant", "content": "I"}], "last message"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}], "data URLs"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input_audio"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}], "sees no images"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}], "'f'"),
    ],
)
async def test_messages_that_cannot_be_read_are_told(serving: Any, messages: Any, told: str) -> None:
    async with serving([ANSWER]) as (gateway, client):
        with pytest.raises(BadRequestError, match=told):
            await say(client(), messages)
        assert gateway.finish("r.0").turns == []


async def test_a_conversation_too_long_is_told_as_openai_tells_it_and_not_recorded(serving: Any) -> None:
    async with serving([ANSWER], context_length=60) as (gateway, client):
        talk = client()
        with pytest.raises(BadRequestError) as caught:
            await say(talk, [{"role": "user", "content": "x" * 100}])
        assert caught.value.code == "context_length_exceeded"
        await say(talk, ASK)
        trajectory = gateway.finish("r.0", reward=0)
    assert len(trajectory.turns) == 1
    assert trajectory.trainable


async def test_a_policy_that_fails_spoils_the_rollout_unless_the_program_asks_again(serving: Any) -> None:
    failing = True

    def script(prompt: str, turn: int) -> str:
        if failing:
            raise PolicyError("the GPU fell off")
        return ANSWER

    async with serving(script) as (gateway, client):
        for rollout_id in ("spoiled", "mended"):
            failing = True
            with pytest.raises(APIStatusError, match="GPU fell off") as caught:
                await say(client(rollout_id), ASK)
            assert caught.value.status_code == 500
            failing = False
            if rollout_id == "mended":
                await say(client(rollout_id), ASK)
        spoiled, mended = (gateway.finish(name, reward=1) for name in ("spoiled", "mended"))
    assert untrainable_cause(spoiled) == "infrastructure"
    assert spoiled.failure is not None
    assert spoiled.failure.kind == "PolicyError"
    assert untrainable_cause(mended) is None


async def test_a_stream_that_fails_late_says_so_in_the_stream(serving: Any) -> None:
    async def script(prompt: str, turn: int) -> str:
        await asyncio.sleep(0.2)
        raise PolicyError("the GPU fell off")

    async with serving(script) as (gateway, client):
        with pytest.raises(Exception, match="GPU fell off"):
            async for _ in await client().chat.completions.create(model="m", messages=ASK, stream=True):
                pass
        assert gateway.finish("r.0").infrastructure_failed


async def test_requests_have_bounds_and_errors_have_openais_shape(serving: Any) -> None:
    async with serving([ANSWER], max_body_bytes=1000, max_rollouts=2) as (gateway, client), httpx.AsyncClient() as http:
        url = f"{gateway.url('r.0')}/chat/completions"
        for body, status in ((b"x" * 2000, 413), (b"junk", 400), (b"[]", 400), (b"", 400), (b"[" * 900, 400)):
            answer = await http.post(url, content=body)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        for wrong, status in (("/embeddings", 404), ("/models?x=%00", 200), ("/../../../nothing", 404)):
            assert (await http.get(gateway.url("r.0") + wrong)).status_code == status
        assert (await http.get(url)).status_code == 405
        assert (await http.post(url.replace("r.0", "a%20b"), json={"messages": ASK})).status_code == 400
        for rollout_id in ("r.0", "r.1"):
            await say(client(rollout_id), ASK)
        with pytest.raises(APIStatusError, match="max_rollouts") as caught:
            await say(client("r.2"), ASK)
        assert caught.value.status_code == 429


async def test_a_program_that_is_given_the_gateways_root_is_told_the_right_address(serving: Any) -> None:
    async with serving([ANSWER]) as (gateway, _), httpx.AsyncClient() as http:
        root = gateway.url("r.0").partition("/rollouts")[0]
        for answer in (
            await http.post(f"{root}/v1/chat/completions", json={"messages": ASK}),
            await http.post(f"{root}/chat/completions", json={"messages": ASK}),
            await http.get(f"{root}/v1/models"),
        ):
            assert answer.status_code == 404
            assert gateway.url("ID") in answer.json()["error"]["message"]


async def test_what_users_do_wrong_is_told(serving: Any) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        af.Gateway(OpenAIPolicy("http://localhost:1/v1", "m"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not open"):
        af.Gateway(ScriptedPolicy([])).url("r")
    async with serving([ANSWER]) as (gateway, _):
        with pytest.raises(UsageError, match="no id of a rollout"):
            gateway.url("a/b")
        with pytest.raises(UsageError, match="finite"):
            gateway.finish("r", reward=float("nan"))
        gateway.finish("r", reward=0)
        with pytest.raises(UsageError, match="finished already"):
            gateway.finish("r")
        with pytest.raises(UsageError, match="No rollout"):
            gateway.trajectory("r")


async def test_the_token_is_asked_for_by_all_but_the_health(serving: Any) -> None:
    async with serving([ANSWER], token="sesame") as (gateway, client):
        with pytest.raises(APIStatusError) as caught:
            await say(client(), ASK)
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
        talk = client().with_options(api_key="sesame")
        assert (await say(talk, ASK)).message.content == ANSWER
        assert [model.id async for model in talk.models.list()] == ["agentfly"]
        base = gateway.url("r.0").partition("/rollouts")[0]
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{base}/health")).json()["status"] == "ok"
            assert (await http.get(f"{base}/rollouts/r.0")).status_code == 401


async def test_a_trajectory_is_returned_though_whoever_was_to_be_told_of_it_fails(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(trajectory: af.Trajectory) -> None:
        raise OSError("no space left")

    async with serving([ANSWER], on_finish=fails) as (gateway, client):
        await say(client("r.0"), ASK)
        assert gateway.finish("r.0", reward=1.0).reward == 1.0
    assert "no space left" in caplog.text


async def test_programs_in_other_languages_finish_by_http(serving: Any) -> None:
    told: list[af.Trajectory] = []
    async with serving([ANSWER], on_finish=told.append) as (gateway, client), httpx.AsyncClient() as http:
        rollout = gateway.url("r.3").removesuffix("/v1")
        assert (await http.get(rollout)).status_code == 404
        await say(client("r.3"), ASK)
        begun = (await http.get(rollout)).json()
        assert [turn["text"] for turn in begun["turns"]] == [ANSWER]
        for wrong in ({"reward": "much"}, {"rewards": 1}, {"task": {"no": "prompt"}}):
            assert (await http.post(f"{rollout}/finish", json=wrong)).status_code == 400
        body = {"reward": 0.5, "task": {"prompt": "1+2?", "answer": 3}, "metrics": {"steps": 2}}
        finished = af.Trajectory.from_json((await http.post(f"{rollout}/finish", json=body)).json())
        assert (await http.post(f"{rollout}/finish", json=body)).status_code == 400
        await say(client("r.4"), ASK)
        assert (await http.delete(gateway.url("r.4").removesuffix("/v1"))).status_code == 204
        broken = (await http.post(gateway.url("r.5").replace("/v1", "/finish"), json={"error": "no such file"})).json()
    assert (finished.reward, finished.group_id, finished.attempt) == (0.5, "r", 3)
    assert (finished.task["answer"], finished.metrics) == (3, {"steps": 2.0})
    assert [one.rollout_id for one in told] == ["r.3", "r.5"]
    assert told[0].sequences == finished.sequences
    assert untrainable_cause(af.Trajectory.from_json(broken)) == "infrastructure"


@pytest.mark.parametrize(
    "message",
    [
        {"role": ["user"], "content": "x"},
        {"role": {}, "content": "x"},
        {"role": "assistant", "content": "x", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": "\\ud800"}'}}]},
    ],
    ids=["list", "mapping", "number", "half a character"],
)
async def test_messages_of_the_wrong_shape_are_refused_and_never_called_a_fault_of_the_machine(
    serving: Any, message: Any
) -> None:
    async with serving([ANSWER]) as (gateway, _), httpx.AsyncClient() as http:
        answer = await http.post(gateway.url("r.0") + "/chat/completions", json={"messages": [message, *ASK]})
    assert answer.status_code == 400, "clients send again what is answered with a 500"
