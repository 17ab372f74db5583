"""The depot: solvable only by its tools, with equal anchors for equal states."""

from __future__ import annotations

from collections import Counter

import pytest

from agentfly.core.trajectory import FinishReason, Trajectory
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.run import run
from agentfly.tasks.depot import depot_agent, depot_reward, eval_tasks, forgetful_depot_agent, train_tasks
from agentfly.tasks.depot.agent import PARAMETERS, oracle
from agentfly.tasks.depot.environment import ROOMS, WAYS, Depot, neighbours, ways_towards
from agentfly.tasks.depot.tasks import ITEMS


async def play(*actions: tuple[str, str], start: str = "hall") -> Trajectory:
    """Do these things in the errand that brings the tea from the loft to the dock."""
    agent = depot_agent()
    script = [agent.format.write(tool, {PARAMETERS[tool]: argument}) for tool, argument in actions]
    errand = {"item": "tea", "place": "loft", "goal": "dock", "start": start}
    (task,) = [task for task in train_tasks() + eval_tasks() if dict(task.fields) == errand]
    result = await run(agent, [task], reward=depot_reward, policy=ScriptedPolicy([*script, "That is all."]))
    return result.trajectories[0]


def said(trajectory: Trajectory) -> list[str]:
    return [result.observation for turn in trajectory.turns for result in turn.tool_results]


# --- the errands ------------------------------------------------------------------------------------------------------


def test_no_errand_is_both_trained_on_and_held_out_and_all_that_there_are_are_one_or_the_other():
    trained, held_out = ({task.prompt for task in tasks} for tasks in (train_tasks(), eval_tasks()))
    assert not trained & held_out
    assert len(trained | held_out) == len(ITEMS) * len(ROOMS) * (len(ROOMS) - 1) * len(ROOMS)
    assert (len(train_tasks()), len(eval_tasks())) == (168, 24)


@pytest.mark.parametrize("field", ["item", "place", "goal", "start"])
def test_the_parts_of_held_out_errands_occur_in_training(field):
    trained, held_out = (Counter(task[field] for task in tasks) for tasks in (train_tasks(), eval_tasks()))
    assert set(trained) == set(held_out) == set(ITEMS if field == "item" else ROOMS)


# --- the world --------------------------------------------------------------------------------------------------------


def test_doors_lead_back():
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}
    for room in ROOMS:
        for way, beside in neighbours(room).items():
            assert neighbours(beside)[back[way]] == room


def test_every_room_is_reached_from_every_room_by_going_nearer():
    for room in ROOMS:
        for goal in ROOMS:
            here, gone = room, 0
            while ways := ways_towards(here, goal):
                here, gone = neighbours(here)[ways[0]], gone + 1
            assert here == goal
            assert gone <= 2


def test_impossible_actions_change_nothing():
    depot = Depot()
    depot.reset("hall", "tea", "loft")
    before = depot.state()
    for action, argument in [("take", "tea"), ("put", "tea"), ("go", "south"), ("go", "up")]:
        depot.act(action, argument)
        assert depot.state() == before


def test_a_carried_item_moves_along_and_stays_where_it_is_put():
    depot = Depot()
    depot.reset("loft", "tea", "loft")
    assert depot.look() == "You are in the loft, and so is the tea."
    assert depot.take("tea") == "You are in the loft with the tea."
    assert depot.go("east") == "You are in the shed with the tea."
    assert depot.put("tea") == "You are in the shed, and so is the tea."
    assert depot.go("south") == "You are in the dock."


# --- rollouts ---------------------------------------------------------------------------------------------------------


async def test_the_right_way_ends_with_the_errand_and_is_worth_one():
    trajectory = await play(("go", "north"), ("take", "tea"), ("go", "east"), ("go", "south"), ("put", "tea"))
    assert (trajectory.reward, trajectory.metrics, trajectory.finish_reason) == (
        1.0,
        {"success": 1.0},
        FinishReason.DONE,
    )
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.0, 0.0, 1.0]


async def test_the_right_thing_in_the_wrong_room_is_worth_nothing():
    trajectory = await play(("go", "north"), ("take", "tea"), ("go", "east"), ("put", "tea"))
    assert (trajectory.reward, trajectory.metrics) == (0.0, {"success": 0.0})


async def test_a_policy_that_only_ever_goes_runs_no_errand():
    agent = depot_agent()
    ways = [agent.format.write("go", {"way": way}) for way in WAYS]
    policy = ScriptedPolicy(lambda conversation, turn: ways[turn % len(ways)])
    result = await run(agent, train_tasks()[::8], reward=depot_reward, policy=policy)
    assert set(result.rewards) == {0.0}


@pytest.mark.parametrize(
    ("agent", "strategy"), [(depot_agent(), "chain"), (forgetful_depot_agent(), "step")], ids=["chain", "step"]
)
async def test_the_oracle_runs_every_errand_in_the_fewest_turns(agent, strategy):
    policy = ScriptedPolicy(oracle(agent.format))
    tasks = train_tasks() + eval_tasks()
    result = await run(agent, tasks, reward=depot_reward, policy=policy, strategy=strategy)
    assert set(result.rewards) == {1.0}
    for trajectory in result.trajectories:
        task = trajectory.task
        there, onwards = shortest(task["start"], task["place"]), shortest(task["place"], task["goal"])
        assert len(trajectory.turns) == len(there) + 1 + len(onwards) + 1


def shortest(room: str, goal: str) -> list[str]:
    """The ways of a shortest walk."""
    if not (ways := ways_towards(room, goal)):
        return []
    return [ways[0], *shortest(neighbours(room)[ways[0]], goal)]


# --- anchors ----------------------------------------------------------------------------------------------------------


async def test_equal_states_have_equal_anchors_whatever_led_there():
    # By the east, against a wall and back; and straight. Both then stand in the loft, with the tea lying there.
    winding = await play(("go", "east"), ("go", "south"), ("go", "west"), ("go", "north"), ("take", "tea"))
    straight = await play(("go", "north"), ("take", "tea"))
    assert said(winding)[1].startswith("No door.")
    at_the_tea, with_the_tea = straight.turns[1].anchor, straight.turns[2].anchor
    assert winding.turns[4].anchor == at_the_tea
    assert winding.turns[5].anchor == with_the_tea
    assert at_the_tea != with_the_tea


async def test_running_against_a_wall_leads_into_the_same_state():
    trajectory = await play(("go", "east"), ("go", "south"), ("go", "south"))
    assert trajectory.turns[1].anchor == trajectory.turns[2].anchor == trajectory.turns[3].anchor
