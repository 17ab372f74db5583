"""The gateway with OpenAI's own client: its answers, and a record that is exact to the token."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from openai import APIStatusError

import agentfly as af
from agentfly.core.errors import ChatFormatError, UsageError
from agentfly.core.tokens import Origin
from agentfly.policies.openai import OpenAIPolicy
from agentfly.policies.scripted import ByteTokenizer, ScriptedPolicy
from agentfly.training.rows import exclusion_cause, rows_from_trajectories

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
ANSWER = "It is 3."


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
        content, calls = "", {}  # type: ignore[var-annotated]
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
    assert [record.observation for record in first.tool_results] == ["3", "3"]
    assert [record.call.arguments for record in first.tool_results] == [{"a": 1, "b": 2}] * 2
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

    def release_rollout(self, rollout_id: str) -> None:
        super().release_rollout(rollout_id)
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
    assert (policy.aborted, trajectory.turns, exclusion_cause(trajectory)) == (1, [], "infrastructure")
    assert "r.0" in policy.forgotten


async def test_a_cut_answer_makes_no_calls_and_ends_where_the_limit_is(serving: Any, tools: Any, call: str) -> None:
    async with serving([call], max_tokens=40) as (gateway, client):
        for limits in ({"max_tokens": 12}, {"max_completion_tokens": 12}, {"max_tokens": 99}):
            choice = await say(client(), ASK, tools=tools, **limits)
            assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        trajectory = gateway.finish("r.0")
    assert [turn.stop - turn.start for turn in trajectory.turns] == [12, 12, 40]
    assert trajectory.finish_reason == "length"


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


async def test_ids_are_told_to_programs_that_ask_so_that_an_agent_here_is_trainable_through_it(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = af.Agent(model="m", max_turns=1, max_tokens_per_turn=50)
    async with serving([ANSWER]) as (gateway, _):
        end = gateway.open("r.0")
        monkeypatch.setenv("KEY", end.api_key)
        async with OpenAIPolicy(end.base_url, token_ids=True, api_key_env="KEY") as policy:
            result = await af.run(agent, ["1+2?"], policy=policy)
        recorded = gateway.finish("r.0")
    assert result.trajectories[0].sequences[0].ids == recorded.sequences[0].ids
    assert result.trajectories[0].sequences[0].loss_mask == recorded.sequences[0].loss_mask


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

    def apply_chat_template(self, messages: Any, **more: Any) -> str:
        if {"tool", "system"} & {message["role"] for message in messages}:
            raise ChatFormatError("only user and assistant")
        return super().apply_chat_template(messages, add_generation_prompt=more.get("add_generation_prompt", False))


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


@pytest.mark.parametrize(
    "said",
    [
        {"reward": float("nan")},
        {"reward": 1e31},
        {"reward": "1"},
        {"metrics": {"length": float("nan")}},
        {"metrics": {"length": "3"}},
        {"attempt": -1},
        {"attempt": "1"},
        {"error": "it could not run"},
    ],
)
async def test_what_no_record_can_hold_is_refused_and_the_rollout_stays_open(serving: Any, said: Any) -> None:
    async with serving(["hello"]) as (gateway, client):
        await client().chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(UsageError, match=rf"finish\({next(iter(said))}="):
            gateway.finish("r.0", **said)
        assert gateway.finish("r.0", reward=1, metrics={"length": 3}).metrics == {"length": 3.0}
