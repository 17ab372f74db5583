"""OpenAIPolicy with a real HTTP server that gives valid and invalid answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentfly as af
from agentfly.core.errors import (
    APIMalformed,
    APIRefused,
    APIUnavailable,
    ConfigError,
    PolicyError,
    PromptTooLong,
    TokenInvariantError,
    UsageError,
)
from agentfly.core.messages import Message
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.openai import OpenAIPolicy
from agentfly.policies.policy import ChatGeneration, ChatPolicy, SamplingParams
from agentfly.testing.fake_openai_server import (
    FakeOpenAIServer,
    chat_completion,
    error_reply,
    never_replies,
    raw_reply,
    text_reply,
)
from agentfly.training.rows import exclusion_cause

ASK: list[Message] = [{"role": "user", "content": "6*7?"}]
TOOL = {"type": "function", "function": {"name": "calc", "description": "d", "parameters": {"type": "object"}}}
VLLM = raw_reply(200, {"data": [{"id": "served", "owned_by": "vllm"}]})
PNG = af.Image(b"png", "image/png")


def answers(message: dict[str, Any], finish: str = "stop", **more: Any) -> Any:
    body = chat_completion(message.pop("content", None), **message)
    body["choices"][0] |= {"finish_reason": finish, **more.pop("choice", {})}
    return raw_reply(200, {**body, **more})


def calls(*arguments: str, name: str = "calc", call_id: str = "c1") -> dict[str, Any]:
    return {
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}} for text in arguments
        ]
    }


async def ask(
    far_side: FakeOpenAIServer, *script: Any, messages: list[Message] | None = None, tools: Any = (), **settings: Any
) -> ChatGeneration:
    sampling = settings.pop("sampling", SamplingParams(max_tokens=50))
    far_side.script += script
    async with OpenAIPolicy(far_side.url, "m", **{"token_ids": False, "retries": 0, **settings}) as policy:
        assert isinstance(policy, ChatPolicy)
        return await policy.chat(messages or ASK, tools, sampling, rollout_id="r")


async def test_a_conversation_goes_out_as_openai_writes_it_and_the_answer_comes_back() -> None:
    conversation: list[Message] = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "image": PNG}]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "calc", "arguments": {"x": "é"}}}],
        },
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [{"type": "text", "text": "4"}, {"type": "image", "image": PNG}],
        },
        {"role": "tool", "tool_call_id": "b", "content": "5"},
    ]
    sampling = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, seed=3, max_tokens=50)
    async with FakeOpenAIServer() as far_side:
        said = await ask(
            far_side,
            answers({"content": "42", "reasoning_content": "six times seven"}),
            messages=conversation,
            tools=[TOOL],
            sampling=sampling,
        )
    expected = ChatGeneration("42", (), "stop", 0, "six times seven", prompt_tokens=3, sampled_tokens=2)
    assert said == expected
    (request,) = far_side.requests
    sent = request.body
    image = {"type": "image_url", "image_url": {"url": PNG.url}}
    assert sent["messages"][0]["content"] == [{"type": "text", "text": "look"}, image]
    assert sent["messages"][1]["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"x": "é"}'}
    assert "reasoning_content" not in sent["messages"][1]
    assert [message["content"] for message in sent["messages"][2:]] == ["4", "5", [image]], "images after all results"
    assert sent["tools"] == [TOOL]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["seed"], sent["max_tokens"]) == (0.5, 0.9, 5, 3, 50)


@pytest.mark.parametrize(
    "text", ["null", "[1,2]", '"x"', '{"x":NaN}', '{"x": 1', "junk" * 12_000, "[" * 100_000], ids=lambda text: text[:9]
)
async def test_arguments_that_are_no_object_are_told_to_the_model(text: str) -> None:
    async with FakeOpenAIServer() as far_side:
        said = await ask(far_side, answers(calls(text), "tool_calls"), tools=[TOOL])
    (call,) = said.calls
    assert (call.id, call.name, call.arguments) == ("c1", "calc", None)
    assert call.error is not None
    assert "not a JSON object" in call.error
    assert len(call.error) < 1200


async def test_parallel_calls_keep_their_order() -> None:
    async with FakeOpenAIServer() as far_side:
        said = await ask(far_side, answers(calls('{"x": 1}', "", '{"x": {"y": [3]}}'), "tool_calls"), tools=[TOOL])
    assert [call.arguments for call in said.calls] == [{"x": 1}, {}, {"x": {"y": [3]}}]


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_a_cut_turn_makes_no_call(reason: str) -> None:
    async with FakeOpenAIServer() as far_side:
        said = await ask(far_side, answers(calls('{"x": 1}'), reason), tools=[TOOL])
    assert (said.finish_reason, said.calls) == ("length", ())


TOO_LONG = [
    (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"),
    (400, "the request exceeds the available context size, try increasing it"),
    (422, "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000"),
    (400, "prompt is too long: 210000 tokens > 200000 maximum"),
    (400, "max_tokens=100000 cannot be greater than max_model_len=1024. Please request fewer output tokens."),
    (413, "no"),
]


@pytest.mark.parametrize(("status", "message"), TOO_LONG)
async def test_what_is_too_long_for_the_context_is_the_policys_doing(status: int, message: str) -> None:
    async with FakeOpenAIServer() as far_side:
        with pytest.raises(PromptTooLong) as caught:
            await ask(far_side, error_reply(status, message), error_reply(status, message))
    assert caught.value.by_policy
    assert ["max_tokens" in request.body for request in far_side.requests] == [True, False]


async def test_where_only_the_limit_is_too_much_the_answer_takes_the_rest() -> None:
    async with FakeOpenAIServer() as far_side:
        said = await ask(far_side, error_reply(400, TOO_LONG[0][1]), text_reply("short"))
    assert said.content == "short"


async def test_newer_models_get_the_limit_under_its_newer_name_from_then_on() -> None:
    refusal = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    async with FakeOpenAIServer() as far_side, OpenAIPolicy(far_side.url, "m", token_ids=False) as policy:
        far_side.script += [error_reply(400, refusal), text_reply("a"), text_reply("b")]
        for _ in range(2):
            await policy.chat(ASK, (), SamplingParams(max_tokens=9), rollout_id="r")
    assert [request.body.get("max_completion_tokens") for request in far_side.requests] == [None, 9, 9]


async def test_failures_of_the_far_side_are_infrastructure_and_told_apart() -> None:
    async with FakeOpenAIServer() as far_side:
        for script, kind in (
            (error_reply(400, "temperature must be 1"), APIRefused),
            (error_reply(500), APIUnavailable),
            (answers({"content": "par"}, "abort"), PolicyError),
        ):
            with pytest.raises(kind) as caught:
                await ask(far_side, script)
            assert not caught.value.by_policy
        assert (await ask(far_side, text_reply("ok"), omit=["temperature"])).content == "ok"
    assert "temperature" not in far_side.requests[-1].body


def tokens(ids: list[int], counted: int) -> Any:
    logprobs = {"content": [{"token": "t", "logprob": -0.5} for _ in ids]}
    return answers(
        {"content": "hi"},
        choice={"token_ids": ids, "logprobs": logprobs},
        prompt_token_ids=[1, 2],
        usage={"prompt_tokens": 2, "completion_tokens": counted},
    )


async def test_a_server_of_vllm_is_asked_for_ids_which_are_recorded() -> None:
    async with FakeOpenAIServer() as far_side:
        far_side.script += [VLLM]
        async with OpenAIPolicy(far_side.url) as policy:
            assert policy.model == "served"
            far_side.script += [tokens([5, 6], 2), tokens([5, 6], 2)]
            said = await policy.chat(ASK, (), SamplingParams(), rollout_id="r")
            cooler = await policy.chat(ASK, (), SamplingParams(temperature=0.5), rollout_id="r")
    assert far_side.requests[1].body["return_token_ids"] is True
    assert (said.prompt_ids, said.ids, said.logprobs) == ([1, 2], [5, 6], [-0.5, -0.5])
    assert (cooler.ids, cooler.logprobs) == ([5, 6], None), "nobody knows which distribution the log-probs are of"


async def test_ids_that_are_not_all_that_was_sampled_are_refused() -> None:
    async with FakeOpenAIServer() as far_side:
        with pytest.raises(TokenInvariantError, match=r"4 tokens, but reports 9 sampled"):
            await ask(far_side, tokens([5, 6, 7, 8], 9), token_ids=True)


async def test_the_only_model_is_found_and_one_of_several_must_be_named() -> None:
    async with FakeOpenAIServer() as far_side:
        far_side.default_reply = raw_reply(200, {"data": [{"id": "a"}, {"id": "b"}]})
        with pytest.raises(ConfigError, match="2 models: a, b"):
            await OpenAIPolicy(far_side.url).__aenter__()
    with pytest.raises(UsageError, match="not open"):
        await OpenAIPolicy(far_side.url, "m").chat(ASK, (), SamplingParams(), rollout_id="r")
    with pytest.raises(ConfigError, match="'api_key_env'"):
        OpenAIPolicy(far_side.url, "m", api_key="KEY")


async def test_cancelled_calls_leave_nothing_running_on_the_far_side() -> None:
    async with FakeOpenAIServer() as far_side:
        far_side.default_reply = never_replies
        async with OpenAIPolicy(far_side.url, "m", token_ids=False) as policy:
            running = [
                asyncio.create_task(policy.chat(ASK, (), SamplingParams(), rollout_id=str(number)))
                for number in range(50)
            ]
            await far_side.wait_until(lambda: far_side.open == 50)
            for call in running:
                call.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await far_side.wait_until(lambda: far_side.open == 0)
    assert len(far_side.requests) == 50


@af.tool
def calc(x: int) -> str:
    """Double a number.

    Args:
        x: the number.
    """
    return str(2 * x)


async def rolled_out(far_side: FakeOpenAIServer, tool_call_format: Any) -> af.Trajectory:
    agent = af.Agent(model="far", tools=[calc], tool_call_format=tool_call_format)
    async with OpenAIPolicy(far_side.url, "m", token_ids=False) as policy:
        result = await af.evaluate(agent, ["double 21"], policy=policy)
    return result.trajectories[0]


async def test_an_agent_is_evaluated_with_the_endpoints_own_calls() -> None:
    async with FakeOpenAIServer() as far_side:
        far_side.script += [
            answers({"content": "I see.", **calls('{"x": 21}')}, "tool_calls"),
            answers(calls("{", call_id="c2"), "tool_calls"),
            answers(calls("{}", name="guess", call_id="c3"), "tool_calls"),
            text_reply("42"),
        ]
        trajectory = await rolled_out(far_side, HermesFormat(uses_chat_template=True))
    assert trajectory.failure is None
    assert trajectory.response == "42"
    observations = [record.observation for turn in trajectory.turns for record in turn.tool_results]
    assert observations[0] == "42"
    assert "not a JSON object" in observations[1]
    assert "calc" in observations[2], "the tools there are"
    first, second, *_ = (request.body for request in far_side.requests)
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calc"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"x": 21}'}
    assert second["messages"][2]["tool_call_id"] == "c1"
    assert not trajectory.sequences
    assert exclusion_cause(trajectory) is not None


async def test_calls_written_as_text_are_read_as_the_agents_format_says() -> None:
    async with FakeOpenAIServer() as far_side:
        far_side.script += [text_reply("Action: calc[21]"), text_reply("42")]
        trajectory = await rolled_out(far_side, "action")
    assert [record.observation for record in trajectory.turns[0].tool_results] == ["42"]
    assert "tools" not in far_side.requests[0].body
    assert "Action: calc[" in far_side.requests[0].body["messages"][0]["content"]


async def test_a_conversation_too_long_for_the_endpoint_ends_the_rollout_as_length() -> None:
    async with FakeOpenAIServer() as far_side:
        far_side.default_reply = error_reply(400, "the request exceeds the available context size")
        trajectory = await rolled_out(far_side, "action")
    assert (trajectory.finish_reason, trajectory.failure) == ("length", None)


@pytest.mark.parametrize("reason", ["MAX_TOKENS", "Length", None, ""])
async def test_a_call_that_a_limit_may_have_cut_is_not_made_however_the_endpoint_says_so(reason: Any) -> None:
    used = {"prompt_tokens": 3, "completion_tokens": 50, "total_tokens": 53}
    async with FakeOpenAIServer() as far_side:
        said = await ask(far_side, answers(calls('{"x": 1}'), reason, usage=used), tools=[TOOL])
    assert (said.finish_reason, said.calls) == ("length", ())


@pytest.mark.parametrize(
    "logprobs",
    [
        [1],
        "x",
        {"content": [1, 2]},
        {"content": [{"logprob": True}] * 2},
        {"content": [{"logprob": 0.5}] * 2},
        {"content": [{"logprob": -(10**400)}] * 2},
        {"content": [{"logprob": -1}]},
        {"content": [None, None]},
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_log_probs_that_are_none_are_not_taken_for_some(logprobs: Any) -> None:
    async with FakeOpenAIServer() as far_side:
        script = answers({"content": "42"}, choice={"token_ids": [5, 6], "logprobs": logprobs}, prompt_token_ids=[1])
        said = await ask(far_side, script, token_ids=True)
    assert (said.ids, said.logprobs) == ([5, 6], None)


@pytest.mark.parametrize("ids", [[-5, 6], [2**40, 6], [True, False], [5.0, 6.0], "56"], ids=str)
async def test_ids_that_are_none_are_not_taken_for_some(ids: Any) -> None:
    async with FakeOpenAIServer() as far_side:
        logprobs = {"content": [{"logprob": -1.0}] * 2}
        script = answers({"content": "42"}, choice={"token_ids": ids, "logprobs": logprobs}, prompt_token_ids=[1])
        said = await ask(far_side, script, token_ids=True)
    assert (said.content, said.ids, said.logprobs) == ("42", None, None)


@pytest.mark.parametrize("models", [{"data": 5}, {"data": None}, {"data": [{}]}, {"data": [{"id": 5}]}, [1]], ids=str)
async def test_a_list_of_models_that_is_none_is_said_to_be_so(models: Any) -> None:
    async with FakeOpenAIServer() as far_side:
        far_side.script += [raw_reply(200, models)]
        with pytest.raises(APIMalformed, match="/models"):
            async with OpenAIPolicy(far_side.url, retries=0):
                pass


async def test_a_call_that_the_endpoint_parsed_for_a_format_of_text_is_a_failure_that_names_the_setting() -> None:
    async with FakeOpenAIServer() as far_side:
        far_side.script += [answers({"content": None, **calls('{"x": 21}')}, "tool_calls")]
        with pytest.raises(af.AgentFlyError, match=r"parsed a call of 'calc' itself.*tool_call_format='model'"):
            await rolled_out(far_side, HermesFormat())
