"""The gateway, driven by OpenAI's own client: what it answers, and that its record is exact to the token."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError

import agentfly as af
from agentfly.errors import ChatFormatError, ConfigError, PolicyError, UsageError
from agentfly.policies.openai import OpenAIPolicy
from agentfly.policies.scripted import ByteTokenizer, ScriptedPolicy
from agentfly.tokens import Origin
from agentfly.training.rows import rows_from_trajectories, untrainable_cause

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
ANSWER = "It is 3."
PNG = af.Image(b"picture", "image/png").url


@pytest.fixture(autouse=True)
def _streams_begin_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.gateway.http.EARLY_S", 0.05)
    monkeypatch.setattr("agentfly.gateway.http.PING_S", 0.05)


def sampled(trajectory: af.Trajectory) -> list[str]:
    """The text of each turn's tokens, and on the way: every sampled token stands in exactly one turn."""
    tokenizer = ScriptedPolicy([]).tokenizer
    texts = []
    counted: Counter[int] = Counter()
    for turn in trajectory.turns:
        sequence = trajectory.sequences[turn.sequence]
        assert set(sequence.origins[turn.start : turn.stop]) == {Origin.SAMPLED}
        counted[turn.sequence] += turn.stop - turn.start
        texts.append(tokenizer.decode(sequence.ids[turn.start : turn.stop]))
    assert [counted[index] for index in range(len(trajectory.sequences))] == [
        sequence.sampled_count for sequence in trajectory.sequences
    ]
    return texts


def text_of(trajectory: af.Trajectory, sequence: int = 0) -> str:
    return ScriptedPolicy([]).tokenizer.decode(trajectory.sequences[sequence].ids)


async def say(client: Any, messages: list[Any], **more: Any) -> Any:
    return (await client.chat.completions.create(model="any", messages=messages, **more)).choices[0]


async def with_a_tool(client: Any, tools: Any, **more: Any) -> list[Any]:
    """The loop of an ordinary agent program."""
    messages = [*ASK]
    while True:
        message = (await say(client, messages, tools=tools, **more)).message
        messages.append(message)
        if not message.tool_calls:
            return messages
        for made in message.tool_calls:
            arguments = json.loads(made.function.arguments)
            messages.append({"role": "tool", "tool_call_id": made.id, "content": str(sum(arguments.values()))})


async def streamed(client: Any, tools: Any) -> list[Any]:
    """The same by streams, put together again."""
    messages = [*ASK]
    while True:
        content, calls = "", {}
        stream = await client.chat.completions.create(model="any", messages=messages, tools=tools, stream=True)
        async for chunk in stream:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or ():
                    made = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                    made["id"] += part.id or ""
                    made["name"] += part.function.name or ""
                    made["arguments"] += part.function.arguments or ""
        messages.append(
            {
                "role": "assistant",
                "content": content or None,
                "tool_calls": [
                    {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                    for c in calls.values()
                ],
            }
        )
        if not calls:
            return messages
        for made in calls.values():
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": "3"})


@pytest.mark.parametrize("loop", [with_a_tool, streamed])
async def test_a_program_with_tools_gives_one_sequence_of_exactly_what_was_sampled(
    serving: Any, tools: Any, call: str, loop: Any
) -> None:
    async with serving([f"Let me see.\n{call}\n{call}", ANSWER]) as (gateway, client):
        messages = await loop(client(), tools)
        trajectory = gateway.finish("r.0", task={"prompt": "1+2?"}, reward=1)
    assert (trajectory.group_id, trajectory.attempt, trajectory.reward) == ("r", 0, 1.0)
    assert [json.loads(json.dumps(m["content"])) for m in messages if isinstance(m, dict) and m["role"] == "tool"] == [
        "3",
        "3",
    ]
    assert sampled(trajectory) == [f"Let me see.\n{call}\n{call}<|im_end|>", f"{ANSWER}<|im_end|>"]
    first, second = trajectory.turns
    assert [record.observation for record in first.results] == ["3", "3"]
    assert [record.call.arguments for record in first.results] == [{"a": 1, "b": 2}] * 2
    assert trajectory.response == second.text == ANSWER
    (sequence,) = trajectory.sequences
    assert text_of(trajectory).endswith(
        f"{call}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>"
    )
    (row,) = rows_from_trajectories([trajectory]).rows
    assert len(row.target_logprobs) == sequence.sampled_count == sum(sequence.loss_mask)
    assert af.Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))).sequences == trajectory.sequences


