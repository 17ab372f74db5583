from __future__ import annotations

import asyncio
import pickle
import signal
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

import cloudpickle
import pytest

from agentfly.agents.reward import Reward, reward, tool_rewards
from agentfly.agents.reward_result import RewardResult
from agentfly.contexts.context import Context
from agentfly.core.errors import (
    AcquireTimeout,
    PromptTooLong,
    RewardDefinitionError,
    RewardError,
    ToolCrashed,
    ToolError,
)
from agentfly.core.messages import ToolCall
from agentfly.core.trajectory import Failure, ToolRecord, Trajectory, Turn


@reward
def exact(response: str, answer: str) -> float:
    return float(response == answer)


async def score_of(returned: Any, trajectory: Trajectory, context: Context) -> RewardResult:
    @reward(name="judge")
    async def judge() -> Any:
        return returned

    return await judge.score(trajectory, context)


async def test_a_reward_gets_what_it_asks_for_by_name(trajectory: Trajectory, context: Context) -> None:
    asked: dict[str, Any] = {}

    @reward
    def look(response, trajectory, task, prompt, context, ctx: Context, answer, level=0, colour="red"):
        asked.update(locals())
        return 1

    await look.score(trajectory, context)
    expected = {
        "response": "four",
        "trajectory": trajectory,
        "task": trajectory.task,
        "prompt": "What is 2 + 2?",
        "context": context,
        "ctx": context,
        "answer": "4",
        "level": 1,
        "colour": "red",
    }
    assert {name: asked[name] for name in expected} == expected


async def test_a_field_that_the_task_lacks_is_named_beside_those_it_has(
    trajectory: Trajectory, context: Context
) -> None:
    @reward
    def look(respones: str) -> float:
        return 1.0

    with pytest.raises(RewardDefinitionError, match=r"'respones'.*\['answer', 'level'\].*'response'"):
        await look.score(trajectory, context)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (0.5, RewardResult(0.5)),
        (1, RewardResult(1.0)),
        (True, RewardResult(1.0)),
        (Fraction(1, 4), RewardResult(0.25)),
        (RewardResult(1, {"length": 3}), RewardResult(1.0, {"length": 3.0})),
        ({"reward": 0, "exact": True}, RewardResult(0.0, {"exact": 1.0})),
    ],
)
async def test_a_score_is_a_number_with_or_without_metrics(
    returned: Any, expected: RewardResult, trajectory: Trajectory, context: Context
) -> None:
    result = await score_of(returned, trajectory, context)
    assert result == expected
    assert type(result.reward) is float


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "'judge' returned None.*Return a float"),
        (float("nan"), "float nan"),
        (float("-inf"), "float -inf"),
        ("1.0", "str '1.0'"),
        ([1.0], "list"),
        (Decimal("NaN"), "Decimal"),
        (1j, "complex"),
        ({"score": 1.0}, r"without the key 'reward', only \['score'\]"),
        ({"reward": None}, "returned None"),
        (RewardResult(float("nan")), "nan"),
        ({"reward": 1.0, "length": None}, "metric 'length' as None"),
        ({"reward": 1.0, "length": float("nan")}, "metric 'length' as nan"),
    ],
)
async def test_what_is_no_score_is_refused_and_never_becomes_zero(
    returned: Any, found: str, trajectory: Trajectory, context: Context
) -> None:
    with pytest.raises(RewardDefinitionError, match=found):
        await score_of(returned, trajectory, context)


@pytest.mark.parametrize("error", [ValueError("no JSON"), ToolError("no such file"), SystemExit(2)])
async def test_an_exception_leaves_the_trajectory_unscored_with_its_cause(
    error: BaseException, trajectory: Trajectory, context: Context
) -> None:
    @reward
    def judge() -> float:
        raise error

    with pytest.raises(RewardError, match=f"'judge' failed with {type(error).__name__}") as failed:
        await judge.score(trajectory, context)
    assert failed.value.__cause__ is error
    assert not Failure.of(failed.value).by_policy


@pytest.mark.parametrize(
    ("error", "caught"),
    [(ToolError("no such file"), "ToolError"), (ToolCrashed("x"), "ToolError"), (PromptTooLong("x"), "PromptTooLong")],
)
async def test_a_failure_that_the_policy_may_have_caused_says_how_to_give_it_a_score(
    error: Exception, caught: str, trajectory: Trajectory, context: Context
) -> None:
    @reward
    def judge() -> float:
        raise error

    with pytest.raises(RewardError, match=f"may have caused this: catch {caught} in the reward and give a score"):
        await judge.score(trajectory, context)


