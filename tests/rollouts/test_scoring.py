"""Scoring of rollouts: scores of turns and of the whole, and reasons to leave a rollout unscored."""

import contextlib
import math
from typing import Annotated

import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import group_reward
from agentfly.agents.reward import reward
from agentfly.agents.reward_result import RewardResult
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.agents.user_function import FromTask
from agentfly.agents.weighted_reward import weighted
from agentfly.contexts.context import Context
from agentfly.core.errors import Boundary, LeaseExpired
from agentfly.core.events import EventStream, RewardFinished
from agentfly.core.task import Task
from agentfly.core.trajectory import Failure, FinishReason, Trajectory, Turn, load_trajectories, save_trajectories
from agentfly.formats.toolcalls.hermes import HermesFormat
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.run import run
from agentfly.rollouts.scoring import group_scorer, score_group, score_rollout
from agentfly.testing.fake_resource import FakeBackend, FakeSpec


@tool
async def move(worth: float) -> ToolResult:
    """Move.

    Args:
        worth: what it is worth.
    """
    return ToolResult("moved", reward=worth)


def calls(*worth):
    return "".join(HermesFormat().write("move", {"worth": one}) for one in worth)


async def play(script, reward=None):
    agent = Agent(model="scripted", tools=[move])
    result = await run(agent, ["go"], reward=reward, policy=ScriptedPolicy(script))
    return result.trajectories[0]


async def test_a_turn_is_worth_what_its_tools_said_and_the_rollout_all_of_it():
    trajectory = await play([calls(0.5, -2), calls(1), "end"])
    assert [turn.reward for turn in trajectory.turns] == [-1.5, 1.0, None]
    assert trajectory.reward == -0.5


async def test_a_reward_says_what_the_rollout_is_worth_and_leaves_the_turns_to_the_tools():
    @reward
    def fixed() -> float:
        return 7

    trajectory = await play([calls(0.5), "end"], fixed)
    assert trajectory.reward == 7.0
    assert [turn.reward for turn in trajectory.turns] == [0.5, None]


async def test_a_response_is_what_was_said_and_thoughts_are_kept_apart_from_it(tmp_path):
    heard = []

    @reward
    def right(response: str) -> float:
        heard.append(response)
        return float("5" in response)

    sampled = "<think>\n4, or 5?\n</think>\n\nIt is 4."
    trajectory = await play([calls(0), sampled], right)
    assert (heard, trajectory.reward) == (["It is 4."], 0.0)
    turn = trajectory.turns[-1]
    assert (turn.text, turn.visible_text, turn.reasoning) == (sampled, "It is 4.", "4, or 5?")
    save_trajectories([trajectory], tmp_path / "kept.jsonl")
    [kept] = load_trajectories(tmp_path / "kept.jsonl")
    assert kept.response == "It is 4."
    assert (await play(["<think>It may be 5"], right)).response == ""


async def test_a_reward_that_speaks_of_turns_replaces_what_the_tools_said():
    @reward(per_turn=True)
    def talkative(turn) -> float | None:
        return float(len(turn.tool_results)) or None

    trajectory = await play([calls(0.5, 0.5), "end"], weighted({talkative: 10}))
    assert trajectory.reward == 20.0
    assert [turn.reward for turn in trajectory.turns] == [20.0, None]
    assert trajectory.metrics == {"talkative": 2.0}


async def test_what_a_reward_waits_for_says_nothing_of_how_a_rollout_that_begins_would_fare(engine):
    noticed = []

    @contextlib.contextmanager
    def notice(specs, scope):
        noticed.append(specs)
        yield

    @reward
    async def judged(context: Context) -> float:
        await context.acquire(FakeSpec(name="judge"))
        return 1.0

    [one] = attempts("a")
    context = Context(one, engine, wait_observer=notice)
    await score_rollout(one, judged, context, EventStream())
    assert (one.reward, noticed) == (1.0, [])
    await context.acquire(FakeSpec(name="tool's"))
    assert len(noticed) == 1
    await context.close()


# --- what user code writes into --------------------------------------------------------------------------------------


@tool
async def take(items: Annotated[list[int], FromTask()], context: Context) -> int:
    """Take an item."""
    items.pop()
    context.task["items"].append(0)
    return len(items) + len(context.task["items"])


def write_into(task, record=None):
    task.fields["items"].clear()
    task.fields["more"] = 1
    task.prompt[0]["content"] = "another"
    if record is not None:
        record.turns.clear()
        record.sequences.clear()
        record.messages[0].clear()
        record.metrics["kind"] = "none"
        record.task.fields.clear()


@reward
def careless(trajectory: Trajectory, task: Task, prompt, items: list[int]) -> float:
    seen = len(items), len(task["items"]), len(trajectory.task["items"])
    items.clear()
    prompt.append("no message")
    write_into(task, trajectory)
    return float(sum(seen))


@group_reward
def careless_group(trajectories, task: Task, items: list[int]) -> list[float]:
    scores = [float(len(items) + len(task["items"]) + len(one.task["items"])) for one in trajectories]
    items.clear()
    write_into(task)
    for one in trajectories:
        write_into(one.task, one)
    return scores


def needed(task):
    write_into(task)
    return []


