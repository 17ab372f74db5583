"""Access to the gateway: a program reaches only the model of its own rollout, and web pages reach nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentfly.gateway.auth import bearer_token, is_same_key
from agentfly.policies.scripted import ScriptedPolicy

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def control_calls(root: str, rollout_id: str) -> list[tuple[str, str, Any]]:
    rollout = f"{root}/rollouts/{rollout_id}"
    return [
        ("POST", f"{rollout}/finish", {"reward": 1}),
        ("GET", rollout, None),
        ("DELETE", rollout, None),
        ("POST", f"{root}/rollouts", {"rollout_id": "of-my-own"}),
    ]


def model_calls(base_url: str) -> list[tuple[str, str, Any]]:
    return [("POST", f"{base_url}/chat/completions", {"messages": ASK}), ("GET", f"{base_url}/models", None)]


async def test_a_programs_key_is_good_for_the_model_in_its_own_rollout_and_for_nothing_else(serving: Any) -> None:
    async with serving(["hi"] * 9) as (gateway, _), httpx.AsyncClient() as http:
        mine, theirs = gateway.open("mine"), gateway.open("theirs")
        gateway.open("over")
        gateway.finish("over")
        for method, url, body in model_calls(mine.base_url):
            assert (await http.request(method, url, json=body, headers=bearer(mine.api_key))).status_code == 200
        for rollout_id in ("mine", "theirs", "over", "unknown"):
            for method, url, body in control_calls(gateway.url, rollout_id):
                answer = await http.request(method, url, json=body, headers=bearer(mine.api_key))
                assert answer.status_code in (401, 403), (method, url, answer.text)
                assert "harness" in answer.json()["error"]["message"]
        for base_url in (theirs.base_url, theirs.base_url.replace("theirs", "over"), f"{gateway.url}/rollouts/x/v1"):
            for method, url, body in model_calls(base_url):
                answer = await http.request(method, url, json=body, headers=bearer(mine.api_key))
                assert answer.status_code == 401, (method, url, answer.text)
        assert gateway.trajectory("theirs").turns == []
        assert len(gateway.finish("mine", reward=0.0).turns) == 1


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic {key}", "{key}", "Bearer {key}x"])
async def test_without_the_right_key_nothing_but_the_health_is_told(serving: Any, header: str | None) -> None:
    async with serving(["hi"]) as (gateway, _), httpx.AsyncClient() as http:
        end = gateway.open("r")
        for calls, key in ((control_calls(gateway.url, "r"), gateway.key), (model_calls(end.base_url), end.api_key)):
            for method, url, body in calls:
                headers = {} if header is None else {"Authorization": header.format(key=key)}
                answer = await http.request(method, url, json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert gateway.key not in answer.text
                assert end.api_key not in answer.text
        assert (await http.get(f"{gateway.url}/health")).json() == {"status": "ok", "policy_version": 0}
        assert gateway.trajectory("r").turns == []


async def test_the_harness_opens_and_reads_and_has_no_part_in_the_calls_of_programs(serving: Any) -> None:
    async with serving(["hi"]) as (gateway, _), httpx.AsyncClient() as http:
        end = gateway.open("r")
        for method, url, body in model_calls(end.base_url):
            assert (await http.request(method, url, json=body, headers=bearer(gateway.key))).status_code == 401
        *_, opens = control_calls(gateway.url, "r")
        assert (await http.request(opens[0], opens[1], json=opens[2], headers=bearer(gateway.key))).status_code == 201


async def test_a_finished_rollout_tells_its_own_program_so_and_nobody_else(serving: Any) -> None:
    async with serving(["hi"]) as (gateway, _), httpx.AsyncClient() as http:
        end = gateway.open("r")
        gateway.discard("r")
        method, url, body = model_calls(end.base_url)[0]
        for key, status in ((end.api_key, 409), ("another", 401)):
            assert (await http.request(method, url, json=body, headers=bearer(key))).status_code == status


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "unknown_host"),
        ({"Host": "evil.example:{port}"}, "unknown_host"),
        ({"Host": "localhost.evil.example"}, "unknown_host"),
        ({"Host": ""}, "unknown_host"),
        ({"Host": "127.0.0.1.evil.example"}, "unknown_host"),
        ({"Origin": "http://evil.example"}, "foreign_origin"),
        ({"Origin": "null"}, "foreign_origin"),
        ({"Origin": "http://127.0.0.1:1"}, "foreign_origin"),
        ({"Origin": "http://localhost:{port}"}, "foreign_origin"),
        ({"Host": "127.0.0.1:{port}"}, None),
        ({"Host": "localhost:{port}"}, None),
        ({"Host": "LOCALHOST."}, None),
        ({"Host": "[::1]:{port}"}, None),
        ({"Host": "10.1.2.3"}, None),
        ({"Host": "agents.internal:80"}, None),
        ({"Host": "gateway.example"}, None),
        ({"Origin": "http://127.0.0.1:{port}"}, None),
    ],
)
async def test_requests_of_web_pages_and_under_foreign_names_are_refused(
    serving: Any, headers: dict[str, str], code: str | None
) -> None:
    names = {"public_host": "agents.internal", "allowed_hosts": ["Gateway.example"]}
    async with serving(["hi"], port=0, **names) as (gateway, _), httpx.AsyncClient() as http:
        end = gateway.open("r")
        assert end.base_url == f"http://agents.internal:{gateway.port}/rollouts/r/v1"
        sent = {name: value.format(port=gateway.port) for name, value in headers.items()}
        root = f"http://127.0.0.1:{gateway.port}"
        rollout = f"{root}/rollouts/r"
        calls = [
            ("GET", f"{root}/health", "none"),
            ("POST", f"{rollout}/v1/chat/completions", end.api_key),
            ("GET", rollout, gateway.key),
        ]
        for method, url, key in calls:
            body = {"messages": ASK} if method == "POST" else None
            answer = await http.request(method, url, json=body, headers={**sent, **bearer(key)})
            if code is None:
                assert answer.status_code == 200, answer.text
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
        assert len(gateway.trajectory("r").turns) == (code is None)


async def test_by_default_it_listens_on_this_machine_alone(serving: Any) -> None:
    async with serving(["hi"]) as (gateway, _):
        assert gateway.host == "127.0.0.1"
        assert gateway.open("r").base_url.startswith("http://127.0.0.1:")


def test_keys_are_random_and_never_shown() -> None:
    from agentfly.gateway.gateway import Gateway

    first, second = Gateway(ScriptedPolicy([])), Gateway(ScriptedPolicy([]))
    assert first.key != second.key
    assert len(first.key) >= 40


async def test_an_endpoint_is_told_to_a_program_by_its_environment_and_does_not_print_its_key(serving: Any) -> None:
    async with serving(["hi"]) as (gateway, _):
        end = gateway.open("r")
    assert (end.environment["OPENAI_BASE_URL"], end.environment["OPENAI_API_KEY"]) == (end.base_url, end.api_key)
    assert end.api_key not in repr(end)


def test_a_key_is_read_from_one_header_of_its_scheme() -> None:
    assert bearer_token(["Bearer abc"]) == bearer_token(["bearer  abc "]) == "abc"
    assert bearer_token([]) == bearer_token(["abc"]) == bearer_token(["Bearer abc", "Bearer abc"]) == ""
    assert not is_same_key("", "key")
    assert not is_same_key("k\udceay", "key")
    assert is_same_key("key", "key")