def as_libraries_change_it(message: dict[str, Any]) -> list[dict[str, Any]]:
    (made,) = message["tool_calls"]
    function = {**made["function"], "arguments": json.dumps(json.loads(made["function"]["arguments"]), indent=2)}
    changed = {"role": "assistant", "tool_calls": [{**made, "function": function, "index": 0}]}
    return [
        {**changed, "content": message["content"], "audio": None, "annotations": [], "refusal": None},
        {**changed, "content": None},
        {**changed, "content": ""},
        {**changed, "content": [{"type": "text", "text": message["content"] + "\n"}]},
        {**changed, "content": message["content"], "tool_calls": [{**made, "id": "another", "function": function}]},
    ]


async def test_what_client_libraries_change_in_messages_does_not_break_the_sequence(
    serving: Any, tools: Any, call: str
) -> None:
    async with serving([f"Let me see.\n{call}", ANSWER]) as (gateway, client):
        for number in range(5):
            answer = (await say(client(f"r.{number}"), ASK, tools=tools)).message.model_dump()
            shown = as_libraries_change_it(answer)[number]
            result = {"role": "tool", "tool_call_id": shown["tool_calls"][0]["id"], "content": "3"}
            await say(client(f"r.{number}"), [*ASK, shown, result], tools=[*reversed(tools)])
            trajectory = gateway.finish(f"r.{number}")
            assert len(trajectory.sequences) == 1, shown
            assert len(sampled(trajectory)) == 2


async def test_other_messages_begin_a_sequence_of_their_own(serving: Any, tools: Any) -> None:
    async with serving(lambda prompt, turn: f"said {turn}") as (gateway, client):
        talk = client()
        first = (await say(talk, ASK)).message
        await say(talk, [*ASK, {"role": "assistant", "content": "rewritten"}, *ASK])
        await say(talk, [*ASK, first, *ASK], tools=tools)
        await say(talk, [{"role": "system", "content": "be brief"}, *ASK, first, *ASK])
        trajectory = gateway.finish("r.0")
    assert [turn.sequence for turn in trajectory.turns] == [0, 1, 2, 3]
    sampled(trajectory)


async def test_going_on_from_an_earlier_answer_branches_with_the_same_tokens_and_trains_none_twice(
    serving: Any,
) -> None:
    async with serving(lambda prompt, turn: f"said {prompt.count('assistant')}") as (gateway, client):
        talk = client()
        said = (await say(talk, ASK)).message
        begun = [*ASK, said]
        await say(talk, [*begun, {"role": "user", "content": "one way"}])
        other = (await say(talk, [*begun, {"role": "user", "content": "another way"}])).message
        await say(talk, [*begun, {"role": "user", "content": "another way"}, other, *ASK])
        trajectory = gateway.finish("r.0", reward=0.5)
    assert [turn.sequence for turn in trajectory.turns] == [0, 0, 1, 1]
    assert sampled(trajectory) == [f"said {number}<|im_end|>" for number in (1, 2, 2, 3)]
    first, second = trajectory.sequences
    stop = trajectory.turns[0].stop
    assert first.ids[:stop] == second.ids[:stop]
    assert sum(second.loss_mask[:stop]) == 0
    assert len(rows_from_trajectories([trajectory]).rows) == 2


async def test_calls_at_a_time_each_get_a_sequence_and_one_of_those_that_continue_the_same_goes_on_in_it(
    serving: Any,
) -> None:
    together = asyncio.Event()
    waiting = 0

    async def script(prompt: str, turn: int) -> str:
        nonlocal waiting
        waiting += 1
        if waiting in (8, 11):
            together.set()
        await together.wait()
        return f"said {turn}"

    async with serving(script) as (gateway, client):
        talk = client()
        await asyncio.gather(*(say(talk, [{"role": "user", "content": f"q{n % 4}"}]) for n in range(8)))
        together.clear()
        reply = {"role": "assistant", "content": "said 0"}
        more = [{"role": "user", "content": "q0"}, reply, {"role": "user", "content": "and?"}]
        await asyncio.gather(*(say(talk, more) for _ in range(3)))
        trajectory = gateway.finish("r.0")
    assert len(trajectory.turns) == 11
    assert len(trajectory.sequences) == 9, "two of the three go on in the two that said the same, one branches off"
    sampled(trajectory)
    assert sorted(Counter(turn.sequence for turn in trajectory.turns).values()) == [1] * 7 + [2] * 2


