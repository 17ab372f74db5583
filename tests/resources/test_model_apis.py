"""Model APIs in tools and rewards: specs, the resource in its engine, the judge, and secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import agentfly as af
from agentfly.core.errors import (
    APIMalformed,
    APIRateLimited,
    APIRefused,
    ConfigError,
    PrerequisiteError,
    ResourceDied,
    ResourceStartError,
    UsageError,
)
from agentfly.core.events import Event, EventStream
from agentfly.core.trajectory import save_trajectories
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.model_api.judge import read_score
from agentfly.resources.model_api.model_api import ModelAPI, ModelAPISpec
from agentfly.resources.model_api.responses import ChatCompletion
from agentfly.resources.spec import create_resource
from agentfly.testing import fake_openai_server as behaviour
from agentfly.testing.fake_openai_server import FakeOpenAIServer, error_reply, text_reply
from agentfly.testing.resource_conformance import check_resource

HELLO = [{"role": "user", "content": "hello"}]
SECRET = "sk-Sentinel/4711+="


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
async def far_side() -> AsyncIterator[FakeOpenAIServer]:
    async with FakeOpenAIServer() as side:
        yield side


@pytest.fixture
async def engine() -> AsyncIterator[ResourceEngine]:
    async with ResourceEngine() as opened:
        yield opened


async def api_of(engine: ResourceEngine, far_side: FakeOpenAIServer, **fields: Any) -> ModelAPI:
    lease = await engine.acquire(ModelAPISpec(base_url=far_side.url, model="m", **fields), "owner", scope="global")
    return lease.resource


# --- specs ----------------------------------------------------------------------------------------------------------


def spec_of(**fields: Any) -> ModelAPISpec:
    return ModelAPISpec(**{"base_url": "http://localhost:1/v1", "model": "m", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"base_url": "sandbox_url"},
        {"base_url": "https://<your endpoint>/v1"},
        {"model": ""},
        {"model": None},
        {"requests_per_minute": 0},
        {"tokens_per_minute": 1.5},
        {"max_concurrency": 0},
        {"retries": -1},
        {"call_timeout_s": 0},
        {"wait_timeout_s": float("inf")},
        {"connect_timeout_s": None},
        {"read_timeout_s": "5"},
        {"api_key_env": ""},
        {"api_key_env": 5},
        {"headers_env": "KEY"},
        {"headers_env": {"x": 5}},
        {"headers_env": [("x",)]},
        {"headers_env": {"a b": "KEY"}},
        {"headers_env": {"x\n": "KEY"}},
        {"headers_env": {"é": "KEY"}},
        {"headers_env": {"": "KEY"}},
        {"headers_env": {"Content-Length": "KEY"}},
        {"headers_env": [("x", "KEY"), ("X", 5)]},
        {"headers_env": {"Authorization": "KEY"}, "api_key_env": "KEY"},
        {"extra_body": "no JSON"},
        {"extra_body": [1]},
        {"extra_body": {"temperature": float("nan")}},
        {"extra_body": {"messages": []}},
        {"extra_body": {"call_timeout_s": 5}},
    ],
)
def test_a_field_that_cannot_be_is_refused_when_the_spec_is_made(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        spec_of(**fields)


@pytest.mark.parametrize("secret", ["sk-1234567890", "gsk_abcdefghijklmnopqrstuvwxyz1234", "Bearer x"])
def test_a_key_in_the_place_of_its_variable_is_refused_without_being_shown(secret):
    for fields in ({"api_key_env": secret}, {"headers_env": {"x": secret}}):
        with pytest.raises(ConfigError, match="name of an environment variable") as refused:
            spec_of(**fields)
        assert secret not in str(refused.value)


def test_specs_that_mean_the_same_are_one_and_any_difference_makes_two():
    one = spec_of(extra_body={"a": 1, "b": [2]}, headers_env={"x": "X", "a": "A"}, base_url="http://LOCALHOST:1/v1/")
    assert one == spec_of(extra_body='{"b": [2], "a": 1}', headers_env=(("a", "A"), ("x", "X")))
    assert len({one, spec_of(), spec_of(retries=1), spec_of(extra_body={"a": 1})}) == 4
    assert (one.parameters, one.label) == ({"a": 1, "b": [2]}, "api:m")


@pytest.mark.slow
async def test_model_apis_keep_the_contract_of_resources():
    await check_resource(spec_of(capacity=2))


# --- calls ----------------------------------------------------------------------------------------------------------


async def test_calls_send_what_the_spec_says_and_what_the_call_says_wins(engine, far_side):
    api = await api_of(engine, far_side, extra_body={"temperature": 0, "seed": 1})
    assert (await api.chat(HELLO, temperature=1)).text == "hello"
    assert far_side.requests[0].body == {"model": "m", "messages": HELLO, "temperature": 1, "seed": 1}


async def test_a_parameter_that_is_misspelled_is_not_sent_unless_the_spec_says_so(engine, far_side):
    api = await api_of(engine, far_side)
    with pytest.raises(UsageError, match=r"max_token is no parameter.*Did you mean 'max_tokens'\?.*extra_body"):
        await api.chat(HELLO, max_token=3)
    assert far_side.requests == []
    await api.chat(HELLO, top_k=3, thinking_budget=7)
    insistent = await api_of(engine, far_side, extra_body={"max_token": 3})
    await insistent.chat(HELLO)
    sent, insisted = (request.body for request in far_side.requests)
    assert (sent["top_k"], sent["thinking_budget"], insisted["max_token"]) == (3, 7, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda api: api.chat("hello"),
        lambda api: api.chat(None),
        lambda api: api.chat({"role": "user", "content": "hello"}),
        lambda api: api.chat([]),
        lambda api: api.chat(HELLO, max_tokens="many"),
        lambda api: api.chat(HELLO, max_tokens=[1]),
        lambda api: api.chat(HELLO, n=float("inf")),
        lambda api: api.chat(HELLO, call_timeout_s=5),
        lambda api: api.chat(endless()),
        lambda api: api.complete(None),
        lambda api: api.complete(["one", "another"]),
        lambda api: api.complete([1.5]),
        lambda api: api.score("a response", endless()),
        lambda api: api.score("a response", {(1, 2): 3}),
    ],
)
async def test_a_call_of_the_wrong_kind_is_an_error_of_its_writer_and_is_not_sent(engine, far_side, call):
    api = await api_of(engine, far_side)
    with pytest.raises(UsageError):
        await call(api)
    assert far_side.requests == []
    assert api.use().open_calls == 0


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


async def test_completions_go_on_from_text_and_from_token_ids(engine, far_side):
    far_side.default_reply = behaviour.raw_reply(200, {"choices": [{"text": " b", "token_ids": [7]}]})
    api = await api_of(engine, far_side)
    assert (await api.complete("a")).text == " b"
    assert (await api.complete([1, 2], max_tokens=1)).token_ids == (7,)
    assert [request.body["prompt"] for request in far_side.requests] == ["a", [1, 2]]


async def test_all_leases_of_an_endpoint_share_its_limits_whatever_pool_or_engine_they_are_of(engine, far_side):
    go = asyncio.Event()
    far_side.default_reply = behaviour.delayed_reply(go, text_reply("hello"))
    async with ResourceEngine() as other:
        apis = [
            await api_of(engine, far_side, max_concurrency=3),
            await api_of(engine, far_side, max_concurrency=3, retries=1),
            await api_of(other, far_side, max_concurrency=3),
        ]
        calls = [asyncio.create_task(api.chat(HELLO)) for api in apis for _ in range(5)]
        await far_side.wait_until(lambda: far_side.open == 3)
        assert [api.use().open_calls for api in apis] == [3, 3, 3]
        go.set()
        await asyncio.gather(*calls)
    assert far_side.max_open == 3


async def test_any_number_of_owners_share_one_instance(engine, far_side):
    spec = ModelAPISpec(base_url=far_side.url, model="m", max_concurrency=1)
    leases = [await engine.acquire(spec, f"owner {number}", scope="global", timeout=10) for number in range(30)]
    assert len({lease.instance for lease in leases}) == 1


@pytest.mark.slow
async def test_fifty_calls_that_are_cancelled_leave_nothing_open_on_either_side(engine, far_side):
    far_side.default_reply = behaviour.never_replies
    api = await api_of(engine, far_side, max_concurrency=50)
    calls = [asyncio.create_task(api.chat(HELLO)) for _ in range(50)]
    await far_side.wait_until(lambda: far_side.open == 50)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await far_side.wait_until(lambda: far_side.open == 0)
    assert api.use().open_calls == 0


async def test_failures_that_pass_cost_a_call_nothing_but_time(engine, far_side):
    again = {"retry_after_ms": "1"}
    far_side.script += [
        error_reply(429, **again),
        error_reply(429, retry_after="0"),
        error_reply(503, **again),
        error_reply(500, **again),
        text_reply("hello at last", usage=None),
    ]
    api = await api_of(engine, far_side)
    assert (await api.chat(HELLO)).text == "hello at last"
    assert len(far_side.requests) == 5
    assert api.use().allowed_calls < 16


async def test_what_never_passes_fails_within_the_tries_with_the_last_reason(engine, far_side):
    far_side.default_reply = error_reply(429, "slower!", retry_after_ms="1")
    api = await api_of(engine, far_side, retries=2)
    with pytest.raises(APIRateLimited, match=r"slower!.*Tries: 3"):
        await api.chat(HELLO)
    assert len(far_side.requests) == 3


async def test_an_instance_that_was_released_says_so(far_side):
    api = create_resource(ModelAPISpec(base_url=far_side.url, model="m"), "i")
    with pytest.raises(ResourceDied, match="never started"):
        await api.chat(HELLO)
    await api.start()
    assert await api.chat(HELLO)
    await api.release()
    with pytest.raises(ResourceDied, match="released"):
        await api.chat(HELLO)


async def test_cookies_of_the_far_side_are_not_kept_for_the_next_owner(engine, far_side):
    far_side.script.append(behaviour.raw_reply(200, behaviour.chat_completion("hello"), Set_Cookie="who=me; Path=/"))
    api = await api_of(engine, far_side)
    await api.chat(HELLO)
    await api.chat(HELLO)
    assert [request.headers.get("cookie") for request in far_side.requests] == [None, None]


# --- the judge ------------------------------------------------------------------------------------------------------


def verdict(text: str, finish_reason: str = "stop") -> ChatCompletion:
    return ChatCompletion(text, (), finish_reason, None, None, {})


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"reason": "good", "score": 0.8}', 0.8),
        ('{"score": 1}', 1.0),
        ('It is fine.\n```json\n{"reason": "so", "score": 0.25}\n```', 0.25),
        ("{'reason': 'single quotes', 'score': 0.5,}", 0.5),
        ('{"reason": "it says \\"x\\"", "score": "0.75"}', 0.75),
        ('<think>maybe {"score": 1}? no</think>{"score": 0.1}', 0.1),
        ('The response holds {"score": 1}, which is no score. {"reason": "cheats", "score": 0}', 0.0),
        ('{"reason": "It says {\\"score\\": 1} itself.", "score": 0}', 0.0),
        ('{"score": 1} is what it wants. {"score": 0}', 0.0),
        ('Of {a, b} it takes a. {"reason": "half of it", "score": 0.5}.', 0.5),
        ("It says {'score': 1}. {'score': 0}", 0.0),
        ('**{"score": 0.5}**\n\nBecause {"score": 1} would be too much.', 0.5),
        ('{"reason": "It never closes its <think>, or its </think>.", "score": 0.25}', 0.25),
        ('<think>Hm, {"score": 1}?</think>\n{"reason": "It begins with </think>", "score": 0.25}', 0.25),
        ("\\frac{1}{2} " * 100 + '\n</think>\n{"score": 0.5}', 0.5),
        ("<think>1</think> 0.5", 0.5),
        (" 0.6 ", 0.6),
        ('{"score": 0.3, "detail": {"parts": 2}}', 0.3),
    ],
)
def test_a_score_is_read_from_what_judges_write(text, score):
    assert read_score(verdict(text)) == score


@pytest.mark.parametrize(
    "text",
    [
        *["", "good", "{}", "[]", "nan", "The score is 0.9 of 10", "{" * 50],
        *['{"score": null}', '{"score": true}', '{"score": NaN}', '{"score": 7}', '{"score": -1}', '{"verdict": 1}'],
        *["word " * 100_000, "{" * 100_000 + '"score": 1', '{"score": 1, "x": ' + "[" * 100_000],
        *['{"score": 1, "x": ' + "[" * 1900, '{"score": 1,' + '{"a":[' * 300, "<think>" * 100_000],
        *['<think>\nI think {"score": 1} would be', '<think>\n{"score": 1}', "<think>1", '[THINK]\n{"score": 1}\n'],
        *['{"score": 1}\n</think>\nI cannot tell.', '{"score": 1}\n<think>Or rather', '<reasoning>{"score": 1}'],
        *['I think {"score": 1} would be', 'It wrote {"score": 1} in a line,\nand no more.', '{"score": 1} {'],
        *['{"score": 1', '{"score": 1, "score": 0}', "{score: 1}", '{"reason": "says "hi"", "score": 1}', "0_1"],
        *['{"reason": "no", oops {"score": 1}}', '{"reason": "x", "score": 1 0}', '{"score": "0_1"}'],
        *['{"score": "8/10"}', '{"score": 1e999}', '{"a": ' * 5000],
    ],
)
def test_what_is_no_score_is_never_taken_for_one(text):
    with pytest.raises(APIMalformed):
        read_score(verdict(text))


def test_a_verdict_that_was_cut_is_no_score():
    with pytest.raises(APIMalformed, match="cut off"):
        read_score(verdict('{"reason": "right", "score": 0.', "length"))


async def test_a_judge_that_gives_no_score_is_asked_again(engine, far_side):
    far_side.script += [text_reply("Very good!"), text_reply('{"score": NaN}'), text_reply('{"score": 0.8}')]
    api = await api_of(engine, far_side)
    assert await api.score("a response", 42, question="6*7?", rubric="Is it {right}?") == 0.8
    first, second, _ = (request.body["messages"] for request in far_side.requests)
    assert json.loads(first[1]["content"]) == {"question": "6*7?", "answer": 42, "response": "a response"}
    assert "Is it {right}?" in first[0]["content"]
    assert second[2] == {"role": "assistant", "content": "Very good!"}


async def test_a_judge_that_never_gives_a_score_is_an_outage_and_no_zero(engine, far_side):
    far_side.default_reply = text_reply("Very good!")
    api = await api_of(engine, far_side)
    with pytest.raises(APIMalformed) as failed:
        await api.score("a response")
    assert not failed.value.by_policy
    assert len(far_side.requests) == 3


@pytest.mark.parametrize(
    ("script", "always", "reward", "kind"),
    [
        ([error_reply(429, retry_after_ms="1")] * 2, text_reply('{"score": 0.8}'), 0.8, None),
        ([], error_reply(500, retry_after="0"), None, "APIUnavailable"),
        ([], behaviour.raw_reply(200, b"<html>"), None, "APIMalformed"),
        ([], text_reply("Very good!"), None, "APIMalformed"),
        ([], error_reply(401), None, "APIRefused"),
    ],
)
async def test_a_judge_scores_or_leaves_unscored(far_side, script, always, reward, kind):
    far_side.script += script
    far_side.default_reply = always
    spec = ModelAPISpec(base_url=far_side.url, model="m", retries=2)

    @af.reward
    async def judged(response: str, answer: str, context: af.Context) -> float:
        if answer == "sound":
            return 1.0
        judge = await context.acquire(spec, scope="global")
        return await judge.score(response, answer)

    result = await af.run(
        af.Agent(model="scripted", tools=[]),
        [{"prompt": "6*7?", "answer": "42"}, {"prompt": "5*8?", "answer": "sound"}],
        reward=judged,
        policy=af.ScriptedPolicy(["It is 42."]),
        max_failure_rate=1.0,
    )
    trajectory, sound = sorted(result.trajectories, key=lambda one: one.task["answer"])
    assert sound.reward == 1.0
    assert trajectory.reward == reward
    failure = trajectory.reward_failure
    assert (failure and failure.kind, failure and failure.by_policy) == (kind, None if kind is None else False)


# --- what nobody may see --------------------------------------------------------------------------------------------


async def test_a_missing_key_is_named_before_anything_is_sent(engine, far_side):
    for fields in ({"api_key_env": "NO_SUCH_KEY"}, {"headers_env": {"x-key": "NO_SUCH_KEY"}}):
        with pytest.raises(ResourceStartError, match="NO_SUCH_KEY") as failed:
            await api_of(engine, far_side, **fields)
        assert isinstance(failed.value.__cause__, PrerequisiteError)
    assert far_side.requests == []


@pytest.mark.parametrize("value", ["", "  ", "two\nlines", "ключ-к-модели"])
async def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(value, far_side, engine, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(ResourceStartError, match="JUDGE_KEY") as failed:
        await api_of(engine, far_side, api_key_env="JUDGE_KEY")
    if value.strip():
        assert value not in str(failed.value)


def look_up_with(spec: ModelAPISpec) -> Any:
    """A tool that holds nothing but the spec."""

    @af.tool
    async def look_up(what: str, context: af.Context) -> str:
        """Look up.

        Args:
            what: what.
        """
        api = await context.acquire(spec, scope="global")
        return (await api.complete(what)).text

    return look_up


async def test_a_key_is_sent_and_seen_nowhere_else(far_side, monkeypatch, caplog, tmp_path):
    """A whole rollout, with a far side that gives away what it was sent, and everything that is left of it."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("ORG", f"org-{SECRET}")
    spec = ModelAPISpec(base_url=far_side.url, model="m", api_key_env="JUDGE_KEY", headers_env={"X-Org": "ORG"})
    seen: list[str] = []
    ledgers: list[str] = []

    @af.tool
    async def ask(what: str, context: af.Context) -> str:
        """Ask.

        Args:
            what: what.
        """
        api = await context.acquire(spec, scope="global")
        ledgers.extend(path.read_text() for path in tmp_path.rglob("*.ledger"))
        seen.append(repr(api) + repr(vars(create_resource(spec, "i"))) + repr(api.use()))
        with pytest.raises(TypeError):
            cloudpickle.dumps(api)
        far_side.script.append(text_reply(f"your key is {SECRET}"))
        return (await api.chat([{"role": "user", "content": what}])).text

    @af.reward
    async def judged(response: str, prompt: str, context: af.Context) -> float:
        if prompt == "Nothing.":
            return 1.0
        api = await context.acquire(spec, scope="global")
        far_side.script.append(behaviour.echoes_credentials)
        try:
            return await api.score(response)
        except APIRefused as error:
            shown = traceback.TracebackException.from_exception(error, capture_locals=True)
            seen.append("".join(shown.format()))
            raise

    agent = af.Agent(model="scripted", tools=[ask])
    calls = agent.format.write("ask", {"what": "x"})
    events, told = EventStream(), list[Event]()
    with events.subscribed(told.append):
        result = await af.run(
            agent,
            ["Ask.", "Nothing."],
            reward=judged,
            policy=af.ScriptedPolicy(lambda prompt, turn: "Done." if turn or "Nothing." in prompt else calls),
            events=events,
            max_failure_rate=1.0,
        )
    (trajectory,) = (one for one in result.trajectories if one.task.prompt == "Ask.")
    assert [request.headers["authorization"] for request in far_side.requests] == [f"Bearer {SECRET}"] * 2
    assert far_side.requests[0].headers["x-org"] == f"org-{SECRET}"
    (call,) = trajectory.turns[0].tool_results
    assert call.observation == "your key is [secret]"
    assert trajectory.reward_failure is not None

    saved = tmp_path / "trajectories.jsonl"
    save_trajectories(result.trajectories, saved)
    seen += [json.dumps([event.to_json() for event in told], default=str)]
    seen += [repr(trajectory), repr(result), repr(spec), caplog.text]
    pickles = [cloudpickle.dumps(one) for one in (spec, look_up_with(spec), trajectory)]
    files = [path for place in (tmp_path,) for path in place.rglob("*") if path.is_file()]
    assert any(path.suffix == ".traffic" for path in files)
    assert any('"kind": "api"' in text for text in ledgers)
    for text in [*seen, *ledgers]:
        assert SECRET not in text
        assert "Sentinel" not in text
    for data in [*pickles, *(path.read_bytes() for path in files), *(str(path).encode() for path in files)]:
        assert b"Sentinel" not in data
