"""The stockroom: solvable only by its tools, with separate held-out tasks."""

from __future__ import annotations

import dataclasses

import pytest

from agentfly.agents.memory import FullHistory, Window
from agentfly.core.trajectory import FinishReason, Trajectory
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.containers.bubblewrap.backend import probe
from agentfly.rollouts.run import run
from agentfly.tasks.stockroom import (
    action_agent,
    eval_tasks,
    eval_tasks_with_examples,
    hermes_agent,
    stockroom_reward,
    train_tasks,
    train_tasks_with_examples,
)
from agentfly.tasks.stockroom.agent import oracle
from agentfly.tasks.stockroom.tasks import ITEMS, ORDERS

needs_sandbox = pytest.mark.skipif(probe().tier == "none", reason=" ".join(probe().missing))


async def play(*turns: tuple[str, dict[str, object]] | str) -> Trajectory:
    """Make these calls, or say these words, in the first task: the tea is asked for, and its shelf is low."""
    agent = hermes_agent()
    script = [turn if isinstance(turn, str) else agent.format.write(*turn) for turn in turns]
    task = train_tasks()[0]
    assert task["item"] == "tea"
    assert task["stock"]["tea"] == "low"
    result = await run(agent, [task], reward=stockroom_reward, policy=ScriptedPolicy(script))
    return result.trajectories[0]


def said(trajectory: Trajectory) -> list[str]:
    return [result.observation for turn in trajectory.turns for result in turn.tool_results]


# --- the tasks --------------------------------------------------------------------------------------------------------


def test_held_out_tasks_ask_for_items_at_levels_that_are_never_trained():
    trained = {(task["item"], task["stock"][task["item"]]) for task in train_tasks()}
    held_out = {(task["item"], task["stock"][task["item"]]) for task in eval_tasks()}
    assert not trained & held_out
    assert trained | held_out == {(item, level) for item in ITEMS for level in ORDERS}


def test_every_item_and_every_level_is_met_in_training_and_in_evaluation():
    for tasks in (train_tasks(), eval_tasks()):
        assert {task["item"] for task in tasks} == set(ITEMS)
        assert {task["stock"][task["item"]] for task in tasks} == set(ORDERS)


def test_some_held_out_tasks_are_worded_as_no_trained_one():
    def wording(prompt: str) -> str:
        return " ".join(word for word in prompt.split() if word.strip("?.") not in ITEMS)

    trained = {wording(str(task.prompt)) for task in train_tasks()}
    assert sum(wording(str(task.prompt)) not in trained for task in eval_tasks()) == len(ITEMS)


def test_a_task_tells_the_agent_nothing_of_any_level():
    for task in train_tasks_with_examples() + eval_tasks_with_examples():
        assert not any(level in str(task.messages[-1]["content"]) for level in ORDERS)
        assert task["item"] not in str(task.messages[:-1])


def test_tasks_are_the_same_each_time_and_have_names_of_their_own():
    tasks = [*train_tasks(), *eval_tasks()]
    assert tasks == [*train_tasks(), *eval_tasks()]
    assert len({task.id for task in tasks}) == len(tasks)


# --- the tools and the reward -----------------------------------------------------------------------------------------


@needs_sandbox
async def test_checking_the_right_shelf_and_ordering_what_the_shop_wants_is_a_success():
    trajectory = await play(("check", {"item": "tea"}), ("order", {"crates": 2}))
    assert said(trajectory) == ["low", "Ordered 2."]
    assert trajectory.finish_reason is FinishReason.DONE
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"success": 1.0, "right_shelf": 1.0}


@needs_sandbox
async def test_the_wrong_order_after_the_right_shelf_is_worth_less():
    trajectory = await play(("check", {"item": "tea"}), ("order", {"crates": 3}))
    assert trajectory.reward == pytest.approx(0.4)
    assert trajectory.metrics == {"success": 0.0, "right_shelf": 1.0}


@needs_sandbox
async def test_the_right_order_without_a_look_at_the_shelf_is_worth_nothing():
    trajectory = await play(("order", {"crates": 2}))
    assert trajectory.reward == 0.0


@needs_sandbox
async def test_looking_at_other_shelves_too_is_worth_nothing():
    trajectory = await play(("check", {"item": "rice"}), ("check", {"item": "tea"}), ("order", {"crates": 2}))
    assert trajectory.reward == 0.0


@needs_sandbox
async def test_an_agent_that_orders_nothing_is_worse_off_than_one_that_orders_wrongly():
    assert (await play("All is well.")).reward == pytest.approx(-0.2)
    trajectory = await play(("check", {"item": "tea"}), "It is low.")
    assert trajectory.reward == pytest.approx(0.2)


@needs_sandbox
@pytest.mark.parametrize("item", ["caviar", "../ordered", "-n", "$(echo tea)", "", "tea\nrice"])
async def test_a_missing_shelf_is_reported(item):
    trajectory = await play(("check", {"item": item}), ("order", {"crates": 2}))
    assert said(trajectory)[0] == f"There is no shelf of {item}."
    assert trajectory.reward == 0.0


# --- the oracle -------------------------------------------------------------------------------------------------------


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "tasks"),
    [
        (hermes_agent(), train_tasks() + eval_tasks()),
        (action_agent(), train_tasks_with_examples() + eval_tasks_with_examples()),
    ],
    ids=["hermes", "action"],
)
async def test_the_oracle_earns_the_full_reward_on_every_task(agent, tasks):
    policy = ScriptedPolicy(oracle(agent.format))
    result = await run(agent, tasks, reward=stockroom_reward, policy=policy)
    assert [reward for reward in result.rewards if reward != 1.0] == []
    assert len(result.rewards) == 120


@needs_sandbox
@pytest.mark.parametrize("memory", [FullHistory(), Window(turns=1)], ids=repr)
@pytest.mark.parametrize("strategy", ["chain", "step"])
async def test_the_oracle_earns_the_same_under_both_strategies_and_from_the_last_turn(strategy, memory):
    agent = dataclasses.replace(hermes_agent(), memory=memory)
    policy = ScriptedPolicy(oracle(agent.format))
    result = await run(agent, train_tasks()[:3], reward=stockroom_reward, policy=policy, strategy=strategy)
    assert result.rewards == [1.0] * 3
    assert [len(one.sequences) for one in result.trajectories] == [1 if strategy == "chain" else 2] * 3
