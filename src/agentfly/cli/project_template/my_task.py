"""my-task: look at the shelf that is asked for, and not at the one that is merely named.

All that a run needs is here, and config.yaml names it: the agent with its tool, the reward, the tasks, and an oracle
that proves that the tasks can be solved. Put your own in their place one by one; `agentfly check config.yaml` tells
whether they go together.
"""

from __future__ import annotations

import re

import agentfly as af

SHELVES = {
    "tea": "full",
    "rice": "low",
    "milk": "empty",
    "soap": "half",
    "salt": "full",
    "corn": "low",
    "sugar": "half",
    "honey": "empty",
}


@af.tool
def check(item: str) -> af.ToolResult:
    """Look how full the shelf of an item is.

    Args:
        item: what is on the shelf.
    """
    if item not in SHELVES:
        raise af.ToolError(f"There is no shelf of {item!r}.")  # the model is told, and may try again
    return af.ToolResult(SHELVES[item], done=True)  # one look ends the rollout


def agent(model: str) -> af.Agent:
    """The agent, with whatever model the configuration names."""
    return af.Agent(
        model=model,
        tools=[check],
        system_prompt="You keep the stockroom.",
        tool_prompt="",  # `tiny` was made to call a tool `check`, and reads no descriptions: leave out for other models
        max_turns=2,
        max_tokens_per_turn=96,
    )


@af.reward
def right_shelf(trajectory: af.Trajectory, item: str) -> dict[str, float]:
    """1 where the shelf that was asked for is the one that was looked at; `item` is a field of the task.

    Further numbers beside ``reward`` are shown in the metrics, as ``reward_metrics/called``.
    """
    calls = [result.call for turn in trajectory.turns for result in turn.results if result.failure is None]
    right = any(call.arguments == {"item": item} for call in calls)
    return {"reward": float(right), "called": float(bool(calls))}


def tasks() -> list[af.Task]:
    """Every pair of items: the model sees the prompt, tools and reward get the fields."""
    pairs = [(item, other) for item in SHELVES for other in SHELVES if item != other]
    return [af.Task(f"Leave the {other}. What about the {item}?", {"item": item}) for item, other in pairs]


def train_tasks() -> list[af.Task]:
    """What is trained on."""
    return [task for number, task in enumerate(tasks()) if number % 7]


def eval_tasks() -> list[af.Task]:
    """What is kept back: success is told of tasks that were never trained on."""
    return tasks()[::7]


def oracle(conversation: str, turn: int) -> str:
    """What an agent without fault writes, given the conversation so far: `agentfly check` plays it."""
    item = re.findall(r"What about the (\w+)\?", conversation)[-1]
    return agent("tiny").format.write("check", {"item": item})