class Unhurried(ScriptedPolicy):
    """Answers when it is told to, and counts."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.go = asyncio.Event()
        self.running = 0
        self.aborted = 0
        self.forgotten: list[str] = []

    async def generate(self, *args: Any, **more: Any) -> Any:
        self.running += 1
        try:
            await self.go.wait()
            return await super().generate(*args, **more)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    def forget(self, rollout_id: str) -> None:
        super().forget(rollout_id)
        self.forgotten.append(rollout_id)

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_programs_that_hang_up_abort_one_generation_each_and_can_ask_again(
    serving_any: Any, stream: bool
) -> None:
    async with Unhurried([ANSWER]) as policy, serving_any(policy) as (gateway, client):
        talk = client()
        calls = [asyncio.create_task(say_or_stream(talk, stream)) for _ in range(50)]
        await policy.until(lambda: policy.running == 50)
        if stream:
            await asyncio.sleep(0.2)  # until the header of the streams is sent
        for one in calls:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await policy.until(lambda: policy.running == 0)
        assert policy.aborted == 50
        policy.go.set()
        await say_or_stream(talk, stream)
        trajectory = gateway.finish("r.0", reward=1.0)
    assert sampled(trajectory) == [f"{ANSWER}<|im_end|>"]
    assert trajectory.failure is None


async def say_or_stream(client: Any, stream: bool) -> None:
    if not stream:
        await say(client, ASK)
        return
    async for _ in await client.chat.completions.create(model="m", messages=ASK, stream=True):
        pass


async def test_a_rollout_that_is_finished_ends_what_runs_in_it(serving_any: Any) -> None:
    async with Unhurried([ANSWER]) as policy, serving_any(policy) as (gateway, client):
        talk = client()
        running = asyncio.create_task(say(talk, ASK))
        await policy.until(lambda: policy.running == 1)
        trajectory = gateway.finish("r.0")
        for call in (running, say(talk, ASK)):
            with pytest.raises(APIStatusError) as caught:
                await call
            assert (caught.value.status_code, caught.value.code) == (409, "finished")
    assert (policy.aborted, trajectory.turns, untrainable_cause(trajectory)) == (1, [], "unscored")
    assert "r.0" in policy.forgotten


async def test_a_cut_answer_makes_no_calls_and_ends_where_the_limit_is(serving: Any, tools: Any, call: str) -> None:
    async with serving([call], max_tokens=40) as (gateway, client):
        for limits in ({"max_tokens": 12}, {"max_completion_tokens": 12}, {"max_tokens": 99}):
            choice = await say(client(), ASK, tools=tools, **limits)
            assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        trajectory = gateway.finish("r.0")
    assert [turn.stop - turn.start for turn in trajectory.turns] == [12, 12, 40]
    assert trajectory.finish == "length"


async def test_calls_are_read_only_where_the_program_takes_them(serving: Any, tools: Any, call: str) -> None:
    malformed = call.replace('"arguments"', '"arguments": 3, "x"')
    async with serving(lambda prompt, turn: malformed if "bad" in prompt else call + call) as (_, client):
        talk = client()
        for choice in (
            await say(talk, ASK, tools=tools, tool_choice="none"),
            await say(talk, ASK),
        ):
            assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
            assert choice.message.content == call + call
        assert len((await say(talk, ASK, tools=tools, tool_choice="auto")).message.tool_calls) == 2
        assert len((await say(talk, ASK, tools=tools, parallel_tool_calls=False)).message.tool_calls) == 1
        bad = (await say(talk, [{"role": "user", "content": "bad"}], tools=tools)).message
        assert (bad.tool_calls, bad.content) == (None, malformed)


async def test_ids_of_calls_are_numbered_through_a_conversation(serving: Any, tools: Any, call: str) -> None:
    async with serving([call, call + call, ANSWER]) as (_, client):
        messages = await with_a_tool(client(), tools)
    results = [message for message in messages if isinstance(message, dict) and message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["call_0", "call_1", "call_2"]


@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP", "later"]])
async def test_a_stop_text_ends_the_answer_and_the_record(serving: Any, stop: Any) -> None:
    async with serving(["thought STOP and later", ANSWER]) as (gateway, client):
        first = await say(client(), ASK, stop=stop)
        await say(client(), [*ASK, first.message, *ASK])
        trajectory = gateway.finish("r.0")
    assert (first.message.content, first.finish_reason) == ("thought ", "stop")
    assert sampled(trajectory) == ["thought STOP", f"{ANSWER}<|im_end|>"]
    assert "thought STOP<|im_end|>\n<|im_start|>user" in text_of(trajectory), "the end of turn is not sampled"


async def test_usage_and_logprobs_are_those_of_the_record(serving: Any) -> None:
    async with serving([ANSWER]) as (gateway, client):
        talk = client()
        whole = await talk.chat.completions.create(model="m", messages=ASK, logprobs=True)
        options = {"include_usage": True}
        stream = await talk.chat.completions.create(model="m", messages=ASK, stream=True, stream_options=options)
        *_, last = [chunk async for chunk in stream]
        trajectory = gateway.finish("r.0")
    turn = trajectory.turns[0]
    assert len(whole.choices[0].logprobs.content) == turn.stop - turn.start == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == turn.start
    assert last.usage.total_tokens == whole.usage.total_tokens == turn.stop


async def test_ids_are_told_to_programs_that_ask_so_that_an_agent_here_is_trainable_through_it(serving: Any) -> None:
    agent = af.Agent(model="m", max_turns=1, max_tokens_per_turn=50)
    async with serving([ANSWER]) as (gateway, _), OpenAIPolicy(gateway.url("r.0"), token_ids=True) as policy:
        result = await af.run(agent, ["1+2?"], policy=policy)
        recorded = gateway.finish("r.0")
    assert result.trajectories[0].sequences[0].ids == recorded.sequences[0].ids
    assert result.trajectories[0].sequences[0].loss_mask == recorded.sequences[0].loss_mask


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
            await say_or_stream(client(), True)
        assert gateway.finish("r.0").infrastructure_failed


async def test_the_gateways_temperature_replaces_the_programs(serving_any: Any) -> None:
    asked = []

    class Noting(ScriptedPolicy):
        async def generate(self, prompt_ids: Any, sampling: Any, **more: Any) -> Any:
            asked.append(sampling)
            return await super().generate(prompt_ids, sampling, **more)

    for temperature in (1.0, None):
        async with Noting([ANSWER]) as policy, serving_any(policy, temperature=temperature) as (_, client):
            more = {"extra_body": {"top_k": 7}}
            await say(client(), ASK, temperature=0, top_p=0.5, seed=4, max_tokens=99, **more)
    assert [one.temperature for one in asked] == [1.0, 0.0]
    assert (asked[0].top_p, asked[0].top_k, asked[0].seed, asked[0].max_tokens) == (0.5, 7, 4, 99)


async def test_where_the_template_knows_no_tools_a_system_message_tells_of_them(
    serving: Any, tools: Any, call: str
) -> None:
    async with serving([f"So:\n{call}", ANSWER], tool_call_format="hermes") as (gateway, client):
        messages = await with_a_tool(client(), tools)
        changed = [*ASK, {**messages[1].model_dump(), "content": "Else."}, messages[2]]
        await say(client(), changed, tools=tools)
        trajectory = gateway.finish("r.0")
    assert (messages[1].content, messages[-1].content) == ("So:", ANSWER)
    assert [turn.sequence for turn in trajectory.turns] == [0, 0, 1]
    begun = text_of(trajectory).partition("1+2?")[0]
    assert "You can use these tools" in begun
    assert '"name": "add"' in begun
    assert f"Else.\n{call}<|im_end|>" in text_of(trajectory, 1), "the call is written as the model would"


class NoTools(ByteTokenizer):
    """Of a model whose chat template knows of the user and the assistant, and of nobody else."""

    def render(self, messages: Any, **more: Any) -> str:
        if {"tool", "system"} & {message["role"] for message in messages}:
            raise ChatFormatError("only user and assistant")
        return super().render(messages, add_generation_prompt=more.get("add_generation_prompt", False))


async def test_a_model_whose_template_knows_no_tools_is_offered_them_all_the_same(
    serving_any: Any, tools: Any, call: str
) -> None:
    policy = ScriptedPolicy([f"{call}{call}", ANSWER])
    policy.tokenizer = NoTools()
    async with policy, serving_any(policy) as (gateway, client):
        messages = await with_a_tool(client(), tools)
        trajectory = gateway.finish("r.0")
    assert messages[-1].content == ANSWER
    (sequence,) = trajectory.sequences
    written = policy.tokenizer.decode(sequence.ids)
    assert written.startswith("<|im_start|>user\nYou can use these tools")
    assert written.count("<tool_response>\n3\n</tool_response>") == 2


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