async def test_a_failure_of_the_rewards_own_is_not_laid_on_the_policy(trajectory: Trajectory, context: Context) -> None:
    @reward
    def judge() -> float:
        raise ValueError("no JSON")

    with pytest.raises(RewardError) as failed:
        await judge.score(trajectory, context)
    assert "policy" not in str(failed.value)


async def test_a_typed_failure_of_infrastructure_keeps_its_type(trajectory: Trajectory, context: Context) -> None:
    @reward
    async def judge() -> float:
        raise AcquireTimeout("the pool is full")

    with pytest.raises(AcquireTimeout):
        await judge.score(trajectory, context)


async def test_an_alarm_signal_in_a_sync_reward_is_reported(trajectory: Trajectory, context: Context) -> None:
    @reward
    def alarmed() -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    with pytest.raises(RewardError, match="ValueError: signal only works in main thread"):
        await alarmed.score(trajectory, context)


async def test_a_reward_that_hangs_ends_on_time_and_holds_up_nobody(trajectory: Trajectory, context: Context) -> None:
    ended = threading.Event()

    @reward(timeout_s=0.05)
    def hang() -> float:
        ended.wait()
        return 1.0

    outcomes = await asyncio.gather(
        *(hang.score(trajectory, context) for _ in range(5)),
        *(exact.score(trajectory, context) for _ in range(10)),
        return_exceptions=True,
    )
    ended.set()
    assert [type(outcome) for outcome in outcomes] == [RewardError] * 5 + [RewardResult] * 10
    assert "within 0.05 s" in str(outcomes[0])


def many(*answers: str) -> float:
    return float(len(answers))


def any_fields(**fields: Any) -> float:
    return float(len(fields))


def other_context(context: int) -> float:
    return context


@pytest.mark.parametrize(
    ("function", "cure"),
    [
        (many, "Write them out"),
        (any_fields, "Write them out"),
        (other_context, "another name"),
        (float, "not a function"),
        (exact, "not a function"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_refused_with_the_cure(function: Any, cure: str) -> None:
    with pytest.raises(RewardDefinitionError, match=cure):
        reward(function)


def test_a_time_limit_that_cannot_be_is_refused() -> None:
    with pytest.raises(RewardDefinitionError, match="above 0"):
        reward(timeout_s=-1)(many)


def test_a_reward_is_still_the_function() -> None:
    assert exact("4", "4") == 1.0
    assert exact.name == exact.__name__ == "exact"  # type: ignore[attr-defined]


async def test_rewards_pickle(trajectory: Trajectory, context: Context) -> None:
    bonus = 0.5

    @reward
    def local(level: int) -> float:
        return level + bonus

    assert pickle.loads(cloudpickle.dumps(exact)) is exact
    copy: Reward = pickle.loads(cloudpickle.dumps(local))
    assert (await copy.score(trajectory, context)).reward == 1.5


@pytest.mark.parametrize(("said", "score"), [([], 0.0), ([None], 0.0), ([0.5, None, -2.0, 1], -0.5)])
async def test_the_rewards_of_the_tools_are_summed_over_all_turns(
    said: list[float | None], score: float, trajectory: Trajectory, context: Context
) -> None:
    records = [ToolRecord(ToolCall("call_0", "check", {}), "", reward=one) for one in said]
    for number, results in enumerate((records[:1], records[1:])):
        trajectory.turns.append(Turn(number, 0, 0, 1, "", ended_by_model=True, tool_results=tuple(results)))
    assert await tool_rewards.score(trajectory, context) == RewardResult(score)


def test_the_rewards_of_the_tools_pickle_by_name() -> None:
    assert pickle.loads(cloudpickle.dumps(tool_rewards)) is tool_rewards


@pytest.mark.parametrize(
    "huge",
    [
        1e31,
        -1e308,
        {"reward": 1, "size": 1e31},
        10**400,
        Fraction(10**400),
        {"reward": 1, "size": 10**400},
        {"reward": 1, "text": "x" * 10**6},
    ],
)
async def test_what_is_too_much_for_a_number_or_a_message_is_refused_in_few_words(
    huge: Any, trajectory: Trajectory, context: Context
) -> None:
    with pytest.raises(RewardDefinitionError) as caught:
        await score_of(huge, trajectory, context)
    assert len(str(caught.value)) < 1000
