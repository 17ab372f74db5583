"""The record of a rollout with undelivered answers, and with several calls that continue the same one."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import numpy as np
import pytest

import agentfly as af
from agentfly.core.errors import PolicyError
from agentfly.core.trajectory import Failure, FinishReason, trajectory_json_line
from agentfly.gateway.limits import GatewayLimits
from agentfly.gateway.model_request import ModelRequest, RolloutSampling
from agentfly.gateway.request_codec import RequestCodec
from agentfly.gateway.session import ProgramSession, ThreadOffloader
from agentfly.policies.policy import Generation
from agentfly.policies.scripted import ByteTokenizer, ScriptedPolicy
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import rows_from_trajectories


def session_of(policy: ScriptedPolicy) -> ProgramSession:
    codec = RequestCodec.of(policy.tokenizer, None, history="keep")
    return ProgramSession(
        "r", policy, codec, sampling=RolloutSampling(), limits=GatewayLimits(max_calls=5_000), heavy=ThreadOffloader()
    )


def wanted(*words: str) -> ModelRequest:
    roles = ("user", "assistant")
    return ModelRequest([{"role": roles[n % 2], "content": text} for n, text in enumerate(words)], max_tokens=100)  # type: ignore[typeddict-item]


def finished(session: ProgramSession) -> af.Trajectory:
    return session.finish(task=None, reward=1.0, group_id="g", attempt=0, metrics={}, failure=None)


def numbered() -> ScriptedPolicy:
    counter = iter(range(100))
    return ScriptedPolicy(lambda prompt, turn: f"said {next(counter)}")


async def test_an_answer_that_did_not_arrive_is_given_to_whoever_asks_the_same_again() -> None:
    session = session_of(numbered())
    lost = await session.answer(wanted("q"))
    session.mark_undelivered(lost, b"the request", seen_in_part=False)
    assert session.undelivered_answer(b"another request") is None
    again = session.undelivered_answer(b"the request")
    assert again is lost
    assert session.undelivered_answer(b"the request") is None
    session.mark_delivered(again)
    session.mark_delivered(await session.answer(wanted("q", "said 0", "more")))
    trajectory = finished(session)
    assert [turn.text for turn in trajectory.turns] == ["said 0", "said 1"]
    assert len(trajectory.sequences) == 1


async def test_an_answer_that_nobody_got_is_not_recorded() -> None:
    session = session_of(numbered())
    session.mark_delivered(await session.answer(wanted("q")))
    session.mark_undelivered(await session.answer(wanted("q", "said 0", "more")), b"the request", seen_in_part=False)
    assert session._log.abandoned
    session.mark_delivered(await session.answer(wanted("q", "said 0", "more")))
    trajectory = finished(session)
    assert [turn.text for turn in trajectory.turns] == ["said 0", "said 2"]
    assert len(trajectory.sequences) == 1, "the sequence goes on as if the lost answer had never been"


async def test_a_program_that_goes_on_from_an_answer_has_got_it() -> None:
    session = session_of(numbered())
    session.mark_undelivered(await session.answer(wanted("q")), b"the request", seen_in_part=False)
    session.mark_delivered(await session.answer(wanted("q", "said 0", "more")))
    trajectory = finished(session)
    assert [turn.text for turn in trajectory.turns] == ["said 0", "said 1"]
    assert len(trajectory.sequences) == 1


async def test_of_two_answers_to_the_same_the_later_record_branches_off() -> None:
    session = session_of(numbered())
    session.mark_delivered(await session.answer(wanted("q")))
    late = await session.answer(wanted("q", "said 0", "more"))
    session.mark_delivered(await session.answer(wanted("q", "said 0", "more")))
    session.mark_delivered(late)
    session.mark_delivered(await session.answer(wanted("q", "said 0", "more", "said 1", "on")))
    trajectory = finished(session)
    assert [(turn.text, turn.sequence) for turn in trajectory.turns] == [
        ("said 0", 0),
        ("said 2", 0),
        ("said 1", 1),
        ("said 3", 1),
    ]
    first, second = trajectory.sequences
    shared = trajectory.turns[0].stop
    assert first.ids[:shared] == second.ids[:shared]
    assert (sum(first.loss_mask[:shared]) > 0, sum(second.loss_mask[:shared])) == (True, 0)


@pytest.mark.parametrize(
    "broken",
    [
        Generation([], [], "stop", 0),
        Generation([65, 257, 66, 257], [0.0] * 4, "stop", 0),
        Generation([65, 66, 257], [0.0] * 2, "stop", 0),
    ],
    ids=["nothing sampled", "sampled on after the end", "a log-prob missing"],
)
async def test_tokens_that_are_not_what_they_should_be_are_never_trained_on(broken: Generation) -> None:
    class Broken(ScriptedPolicy):
        async def generate(self, *args: Any, **more: Any) -> Generation:
            return broken

    session = session_of(Broken([]))
    session.mark_delivered(await session.answer(wanted("q")))
    trajectory = finished(session)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "TokenInvariantError"
    assert not trajectory.trainable


async def test_turns_follow_the_answer_they_go_on_from_and_new_conversations_all_that_was_answered_before() -> None:
    session = session_of(numbered())

    async def ask(*words: str) -> None:
        session.mark_delivered(await session.answer(wanted(*words)))

    await ask("q")
    await ask("q", "said 0", "one way")
    await ask("q", "said 0", "another way")
    await ask("q", "said 0", "another way", "said 2", "on")
    await ask("a conversation of its own")
    await ask("q")
    assert [turn.parent_turns for turn in finished(session).turns] == [(), (0,), (0,), (2,), (1, 3), ()]


async def test_conversations_at_a_time_do_not_follow_one_another() -> None:
    session = session_of(numbered())
    session.mark_delivered(await session.answer(wanted("q")))
    first, second = await session.answer(wanted("one")), await session.answer(wanted("another"))
    session.mark_delivered(second)
    session.mark_delivered(first)
    session.mark_delivered(await session.answer(wanted("sum up")))
    assert [turn.parent_turns for turn in finished(session).turns] == [(), (0,), (0,), (1, 2)]


async def test_branches_of_a_program_each_earn_the_whole_reward() -> None:
    session = session_of(numbered())
    for words in (["q"], *(["q", "said 0", way] for way in ("left", "right", "on"))):
        session.mark_delivered(await session.answer(wanted(*words)))
    rows = rows_from_trajectories([finished(session)]).rows
    values = [np.zeros(len(row.targets)) for row in rows]
    found = ALGORITHMS["gae"].estimate(AdvantageInputs(rows, values=values), AdvantageConfig(gae_lambda=0.95))
    assert found.returns is not None
    assert [returns[-1] for returns in found.returns] == [1.0] * 3


async def test_a_conversation_of_any_length_is_recorded() -> None:
    session, words = session_of(ScriptedPolicy(lambda prompt, turn: "hi", context_length=10**6)), ["q"]
    for _ in range(300):
        session.mark_delivered(await session.answer(wanted(*words)))
        words += ["hi", "on"]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)  # so that a depth of calls that grows with it is found out
    try:
        trajectory = finished(session)
    finally:
        sys.setrecursionlimit(limit)
    assert (len(trajectory.turns), len(trajectory.messages), len(trajectory.sequences)) == (300, 600, 1)


async def test_answers_to_identical_requests_that_were_seen_in_part_are_all_recorded() -> None:
    session = session_of(numbered())
    for _ in range(3):
        session.mark_undelivered(await session.answer(wanted("q")), b"the same", seen_in_part=True)
    session.mark_undelivered(await session.answer(wanted("q")), b"the same", seen_in_part=False)
    again = session.undelivered_answer(b"the same")
    assert again is not None
    session.mark_delivered(again)
    assert sorted(turn.text for turn in finished(session).turns) == ["said 0", "said 1", "said 2"]


async def test_an_answer_that_was_seen_in_part_is_recorded_unless_it_is_asked_for_again() -> None:
    session = session_of(numbered())
    for name in (b"first", b"second"):
        session.mark_undelivered(await session.answer(wanted(name.decode())), name, seen_in_part=True)
    session.mark_undelivered(await session.answer(wanted("never seen")), b"third", seen_in_part=False)
    again = session.undelivered_answer(b"second")
    assert again is not None
    session.mark_delivered(again)
    assert [turn.text for turn in finished(session).turns] == ["said 1", "said 0"]


async def test_an_answer_whose_past_the_template_rewrites_follows_the_same_turn() -> None:
    """Under ``rewrite`` it begins a sequence, and it is a continuation all the same."""

    class Forgetful(ByteTokenizer):
        def apply_chat_template(self, messages: Any, **more: Any) -> str:
            old = [{**one, "content": "(old)"} if one["role"] == "user" else one for one in messages[:-1]]
            return super().apply_chat_template([*old, messages[-1]], **more)  # type: ignore[list-item]

    policy = ScriptedPolicy(["one", "two"])
    policy.tokenizer = Forgetful()
    codec = RequestCodec.of(policy.tokenizer, None, history="rewrite")
    session = ProgramSession(
        "r", policy, codec, sampling=RolloutSampling(), limits=GatewayLimits(), heavy=ThreadOffloader()
    )
    session.mark_delivered(await session.answer(wanted("q")))
    session.mark_delivered(await session.answer(wanted("q", "one", "more")))
    trajectory = finished(session)
    assert [turn.sequence for turn in trajectory.turns] == [0, 1]
    assert [turn.parent_turns for turn in trajectory.turns] == [(), (0,)]


async def test_calls_with_arguments_that_json_cannot_hold_stay_in_the_text(tools: Any) -> None:
    deep = "[" * 100 + "]" * 100
    for arguments in ('{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', f'{{"a": {deep}}}'):
        text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        session = session_of(ScriptedPolicy([text]))
        exchange = await session.answer(ModelRequest([{"role": "user", "content": "q"}], tools, max_tokens=500))
        assert (exchange.calls, exchange.message["content"]) == ((), text)
        session.mark_delivered(exchange)
        trajectory_json_line(finished(session))


@pytest.mark.parametrize("failure", [None, Failure.of(PolicyError("the GPU fell off"))])
async def test_a_rollout_that_the_policy_did_not_spoil_or_had_no_part_in_has_no_reward(failure: Failure | None) -> None:
    session = session_of(numbered())
    if failure is not None:
        session.mark_delivered(await session.answer(wanted("q")))
    trajectory = session.finish(task=None, reward=1.0, group_id="g", attempt=0, metrics={}, failure=failure)
    assert (trajectory.finish_reason, trajectory.reward) == (FinishReason.FAILED, None)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == ("NoModelCalls" if failure is None else "PolicyError")
    assert trajectory.notes == ["The reward 1 does not count, because the policy did not cause the failure."]


async def test_a_rollout_whose_last_call_nobody_waited_for_did_not_end_with_an_answer() -> None:
    go = asyncio.Event()

    async def script(prompt: str, turn: int) -> str:
        if "wait" in prompt:
            await go.wait()
        return "said"

    for gives_up in (True, False):
        session = session_of(ScriptedPolicy(script))
        session.mark_delivered(await session.answer(wanted("q")))
        waiting = asyncio.create_task(session.answer(wanted("q", "said", "wait")))
        await asyncio.sleep(0)
        if gives_up:
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        trajectory = finished(session)
        await asyncio.gather(waiting, return_exceptions=True)
        assert (trajectory.finish_reason, trajectory.reward) == (FinishReason.WALL_TIME, 1.0)


async def test_a_call_that_lost_a_race_with_another_one_does_not_count_as_given_up() -> None:
    go = asyncio.Event()

    async def script(prompt: str, turn: int) -> str:
        if "slow" in prompt:
            await go.wait()
        return "said"

    session = session_of(ScriptedPolicy(script))
    slow = asyncio.create_task(session.answer(wanted("slow")))
    await asyncio.sleep(0)
    session.mark_delivered(await session.answer(wanted("quick")))
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert finished(session).finish_reason == FinishReason.ANSWERED


async def test_what_libraries_change_in_numbers_and_beside_calls_is_the_same_conversation(
    tools: Any, call: str
) -> None:
    floats = call.replace('"a": 1', '"a": 1.0')
    session = session_of(ScriptedPolicy([f"first {floats}", f"second {floats}", "end"]))
    asked: list[Any] = [{"role": "user", "content": "q"}]

    def shown(text: str) -> list[Any]:
        function = {"name": "add", "arguments": {"b": 2, "a": 1}}
        made = [{"id": "x", "type": "function", "function": function}]
        answer = {"role": "assistant", "content": text, "tool_calls": made}
        return [*asked, answer, {"role": "tool", "tool_call_id": "x", "content": "3"}]

    for _ in range(2):
        session.mark_delivered(await session.answer(ModelRequest(asked, tools, max_tokens=500)))
    session.mark_delivered(await session.answer(ModelRequest(shown("first"), tools, max_tokens=500)))
    assert finished(session).turns[2].parent_turns == (0,), (
        "the calls are equal, and what was said beside them tells which"
    )
