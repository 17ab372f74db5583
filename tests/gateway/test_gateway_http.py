"""The gateway over HTTP: refused requests, failures behind it, and its other routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError

import agentfly as af
from agentfly.core.errors import ConfigError, PolicyError, UsageError
from agentfly.policies.openai import OpenAIPolicy
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.training.rows import exclusion_cause

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
ANSWER = "It is 3."
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
NO_PNG = af.Image(b"picture", "image/png").url


async def say(client: Any, messages: list[Any], **more: Any) -> Any:
    return (await client.chat.completions.create(model="any", messages=messages, **more)).choices[0]


REFUSED = [
    ({"n": 2}, "n"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"extra_body": {"structured_outputs": {"json": {"type": "object"}}}}, "structured_outputs"),
    ({"extra_body": {"guided_choice": ["yes", "no"]}}, "guided_choice"),
    ({"extra_body": {"stop_token_ids": [7]}}, "stop_token_ids"),
    ({"extra_body": {"chat_template": "{{ messages }}"}}, "chat_template"),
    ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs"),
    ({"extra_body": {"echo": True}}, "echo"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]}, "tools"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"seed": 2**70}, "seed"),
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
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG[:-20]}}]}],
            "cannot be read as a picture",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": NO_PNG}}]}], "holds no picture"),
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
    assert exclusion_cause(spoiled) == "infrastructure"
    assert spoiled.failure is not None
    assert spoiled.failure.kind == "PolicyError"
    assert exclusion_cause(mended) is None


async def test_a_stream_that_fails_late_says_so_in_the_stream(serving: Any) -> None:
    async def script(prompt: str, turn: int) -> str:
        await asyncio.sleep(0.2)
        raise PolicyError("the GPU fell off")

    async with serving(script) as (gateway, client):
        with pytest.raises(Exception, match="GPU fell off"):
            async for _ in await client().chat.completions.create(model="m", messages=ASK, stream=True):
                pass
        assert gateway.finish("r.0").infrastructure_failed


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_errors_have_openais_shape(serving: Any) -> None:
    async with serving([ANSWER]) as (gateway, _), httpx.AsyncClient() as http:
        end = gateway.open("r.0")
        http.headers.update(bearer(end.api_key))
        url = f"{end.base_url}/chat/completions"
        for body, status in ((b"junk", 400), (b"[]", 400), (b"", 400), (b"[" * 900, 400)):
            answer = await http.post(url, content=body)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        for wrong, status in (("/embeddings", 404), ("/models?x=%00", 200), ("/../../../nothing", 404)):
            assert (await http.get(end.base_url + wrong)).status_code == status
        assert (await http.get(url)).status_code == 405
        assert (await http.post(url.replace("r.0", "a%20b"), json={"messages": ASK})).status_code == 401
        assert (await http.post(url, content=b"{}", headers={"Content-Encoding": "gzip"})).status_code == 415


async def test_a_program_that_is_given_the_gateways_root_is_told_the_right_address(serving: Any) -> None:
    async with serving([ANSWER]) as (gateway, _), httpx.AsyncClient() as http:
        root = gateway.url
        for answer in (
            await http.post(f"{root}/v1/chat/completions", json={"messages": ASK}),
            await http.post(f"{root}/chat/completions", json={"messages": ASK}),
            await http.get(f"{root}/v1/models"),
        ):
            assert answer.status_code == 404
            assert f"{gateway.url}/rollouts/ID/v1" in answer.json()["error"]["message"]


async def test_what_users_do_wrong_is_told(serving: Any) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        af.Gateway(OpenAIPolicy("http://localhost:1/v1", "m"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="visible ASCII"):
        af.Gateway(ScriptedPolicy([]), key="two words")
    with pytest.raises(ConfigError, match="max_messages"):
        af.GatewayLimits(max_messages=0)
    with pytest.raises(ConfigError, match="top_p"):
        af.RolloutSampling(top_p=0)
    with pytest.raises(UsageError, match="not open"):
        af.Gateway(ScriptedPolicy([])).open("r")
    async with serving([ANSWER], limits=af.GatewayLimits(max_open_rollouts=1)) as (gateway, _):
        with pytest.raises(UsageError, match="not a valid id of a rollout"):
            gateway.open("a/b")
        gateway.open("r")
        with pytest.raises(UsageError, match="open already"):
            gateway.open("r")
        with pytest.raises(UsageError, match="max_open_rollouts"):
            gateway.open("another")
        with pytest.raises(UsageError, match="finite"):
            gateway.finish("r", reward=float("nan"))
        gateway.finish("r", reward=0)
        with pytest.raises(UsageError, match="finished already"):
            gateway.finish("r")
        with pytest.raises(UsageError, match="over already"):
            gateway.open("r")
        with pytest.raises(UsageError, match="not open"):
            gateway.trajectory("q")


async def test_a_trajectory_is_returned_though_whoever_was_to_be_told_of_it_fails(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(trajectory: af.Trajectory) -> None:
        raise OSError("no space left")

    async with serving([ANSWER], on_finish=fails) as (gateway, client):
        await say(client("r.0"), ASK)
        assert gateway.finish("r.0", reward=1.0).reward == 1.0
    assert "no space left" in caplog.text


NO_NUMBERS = (
    {"reward": "1"},
    {"reward": True},
    {"metrics": {"steps": "2"}},
    {"metrics": {"ok": True}},
    {"attempt": "1"},
)


async def test_the_end_of_a_rollout_is_answered_once_more_as_long_as_it_is_kept(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentfly.gateway.http_server.KEPT_ANSWERS", 2)
    told: list[af.Trajectory] = []
    async with serving([], on_finish=told.append, key="sesame") as (gateway, _), httpx.AsyncClient() as http:
        http.headers.update(bearer("sesame"))

        async def finish(rollout_id: str) -> tuple[int, Any]:
            answer = await http.post(f"{gateway.url}/rollouts/{rollout_id}/finish", json={})
            return answer.status_code, answer.json()

        names = ("a", "b", "c")
        for name in (*names, "here"):
            gateway.open(name)
        gateway.finish("here")
        first = {name: await finish(name) for name in names}
        again = {name: await finish(name) for name in (*names, "here")}
        unknown = await finish("nothing")
    assert [again[name] for name in ("b", "c")] == [first[name] for name in ("b", "c")]
    for name in ("a", "here"):
        assert (again[name][0], again[name][1]["error"]["code"]) == (409, "finished")
    assert [one.rollout_id for one in told] == ["here", "a", "b", "c"]
    assert unknown[0] == 400


async def test_harnesses_in_other_languages_open_and_finish_by_http(serving: Any) -> None:
    told: list[af.Trajectory] = []
    async with serving([ANSWER], on_finish=told.append, key="sesame") as (gateway, _), httpx.AsyncClient() as http:
        http.headers.update(bearer("sesame"))

        async def begun(rollout_id: str, **more: Any) -> tuple[str, dict[str, Any]]:
            answer = await http.post(f"{gateway.url}/rollouts", json={"rollout_id": rollout_id, **more})
            assert answer.status_code == 201, answer.text
            return f"{gateway.url}/rollouts/{rollout_id}", answer.json()

        assert (await http.get(f"{gateway.url}/rollouts/r.3")).status_code == 404
        rollout, end = await begun("r.3")
        call: dict[str, Any] = {"json": {"messages": ASK}, "headers": bearer(end["api_key"])}
        assert (await http.post(f"{end['base_url']}/chat/completions", **call)).status_code == 200
        assert [turn["text"] for turn in (await http.get(rollout)).json()["turns"]] == [ANSWER]
        for wrong in ({"reward": "much"}, {"rewards": 1}, {"task": {"no": "prompt"}}, *NO_NUMBERS):
            assert (await http.post(f"{rollout}/finish", json=wrong)).status_code == 400
        body = {"reward": 0.5, "task": {"prompt": "1+2?", "answer": 3}, "metrics": {"steps": 2}}
        first = await http.post(f"{rollout}/finish", json=body)
        finished = af.Trajectory.from_json(first.json())
        again = await http.post(f"{rollout}/finish", json=body)
        assert (again.status_code, again.json()) == (200, first.json())
        other = await http.post(f"{rollout}/finish", json={**body, "reward": 1})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "finished")
        discarded, _ = await begun("r.4")
        assert (await http.delete(discarded)).status_code == 204
        failed, _ = await begun("r.5", sampling={"temperature": 0.5})
        broken = (await http.post(f"{failed}/finish", json={"error": "no such file"})).json()
        for body in ({"rollout_id": "r.5"}, {"rollout_id": "a b"}, {}, {"rollout_id": "x", "sampling": {"top_p": 7}}):  # type: ignore[assignment]
            assert (await http.post(f"{gateway.url}/rollouts", json=body)).status_code == 400
    assert (finished.reward, finished.group_id, finished.attempt) == (0.5, "r", 3)
    assert (finished.task["answer"], finished.metrics) == (3, {"steps": 2.0})
    assert [one.rollout_id for one in told] == ["r.3", "r.5"]
    assert told[0].sequences == finished.sequences
    assert exclusion_cause(af.Trajectory.from_json(broken)) == "infrastructure"


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
        end = gateway.open("r.0")
        url, headers = f"{end.base_url}/chat/completions", bearer(end.api_key)
        answer = await http.post(url, json={"messages": [message, *ASK]}, headers=headers)
    assert answer.status_code == 400, "clients send again what is answered with a 500"
