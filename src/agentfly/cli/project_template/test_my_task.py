"""Tests of the tool, the reward, and whole rollouts with scripted turns. No model is loaded."""

from __future__ import annotations

import asyncio

import my_task
import pytest

import agentfly as af


def play(script: list[str]) -> af.RunResult:
    """Run one rollout with scripted turns."""
    task = af.Task("Leave the tea. What about the rice?", {"item": "rice"})
    policy = af.ScriptedPolicy(script)
    return asyncio.run(af.run(my_task.agent("tiny"), [task], reward=my_task.right_shelf, policy=policy))


def call(item: str) -> str:
    """Return a turn that looks at a shelf, as the model writes it."""
    return my_task.agent("tiny").format.write("check", {"item": item})


def test_the_tool_looks_at_a_shelf_and_ends_the_task() -> None:
    result = my_task.check("rice")
    assert result.observation == "low"
    assert result.done


def test_the_tool_reports_a_missing_shelf() -> None:
    with pytest.raises(af.ToolError, match="no shelf of 'gold'"):
        my_task.check("gold")


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ([call("rice")], 1.0),
        ([call("tea")], 0.0),
        ([call("gold"), call("rice")], 1.0),  # it sees that there is no such shelf and tries another
        (["I would rather not look."], 0.0),
    ],
)
def test_the_reward_is_for_the_shelf_that_was_asked_for(script: list[str], reward: float) -> None:
    assert play(script).rewards == [reward]


def test_the_oracle_solves_every_task() -> None:
    policy = af.ScriptedPolicy(my_task.oracle)
    result = asyncio.run(af.run(my_task.agent("tiny"), my_task.tasks(), reward=my_task.right_shelf, policy=policy))
    assert set(result.rewards) == {1.0}


def test_no_task_is_both_trained_on_and_kept_back() -> None:
    trained, kept_back = ({task.id for task in tasks} for tasks in (my_task.train_tasks(), my_task.eval_tasks()))
    assert trained
    assert kept_back
    assert not trained & kept_back
