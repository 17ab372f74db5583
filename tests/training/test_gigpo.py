"""GiGPO: values computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agentfly.agents.agent import Agent
from agentfly.agents.tool_decorator import tool
from agentfly.agents.tool_result import ToolResult
from agentfly.policies.scripted import ScriptedPolicy
from agentfly.rollouts.run import run
from agentfly.rollouts.trajectory_recorder import anchor_hash
from agentfly.training.advantages import ALGORITHMS, AdvantageInputs
from agentfly.training.advantages.gigpo import group_similar_texts
from agentfly.training.config.groups import AdvantageConfig
from agentfly.training.rows import Row, RowTurn, rows_from_trajectories

Steps = Sequence[tuple[str, float | None]]
"""The turns of a trajectory: the state each was taken in and its own reward."""

A: Steps = [("s0", 0.0), ("s1", 0.0), ("s0", 1.0)]
B: Steps = [("s0", 0.0), ("s2", 0.0)]


def turn(index: int, start: int, state: str, reward: float | None, **others: Any) -> RowTurn:
    anchor = anchor_hash(state) if state else ""
    return RowTurn(index, start, start + 2, reward, anchor, state=state, **others)


def row(group: str, rollout: str, reward: float, turns: Sequence[RowTurn], **others: Any) -> Row:
    mask = [0] * (max(one.stop for one in turns) + 1)
    for one in turns:
        mask[one.start : one.stop] = [1] * (one.stop - one.start)
    length = len(mask)
    logprobs = [-0.5 if sampled else math.nan for sampled in mask]
    return Row([7] * length, mask, logprobs, [0] * length, group, rollout, reward, False, turns=tuple(turns), **others)


def rows_of(rollout: str, reward: float, steps: Steps, strategy: str, group: str = "g") -> list[Row]:
    """Return a trajectory whose turns have two tokens each, as one row or as one row per turn."""
    if strategy == "chain":
        turns = [turn(number, 1 + 4 * number, *step) for number, step in enumerate(steps)]
        return [row(group, rollout, reward, turns)]
    return [row(group, rollout, reward, [turn(number, 1, *step)]) for number, step in enumerate(steps)]


def values_of(rows: Sequence[Row], rollout: str, **config: Any) -> list[float]:
    """The advantage of each turn of a trajectory, which all tokens of the turn must share."""
    settings = {"step_discount": 0.5, "divide_by_std": False, **config}
    advantages = ALGORITHMS["gigpo"].estimate(AdvantageInputs(rows), AdvantageConfig(**settings)).values
    found: dict[int, set[float]] = {}
    for one, values in zip(rows, advantages, strict=True):
        if one.rollout_id == rollout:
            for position, value in zip(one.targets, values.tolist(), strict=True):
                [index] = [part.index for part in one.turns if part.start <= position < part.stop]
                found.setdefault(index, set()).add(value)
    assert all(len(values) == 1 for values in found.values())
    return [values.pop() for _, values in sorted(found.items())]


@pytest.mark.parametrize("strategy", ["chain", "step"])
def test_episode_and_step_advantages_match_a_manual_calculation_for_both_strategies(strategy: str) -> None:
    # Returns, with discount 1/2: A 1/4, 1/2, 1; B 0, 0. In s0 their mean is (1/4 + 1 + 0) / 3 = 5/12; s1 and s2 are
    # alone. The baseline of the episodes is 1/2, one for each trajectory, and not 3/5, one for each turn.
    rows = rows_of("a", 1.0, A, strategy) + rows_of("b", 0.0, B, strategy)
    assert values_of(rows, "a") == pytest.approx([0.5 - 1 / 6, 0.5, 0.5 + 7 / 12])
    assert values_of(rows, "b") == pytest.approx([-0.5 - 5 / 12, -0.5])


def test_step_weight_scales_only_the_step_advantage() -> None:
    rows = rows_of("a", 1.0, A, "chain") + rows_of("b", 0.0, B, "chain")
    assert values_of(rows, "a", step_weight=0.0) == [0.5, 0.5, 0.5]
    assert values_of(rows, "a", step_weight=2.0) == pytest.approx([0.5 - 1 / 3, 0.5, 0.5 + 7 / 6])


@pytest.mark.parametrize("strategy", ["chain", "step"])
def test_with_the_standard_deviation_each_group_is_divided_by_its_own(strategy: str) -> None:
    rows = rows_of("a", 1.0, A, strategy) + rows_of("b", 0.0, B, strategy)
    of_episodes = math.sqrt(1 / 2)  # of 1, 0 with the divisor 1
    of_steps = np.std([1 / 4, 1.0, 0.0], ddof=1)
    expected = [0.5 / of_episodes - 1 / 6 / of_steps, 0.5 / of_episodes, 0.5 / of_episodes + 7 / 12 / of_steps]
    assert values_of(rows, "a", divide_by_std=True) == pytest.approx(expected)
    assert values_of(rows, "b", divide_by_std=True)[1] == pytest.approx(-0.5 / of_episodes)


def test_without_rewards_of_turns_the_trajectorys_reward_is_its_last_turns() -> None:
    steps = [("s0", None), ("s1", None), ("s0", None)]
    rows = rows_of("a", 1.0, steps, "chain") + rows_of("b", 0.0, [("s0", None), ("s2", None)], "chain")
    assert values_of(rows, "a") == pytest.approx([0.5 - 1 / 6, 0.5, 0.5 + 7 / 12])


def test_turns_without_reward_count_as_zero_where_another_turn_of_the_group_has_one() -> None:
    rows = rows_of("a", 5.0, [("s0", None), ("s1", 1.0)], "chain") + rows_of("b", 3.0, [("s0", None)], "chain")
    # Returns in s0: 1/2 and 0. The trajectories' rewards count in the episode advantage alone: 5 and 3 about 4.
    assert values_of(rows, "a") == pytest.approx([1.25, 1.0])
    assert values_of(rows, "b") == pytest.approx([-1.25])


def test_equal_states_of_different_tasks_are_different_anchors() -> None:
    alone = rows_of("a", 1.0, A, "chain") + rows_of("b", 0.0, B, "chain")
    others = [*rows_of("c", 9.0, [("s0", 9.0)], "chain", "h"), *rows_of("d", 2.0, [("s0", 2.0)], "chain", "h")]
    assert values_of([*others, *alone], "a") == values_of(alone, "a")


def test_turns_of_unknown_state_are_never_in_the_same_one() -> None:
    rows = rows_of("a", 1.0, [("", 1.0)], "chain") + rows_of("b", 0.0, [("", 0.0)], "chain")
    assert values_of(rows, "a") == [0.5]


def test_turns_of_memory_and_of_subagents_are_no_steps_and_have_the_episodes_advantage() -> None:
    own = row("g", "a", 1.0, [turn(0, 1, "s0", None), turn(3, 5, "s0", None)])
    memory = row("g", "a", 1.0, [turn(1, 1, "s0", None, kind="memory")])
    subagent = row("g", "a", 1.0, [turn(2, 1, "s0", None)], agent="helper")
    rows = [own, memory, subagent, *rows_of("b", 0.0, [("s0", None)], "chain")]
    # Returns in s0: 1/2, 1 and 0, of mean 1/2: what stands between the two steps takes no time.
    assert values_of(rows, "a") == pytest.approx([0.5, 0.5, 0.5, 1.0])


def test_similar_states_are_one_where_that_is_asked_for() -> None:
    here, there = "You stand in the kitchen. Time: 10", "You stand in the kitchen. Time: 11"
    rows = rows_of("a", 1.0, [(here, 1.0)], "chain") + rows_of("b", 0.0, [(there, 0.0)], "chain")
    assert values_of(rows, "a") == [0.5]
    assert values_of(rows, "a", anchor_match="similar") == [1.0]
    assert values_of(rows, "a", anchor_match="similar", anchor_similarity=0.99) == [0.5]


def test_long_texts_are_compared_as_closely_as_short_ones() -> None:
    long = "the quick brown fox jumps over the lazy dog; " * 20
    assert group_similar_texts([long, "x" + long, long[::-1], long], 0.95) == [[0, 1, 3], [2]]
    assert group_similar_texts([long, long.replace("quick", "swift")], 0.95) == [[0], [1]]


def test_a_text_joins_the_first_group_whose_first_text_is_similar() -> None:
    assert group_similar_texts(["aaaaaaaa", "aaaaaabb", "aaaabbbb", "cccccccc"], 0.75) == [[0, 1], [2], [3]]


@tool
def move(place: str) -> ToolResult:
    """Go somewhere.

    Args:
        place: where to go.
    """
    return ToolResult(f"You are in the {place}.", reward=float(place == "cellar"), done=place == "cellar")


def go(place: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'move', 'arguments': {'place': place}})}</tool_call>"


SCRIPTS = [[go("hall"), go("kitchen"), go("hall"), go("cellar")], [go("hall"), go("kitchen"), "I give up."]]


async def played(strategy: str) -> list[Row]:
    trajectories = []
    for attempt, script in enumerate(SCRIPTS):
        agent = Agent(model="scripted", tools=[move], tool_call_format="hermes", max_turns=5)
        result = await run(agent, ["go"], policy=ScriptedPolicy(script), strategy=strategy)
        [trajectory] = result.trajectories
        trajectory.group_id, trajectory.rollout_id, trajectory.reward = "g", "ab"[attempt], 1.0 - attempt
        trajectories.append(trajectory)
    return list(rows_from_trajectories(trajectories).rows)


async def test_the_strategies_chain_and_step_give_equal_advantages() -> None:
    chain, step = await played("chain"), await played("step")
    assert [len(chain), len(step)] == [2, 7]
    # States: the opening (returns 1/8, 0), the hall after the opening (1/4, 0) and again (1), the kitchen (1/2, 0).
    expected = [0.5 + 1 / 16, 0.5 + 1 / 4 - 5 / 12, 0.5 + 1 / 4, 0.5 + 7 / 12]
    assert values_of(chain, "a") == values_of(step, "a") == pytest.approx(expected)
    assert values_of(chain, "b") == values_of(step, "b") == pytest.approx([-0.5 - 1 / 16, -0.5 - 5 / 12, -0.5 - 1 / 4])
    similar = {"anchor_match": "similar", "anchor_similarity": 1.0}
    assert values_of(chain, "a", **similar) == values_of(chain, "a")
