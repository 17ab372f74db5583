"""A rollout's record where answers do not reach the program, or more than one goes on from the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import agentfly as af
from agentfly.gateway.dialect import Dialect, Wanted
from agentfly.gateway.session import Session
from agentfly.policies.policy import Generation, SamplingParams
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.training.advantages import ALGORITHMS, Evidence
from agentfly.training.config.advantage_config import AdvantageConfig
from agentfly.training.rows import rows_from_trajectories


def session_of(policy: ScriptedPolicy) -> Session:
    return Session("r", policy, Dialect.of(policy.tokenizer, None, history="keep"))


def wanted(*words: str) -> Wanted:
    roles = ("user", "assistant")
    conversation: list[Any] = [{"role": roles[n % 2], "content": text} for n, text in enumerate(words)]
    return Wanted(conversation, [], SamplingParams(max_tokens=100, stop_ids=(257,)))


def finished(session: Session) -> af.Trajectory:
    return session.finish(task=None, reward=1.0, group_id="g", attempt=0, metrics={}, failure=None)


def numbered() -> ScriptedPolicy:
    counter = iter(range(100))
    return ScriptedPolicy(lambda prompt, turn: f"said {next(counter)}")


async def test_an_answer_that_did_not_arrive_is_given_to_whoever_asks_the_same_again() -> None:
    session = session_of(numbered())
    lost = await session.answer(wanted("q"))
    session.undelivered(lost, b"the request")
    assert session.kept(b"another request") is None
    again = session.kept(b"the request")
    assert again is lost
    assert session.kept(b"the request") is None
    session.delivered(again)
    session.delivered(await session.answer(wanted("q", "said 0", "more")))
    trajectory = finished(session)
    assert [turn.text for turn in trajectory.turns] == ["said 0", "said 1"]
    assert len(trajectory.sequences) == 1


async def test_an_answer_that_nobody_got_is_not_recorded() -> None:
    session = session_of(numbered())
    session.delivered(await session.answer(wanted("q")))
    session.undelivered(await session.answer(wanted("q", "said 0", "more")), b"the request")
    session.delivered(await session.answer(wanted("q", "said 0", "more")))
    trajectory = finished(session)
    assert [turn.text for turn in trajectory.turns] == ["said 0", "said 2"]
    assert len(trajectory.sequences) == 1, "the sequence goes on as if the lost answer had never been"


async def test_a_program_that_goes_on_from_an_answer_has_got_it() -> None:
    session = session_of(numbered())
    session.undelivered(await session.answer(wanted("q")), b"the request")
    session.delivered(await session.answer(wanted("q", "said 0", "more")))
    trajectory = finished(session)
    assert [turn.text for turn in trajectory.turns] == ["said 0", "said 1"]
    assert len(trajectory.sequences) == 1


async def test_of_two_answers_to_the_same_the_later_record_branches_off() -> None:
    session = session_of(numbered())
    session.delivered(await session.answer(wanted("q")))
    late = await session.answer(wanted("q", "said 0", "more"))
    session.delivered(await session.answer(wanted("q", "said 0", "more")))
    session.delivered(late)
    session.delivered(await session.answer(wanted("q", "said 0", "more", "said 1", "on")))
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
    session.delivered(await session.answer(wanted("q")))
    trajectory = finished(session)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "TokenInvariantError"
    assert not trajectory.trainable


async def test_turns_follow_the_answer_they_go_on_from_and_new_conversations_all_that_was_answered_before() -> None:
    session = session_of(numbered())

    async def ask(*words: str) -> None:
        session.delivered(await session.answer(wanted(*words)))

    await ask("q")
    await ask("q", "said 0", "one way")
    await ask("q", "said 0", "another way")
    await ask("q", "said 0", "another way", "said 2", "on")
    await ask("a conversation of its own")
    await ask("q")
    assert [turn.follows for turn in finished(session).turns] == [(), (0,), (0,), (2,), (1, 3), ()]


async def test_conversations_at_a_time_do_not_follow_one_another() -> None:
    session = session_of(numbered())
    session.delivered(await session.answer(wanted("q")))
    first, second = await session.answer(wanted("one")), await session.answer(wanted("another"))
    session.delivered(second)
    session.delivered(first)
    session.delivered(await session.answer(wanted("sum up")))
    assert [turn.follows for turn in finished(session).turns] == [(), (0,), (0,), (1, 2)]


async def test_branches_of_a_program_each_earn_the_whole_reward() -> None:
    session = session_of(numbered())
    for words in (["q"], *(["q", "said 0", way] for way in ("left", "right", "on"))):
        session.delivered(await session.answer(wanted(*words)))
    rows = rows_from_trajectories([finished(session)]).rows
    values = [np.zeros(len(row.targets)) for row in rows]
    found = ALGORITHMS["gae"].estimate(Evidence(rows, values=values), AdvantageConfig(gae_lambda=0.95))
    assert found.returns is not None
    assert [returns[-1] for returns in found.returns] == [1.0] * 3