@pytest.mark.slow
@pytest.mark.parametrize("scoring", [careless, careless_group])
async def test_what_tools_and_rewards_write_reaches_no_other_attempt_and_no_record(scoring):
    task = Task([{"role": "user", "content": "take"}], {"items": [1, 2, 3]})
    agent = Agent(model="scripted", tools=[take])
    twice = HermesFormat().write("take", {}) * 2
    result = await run(agent, [task], reward=scoring, attempts=3, policy=ScriptedPolicy([twice, "end"] * 3))
    for trajectory in result.trajectories:
        assert [call.observation for call in trajectory.turns[0].tool_results] == ["6", "6"]
        assert (trajectory.reward, trajectory.metrics) == (9.0, {})
        assert (len(trajectory.turns), len(trajectory.sequences), trajectory.messages[-1]["content"]) == (2, 1, "end")
        assert trajectory.task == Task([{"role": "user", "content": "take"}], {"items": [1, 2, 3]})


async def test_a_function_that_says_what_a_task_needs_changes_no_task():
    needy = tool(resources=needed)(take.function)
    task = Task([{"role": "user", "content": "take"}], {"items": [1, 2, 3]})
    result = await run(Agent(model="scripted", tools=[needy]), [task], policy=ScriptedPolicy(["end"]))
    assert result.trajectories[0].task.to_row()["items"] == [1, 2, 3]


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTFLY_STATE_DIR", str(tmp_path / "state"))
    async with ResourceEngine() as engine:
        yield engine


def attempts(*texts):
    task = Task("Which is longest?", {"unit": 2})
    made = []
    for number, text in enumerate(texts):
        turn = Turn(0, 0, 0, 1, text, ended_by_model=True)
        made.append(Trajectory(f"g.{number}", "g", task, number, turns=[turn], finish_reason=FinishReason.ANSWERED))
    return made


def spoil(trajectory):
    trajectory.finish_reason = FinishReason.FAILED
    trajectory.failure = Failure.of(OSError("no space"), Boundary.MACHINE)


@group_reward
def longest(responses: list[str], unit: int) -> list[float]:
    return [len(response) / unit for response in responses]


async def test_attempts_are_scored_together_whatever_the_order_of_their_ends(engine):
    told, events = [], EventStream()  # type: ignore[var-annotated]
    short, middle, long = attempts("a", "bb", "cccc")
    with events.subscribed(told.append):
        await score_group([long, short, middle], longest, engine, events)
    assert [one.reward for one in (short, middle, long)] == [0.5, 1.0, 2.0]
    scores = {event.rollout_id: event.reward for event in told if isinstance(event, RewardFinished)}
    assert scores == {"g.0": 0.5, "g.1": 1.0, "g.2": 2.0}


async def test_attempts_that_are_not_sound_are_left_out_and_shift_no_score(engine):
    broken, first, silent, cancelled, last = attempts("zzzzzz", "a", "", "zzz", "cccc")
    spoil(broken)
    silent.turns.clear()
    cancelled.finish_reason = FinishReason.CANCELLED
    await score_group([broken, first, silent, cancelled, last], longest, engine, EventStream())
    assert [one.reward for one in (broken, first, silent, cancelled, last)] == [None, 0.5, None, None, 2.0]
    assert first.reward_failure is last.reward_failure is silent.reward_failure is None


async def test_of_a_group_without_a_sound_attempt_nothing_is_asked(engine):
    @group_reward
    def never() -> list[float]:
        raise AssertionError("asked")

    [broken] = attempts("a")
    spoil(broken)
    await score_group([broken], never, engine, EventStream())
    assert (broken.reward, broken.reward_failure) == (None, None)


@pytest.mark.parametrize("gone", [None, math.nan, "1.0"])
async def test_an_attempt_without_a_score_is_unscored_and_never_zero(gone, engine):
    @group_reward
    def uneven() -> list:
        return [1, gone, 0, RewardResult(2, {"wins": 3}, [0.5])]

    group = attempts("a", "b", "c", "d")
    await score_group(group, uneven, engine, EventStream())
    assert [one.reward for one in group] == [1.0, None, 0.0, 2.0]
    assert [one.reward_failure and one.reward_failure.kind for one in group] == [
        None,
        None if gone is None else "RewardDefinitionError",
        None,
        None,
    ]
    assert (group[3].metrics, group[3].turns[0].reward) == ({"wins": 3.0}, 0.5)


async def test_a_group_whose_reward_fails_is_unscored_as_a_whole_with_the_cause(engine):
    @group_reward
    def failing() -> list[float]:
        raise OSError("judge unreachable")

    group = attempts("a", "b")
    await score_group(group, failing, engine, EventStream())
    for one in group:
        assert one.reward is None
        assert one.reward_failure.boundary is Boundary.REWARD
        assert "judge unreachable" in one.reward_failure.message


async def test_a_group_has_what_is_new_or_shared_and_not_what_the_attempts_had(engine):
    world = FakeBackend()
    judge, new = FakeSpec(world=world, name="judge"), FakeSpec(world=world, name="new")

    @group_reward
    async def looking(context: Context) -> list[float]:
        await context.acquire(judge, scope="global")
        await context.acquire(new, scope="call")
        async with context.lease(new):
            assert len(world.alive) == 3
        with pytest.raises(LeaseExpired, match=r"new was asked for as the agent left it.*has given it back"):
            await context.acquire(new)
        return [1.0]

    [one] = attempts("a")
    await score_group([one], looking, engine, EventStream())
    assert (one.reward, one.reward_failure) == (1.0, None)


async def test_only_group_rewards_score_groups(engine):
    assert group_scorer(None, engine, EventStream()) is None
    assert group_scorer(reward(lambda: 1.0), engine, EventStream()) is None
    group = attempts("a", "bb")
    await group_scorer(longest, engine, EventStream())(group)
    assert [one.reward for one in group] == [0.5, 1.0]
